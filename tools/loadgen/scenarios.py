"""Scenarios in which every client stays to the end."""

from __future__ import annotations

from itertools import pairwise
from typing import Any

import trio

from tools.loadgen.bench import Bench
from tools.loadgen.outcome import Call, Outcome
from tools.loadgen.prompts import made_up
from tools.loadgen.stats import percentile, spread

# One entry per request in turn: different samplers, each with a seed and a penalty of its own, two
# with log-probabilities.  Every server understands the fields (or ignores them).
SAMPLING_MIX: tuple[tuple[str, dict[str, Any]], ...] = (
    ("logprobs", {"temperature": 0.8, "seed": 7, "logprobs": True, "top_logprobs": 5}),
    ("top_p", {"temperature": 0.7, "top_p": 0.9, "seed": 8, "presence_penalty": 0.3}),
    ("top_k", {"temperature": 1.0, "top_k": 40, "seed": 9, "frequency_penalty": 0.2}),
    ("min_p", {"temperature": 0.9, "min_p": 0.1, "seed": 10, "repetition_penalty": 1.05}),
    ("xtc", {"temperature": 1.1, "xtc_probability": 0.3, "seed": 11, "presence_penalty": 0.1}),
    ("bias", {"temperature": 0.5, "logit_bias": {"100": -5}, "seed": 12}),
    ("hot", {"temperature": 1.5, "top_k": 100, "top_p": 0.8, "seed": 13, "frequency_penalty": 0.5}),
    (
        "all",
        {"temperature": 0.6, "top_p": 0.95, "top_k": 50, "min_p": 0.02, "seed": 14}
        | {"repetition_penalty": 1.1, "frequency_penalty": 0.1, "presence_penalty": 0.1}
        | {"logprobs": True, "top_logprobs": 5},
    ),
)


async def uniform(bench: Bench) -> None:
    """The same kind of request again and again."""
    concurrency = bench.options.concurrency
    count, tokens = bench.requests(concurrency), bench.max_tokens(64)
    bench.progress.start("uniform", count)
    calls = (bench.call(bench.prompt(i), max_tokens=tokens) for i in range(count))
    await bench.run_calls(calls, concurrency=min(concurrency, count))


async def mixed(bench: Bench) -> None:
    """Different sampling parameters side by side."""
    count, tokens = bench.requests(4 * bench.options.concurrency), bench.max_tokens(64)
    bench.progress.start("mixed", count)
    calls = []
    for i in range(count):
        label, sampling = SAMPLING_MIX[i % len(SAMPLING_MIX)]
        calls.append(bench.call(bench.prompt(i), max_tokens=tokens, sampling=sampling, label=label))
    await bench.run_calls(calls, concurrency=min(bench.options.concurrency, count))
    bench.details["by_sampling"] = {
        label: _small_summary([o for o in bench.outcomes if o.label == label])
        for label, _ in SAMPLING_MIX
    }


async def shared_prefix(bench: Bench) -> None:
    """A first request fills the cache; the others start with the same words."""
    options = bench.options
    count, tokens = bench.requests(2 * options.concurrency), bench.max_tokens(16)
    words = max(options.prompt_tokens, 2)
    prefix = options.prompt or made_up(words, bench.rng)
    bench.progress.start("shared-prefix", count + 1)
    cold = bench.call(f"{prefix}\n\nQuestion 0?", max_tokens=tokens, label="cold")
    await bench.run_calls([cold], concurrency=1)
    calls = (
        bench.call(f"{prefix}\n\nQuestion {i}?", max_tokens=tokens, label="warm")
        for i in range(1, count + 1)
    )
    await bench.run_calls(calls, concurrency=min(options.concurrency, count))
    for label in ("cold", "warm"):
        bench.details[label] = _small_summary([o for o in bench.outcomes if o.label == label])


async def overload(bench: Bench) -> None:
    """A burst: everything at once.  Each request must be served or refused with 503."""
    count, tokens = bench.requests(128), bench.max_tokens(16)
    bench.progress.start("overload", count)
    calls = [bench.call(bench.prompt(i), max_tokens=tokens) for i in range(count)]
    await bench.run_calls(calls, concurrency=count)
    refused = [o for o in bench.outcomes if o.status == 503]
    without_hint = sum(o.retry_after is None for o in refused)
    bench.details["served"] = sum(o.ok for o in bench.outcomes)
    bench.details["refused"] = len(refused)
    bench.details["refusal_ms"] = spread([o.ended - o.started for o in refused], scale=1000)
    if without_hint:
        bench.problems.append(f"{without_hint} of {len(refused)} refusals have no Retry-After")
    if not bench.details["served"]:
        bench.problems.append("nothing was served")


async def long_prompt(bench: Bench) -> None:
    """Streams decode while a long prompt arrives: how long do they stand still?"""
    options = bench.options
    streams, tokens = options.concurrency, bench.max_tokens(256)
    bench.progress.start("long-prompt", streams + 1)
    words = options.long_prompt_tokens
    intruder = bench.call(
        bench.prompt(streams, words=words), max_tokens=8, label="intruder", stream=True
    )
    # The prompt arrives when every stream has had an eighth of its tokens.
    ready = Barrier(streams)
    calls = [
        bench.call(
            bench.prompt(i),
            max_tokens=tokens,
            stream=True,
            label=f"stream {i}",
            events_wanted=max(2, tokens // 8),
            on_events=ready.arrive,
        )
        for i in range(streams)
    ]
    async with trio.open_nursery() as nursery:
        nursery.start_soon(_after, ready, bench, intruder)
        await bench.run_calls(calls, concurrency=streams)
        ready.open.set()  # streams that failed early must not keep the prompt waiting
    _report_stalls(bench)


class Barrier:
    """Opens when ``count`` streams have arrived."""

    def __init__(self, count: int) -> None:
        self.open = trio.Event()
        self._missing = count

    def arrive(self) -> None:
        self._missing -= 1
        if self._missing == 0:
            self.open.set()


async def _after(ready: Barrier, bench: Bench, call: Call) -> None:
    await ready.open.wait()
    await bench.perform(call)


def _report_stalls(bench: Bench) -> None:
    found = [o for o in bench.outcomes if o.label == "intruder"]
    arrived = found[0] if found else None
    if arrived is None or arrived.ttft is None:
        bench.problems.append("the long prompt was not answered")
        return
    begin, end = arrived.started, arrived.started + arrived.ttft
    rows = []
    for outcome in bench.outcomes:
        row = _stall(outcome, begin, end)
        if outcome.label != "intruder" and row is not None:
            rows.append(row)
    bench.details["prompt_tokens"] = arrived.prompt_tokens
    bench.details["intruder_ttft_ms"] = round(1000 * arrived.ttft, 2)
    bench.details["stalls"] = rows
    bench.details["worst_stall_ms"] = max((r["stall_ms"] for r in rows), default=None)
    bench.details["worst_stall_steps"] = max((r["stall_steps"] for r in rows), default=None)
    if len(rows) < bench.options.concurrency:
        bench.problems.append(
            "not every stream was decoding when the long prompt came; raise --max-tokens"
        )


def _stall(outcome: Outcome, begin: float, end: float) -> dict[str, Any] | None:
    """The longest gap that touches [begin, end], and the median gap before the prompt came."""
    stamps = outcome.stamps
    pairs = list(pairwise(stamps))
    during = [b - a for a, b in pairs if b > begin and a < end]
    before = [b - a for a, b in pairs if b <= begin]
    if not during or not before:
        return None
    usual = percentile(before, 50)
    return {
        "label": outcome.label,
        "stall_ms": round(1000 * max(during), 2),
        "usual_itl_ms": round(1000 * usual, 3),
        "stall_steps": round(max(during) / usual, 2) if usual > 0 else None,
    }


def _small_summary(outcomes: list[Outcome]) -> dict[str, Any]:
    ttft = [o.ttft for o in outcomes if o.ttft is not None]
    return {
        "requests": len(outcomes),
        "ok": sum(o.ok for o in outcomes),
        "tokens": sum(o.tokens for o in outcomes),
        "ttft_ms": spread(ttft, scale=1000),
        "itl_ms": spread([gap for o in outcomes for gap in o.gaps], scale=1000),
    }
