"""Journals written by hand, one entry per line: ``time actor event field field ...``.

A field is a Python literal without spaces, or else a plain word; ``-`` is the empty string.
"""

from __future__ import annotations

import ast
from typing import Any

from actors.kit.journal import EVENTS, Entry


def parse(text: str) -> list[Entry]:
    return [_entry(line) for line in text.strip().splitlines() if line.strip()]


def _entry(line: str) -> Entry:
    time_s, actor, event, *words = line.split()
    assert len(words) == len(EVENTS[event]), line
    return Entry(float(time_s), actor, event, tuple(map(_field, words)))


def _field(word: str) -> Any:
    if word == "-":
        return ""
    try:
        return ast.literal_eval(word)
    except (ValueError, SyntaxError):
        return word


def edit(text: str, old: str, new: str) -> str:
    """``text`` with its line or lines ``old`` replaced, spaces at the ends aside."""
    lines = [line.strip() for line in text.strip().splitlines()]
    gone = [line.strip() for line in old.strip().splitlines()]
    for start in range(len(lines) - len(gone) + 1):
        if lines[start : start + len(gone)] == gone:
            lines[start : start + len(gone)] = [line.strip() for line in new.strip().splitlines()]
            return "\n".join(lines)
    raise AssertionError(f"no such line: {old}")


def cut(text: str, old: str) -> str:
    return edit(text, old, "")


def after(text: str, line: str, new: str) -> str:
    return edit(text, line, f"{line}\n{new}")
