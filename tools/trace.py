"""Read a journal: as one timeline, or as the story of each request.

    python -m tools.trace journal.jsonl [--request ID] [--requests]

A journal file has one JSON array per line: time in seconds, actor, event, fields.
``python -m tools.sim --seed N --dump journal.jsonl`` writes one.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any

from actors.kit.journal import EVENTS, Entry


def to_jsonl(entries: Iterable[Entry]) -> Iterator[str]:
    """One line per entry."""
    for entry in entries:
        row = [entry.time_s, entry.actor, entry.event, list(entry.fields)]
        yield json.dumps(row, ensure_ascii=False)


def from_jsonl(lines: Iterable[str]) -> list[Entry]:
    """The inverse of ``to_jsonl``.  Raises ValueError for what is no journal."""
    entries = []
    for number, line in enumerate(lines, start=1):
        if not line.strip():
            continue
        try:
            time_s, actor, event, fields = json.loads(line)
            entry = Entry(float(time_s), actor, event, tuple(map(_tuples, fields)))
        except (ValueError, TypeError) as error:
            raise ValueError(f"line {number} is no journal entry: {line.strip()[:80]}") from error
        if len(entry.fields) != len(EVENTS.get(entry.event, ())):
            raise ValueError(f"line {number}: unknown event or wrong fields: {entry.event}")
        entries.append(entry)
    return entries


def _tuples(value: Any) -> Any:
    """JSON has no tuples, journals have no lists."""
    return tuple(map(_tuples, value)) if isinstance(value, list) else value


def requests_of(entry: Entry) -> tuple[str, ...]:
    """The requests that an entry is about."""
    if entry.event == "planned":
        return (*entry["decode"], *(rid for rid, _ in entry["prefill"]))
    return (entry["rid"],) if "rid" in EVENTS[entry.event] else ()


def describe(entry: Entry, about: str | None = None) -> str:
    """Event and fields; ``about`` leaves out the request that a line is known to be about."""
    names = EVENTS[entry.event]
    shown = [
        f"{name}={_short(value)}"
        for name, value in zip(names, entry.fields, strict=True)
        if not (name == "rid" and value == about)
    ]
    return f"{entry.event} {' '.join(shown)}".rstrip()


def _short(value: Any) -> str:
    if isinstance(value, tuple):
        return f"[{','.join(map(_short, value))}]"
    return repr(value) if value == "" or not str(value).isprintable() else str(value)


def timeline(entries: Sequence[Entry]) -> Iterator[str]:
    """One line per entry; the time is shown when it changes."""
    before: float | None = None
    for entry in entries:
        shown = "" if entry.time_s == before else f"{entry.time_s:.4f}"
        before = entry.time_s
        yield f"{shown:>10}  {entry.actor:<17} {describe(entry)}"


def story(entries: Sequence[Entry], request_id: str) -> Iterator[str]:
    """What happened to one request, with the time since it was first heard of."""
    own = [entry for entry in entries if request_id in requests_of(entry)]
    if not own:
        return
    start_s = own[0].time_s
    yield f"request {request_id} (from {start_s:.4f} s)"
    for entry in own:
        yield f"{entry.time_s - start_s:>+10.4f}  {entry.actor:<17} {_part(entry, request_id)}"


def _part(entry: Entry, request_id: str) -> str:
    if entry.event != "planned":
        return describe(entry, about=request_id)
    chunk = next((count for rid, count in entry["prefill"] if rid == request_id), None)
    what = "decode" if chunk is None else f"prefill {chunk} tokens"
    return f"step {entry['step']}: {what}, {entry['tokens']} tokens in all"


def stories(entries: Sequence[Entry]) -> Iterator[str]:
    """All requests in the order in which they came."""
    seen = dict.fromkeys(rid for entry in entries for rid in requests_of(entry))
    for request_id in seen:
        yield from story(entries, request_id)
        yield ""


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="tools.trace", description="Read a journal.")
    parser.add_argument("file", type=Path, help="journal, one JSON array per line")
    parser.add_argument("--request", metavar="ID", help="only this request")
    parser.add_argument("--requests", action="store_true", help="one story per request")
    arguments = parser.parse_args(argv)
    try:
        with arguments.file.open(encoding="utf-8") as lines:
            entries = from_jsonl(lines)
    except (OSError, ValueError) as error:
        print(f"tools.trace: error: {error}", file=sys.stderr)
        return 2
    if arguments.request is not None:
        shown = list(story(entries, arguments.request))
        if not shown:
            print(f"tools.trace: error: no request {arguments.request}", file=sys.stderr)
            return 2
    else:
        shown = list(stories(entries) if arguments.requests else timeline(entries))
    print("\n".join(shown))
    return 0


if __name__ == "__main__":
    sys.exit(main())
