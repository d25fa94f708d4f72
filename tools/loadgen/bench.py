"""What every scenario works with: a client, options, and bounded parallel requests."""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field
from random import Random
from typing import Any

import trio

from tools.loadgen.client import Client
from tools.loadgen.options import Options
from tools.loadgen.outcome import Call, Outcome
from tools.loadgen.prompts import made_up, numbered
from tools.loadgen.target import chat_body


class Progress:
    """Where progress goes; the default shows nothing."""

    def start(self, title: str, total: int) -> None: ...

    def advance(self, outcome: Outcome) -> None: ...


@dataclass(slots=True, kw_only=True)
class Bench:
    """One run of one scenario.

    ``outcomes`` are the measured requests, in the order of their ends; ``details`` what only this
    scenario reports; ``problems`` the checks that did not hold, one line each.
    """

    client: Client
    options: Options
    model: str
    progress: Progress = field(default_factory=Progress)
    outcomes: list[Outcome] = field(default_factory=list)
    details: dict[str, Any] = field(default_factory=dict)
    problems: list[str] = field(default_factory=list)
    measured_s: float = 0.0
    rng: Random = field(init=False)

    def __post_init__(self) -> None:
        self.rng = Random(self.options.seed)

    def requests(self, default: int) -> int:
        return default if self.options.requests is None else self.options.requests

    def max_tokens(self, default: int) -> int:
        return default if self.options.max_tokens is None else self.options.max_tokens

    def prompt(self, index: int, *, words: int | None = None) -> str:
        """The prompt of request ``index``."""
        options = self.options
        rng = Random(f"{options.seed} {0 if options.same_prompt else index}")
        text = options.prompt or made_up(words or options.prompt_tokens, rng)
        return text if options.same_prompt else numbered(text, index)

    def call(
        self,
        prompt: str,
        *,
        max_tokens: int,
        stream: bool | None = None,
        sampling: dict[str, Any] | None = None,
        **more: Any,
    ) -> Call:
        """A chat request with the options of the command line; ``more`` are fields of Call."""
        extra: dict[str, Any] = {"temperature": self.options.temperature}
        if self.options.ignore_eos:
            extra["ignore_eos"] = True
        extra |= sampling or {}
        streams = self.options.stream if stream is None else stream
        body = chat_body(self.model, prompt, max_tokens=max_tokens, stream=streams, extra=extra)
        return Call(body=body, stream=streams, **more)

    async def perform(self, call: Call) -> Outcome:
        """Make and record one request."""
        outcome = await self.client.perform(call)
        self.outcomes.append(outcome)
        self.progress.advance(outcome)
        return outcome

    async def run_calls(
        self,
        calls: Iterable[Call],
        *,
        concurrency: int,
        after_each: Callable[[], None] | None = None,
    ) -> None:
        """All ``calls``, ``concurrency`` at a time, each begun when a former one ends."""
        source: Iterator[Call] = iter(calls)
        began = time.perf_counter()

        async def worker() -> None:
            for call in source:
                await self.perform(call)
                if after_each is not None:
                    after_each()

        try:
            async with trio.open_nursery() as nursery:
                for _ in range(concurrency):
                    nursery.start_soon(worker)
        finally:
            self.measured_s += time.perf_counter() - began

    async def get_json(self, path: str) -> Any:
        """The JSON answer to a GET, or None when there is none (other servers lack some routes)."""
        outcome = await self.client.get(path)
        if outcome.status not in (200, 503):
            return None
        try:
            return json.loads(outcome.body)
        except ValueError:
            return None


async def wait_until_idle(bench: Bench) -> None:
    """Check that the server holds nothing any more; adds to ``problems`` if it does.

    Servers without ``/slots`` and without counts in ``/health`` are only asked whether they live.
    """
    within_s = bench.options.idle_within_s
    busy = ["no answer"]
    health = slots = None
    began = time.perf_counter()
    with trio.move_on_after(within_s):
        while True:
            health, slots = await bench.get_json("/health"), await bench.get_json("/slots")
            busy = _busy_signs(health, slots)
            if not busy:
                break
            await trio.sleep(0.05)
    bench.details["idle_after_s"] = round(time.perf_counter() - began, 3)
    bench.details["health_after"] = health
    bench.details["slots_after"] = slots
    bench.problems += [f"not idle after {within_s:g} s: {sign}" for sign in busy]


def _busy_signs(health: Any, slots: Any) -> list[str]:
    signs: list[str] = []
    if not isinstance(health, dict):
        signs.append("/health does not answer")
        health = {}
    batch = health.get("batch")
    if isinstance(batch, dict):
        counts = {name: batch.get(name) for name in ("active_sequences", "queue_depth")}
        signs += [f"/health {name} is {count}" for name, count in counts.items() if count]
    if isinstance(slots, list):
        working = [s for s in slots if isinstance(s, dict) and s.get("is_processing")]
        if working:
            signs.append(f"/slots shows {len(working)} at work")
    return signs
