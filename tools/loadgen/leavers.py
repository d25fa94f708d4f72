"""Scenarios in which clients leave early."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from random import Random
from typing import Any

import trio

from tools.loadgen.bench import Bench, wait_until_idle
from tools.loadgen.outcome import Call, Leave
from tools.loadgen.proc import ProcessSample, sample_process
from tools.loadgen.scenarios import Barrier
from tools.loadgen.stats import percentile, spread

SOAK_WARM_UP = 1000
SOAK_GROWTH = 0.05
FEW_CONNECTIONS = 6  # by which two moments of the same load may differ
SOAK_SAMPLES = 100


def random_call(
    bench: Bench, rng: Random, index: int, *, max_tokens: int, share: float, quick_s: float
) -> Call:
    """A request whose client leaves with probability ``share`` at a random moment.

    Moments: within ``quick_s`` seconds of sending (mostly before the first byte), after a random
    number of tokens, or during a plain (not streamed) answer.
    """
    prompt = bench.prompt(index)
    if rng.random() >= share:
        return bench.call(prompt, max_tokens=max_tokens, stream=rng.random() < 0.8, label="stays")
    leave = rng.choice(list(Leave))
    moment = rng.choice(("before first byte", "mid-stream", "plain"))
    if moment == "mid-stream":
        return bench.call(
            prompt,
            max_tokens=max_tokens,
            stream=True,
            label=f"{moment}, {leave}",
            leave=leave,
            leave_after_events=rng.randint(1, max(1, max_tokens - 1)),
        )
    # Squaring puts most of the moments near zero, where queueing and prefill happen.
    return bench.call(
        prompt,
        max_tokens=max_tokens,
        stream=moment != "plain",
        label=f"{moment}, {leave}",
        leave=leave,
        leave_after_s=max(0.0005, quick_s * rng.random() ** 2),
    )


async def cancel(bench: Bench) -> None:
    """Clients leave at random moments; afterwards nothing may be left in the server."""
    options = bench.options
    count, tokens = bench.requests(16 * options.concurrency), bench.max_tokens(32)
    share = 0.7 if options.cancel_share is None else options.cancel_share
    bench.progress.start("cancel", count)
    calls = (
        random_call(bench, bench.rng, i, max_tokens=tokens, share=share, quick_s=0.3)
        for i in range(count)
    )
    await bench.run_calls(calls, concurrency=min(options.concurrency, count))
    _report_leavers(bench)
    await wait_until_idle(bench)
    after = await bench.client.perform(bench.call("Hello", max_tokens=4, label="after"))
    if not after.ok:
        bench.problems.append(f"a request after the cancellations failed: {after.error}")


async def newcomer(bench: Bench) -> None:
    """Time to first token when 8 long streams were dropped just before, against an idle server."""
    options = bench.options
    streams, rounds = options.concurrency, options.repeats
    bench.progress.start("newcomer", 2 * rounds)
    # The first request of a fresh server pays for lazy set-up: it is not measured.
    await bench.client.perform(_short(bench, 0, "warm-up"))
    for i in range(rounds):
        await bench.run_calls([_short(bench, 1 + i, "idle")], concurrency=1)
    first = 1 + rounds
    for _ in range(rounds):
        await _drop_streams(bench, streams, first)
        first += streams
        await bench.run_calls([_short(bench, first, "newcomer")], concurrency=1)
        first += 1
        await wait_until_idle(bench)
    medians: dict[str, float] = {}
    for label in ("idle", "newcomer"):
        values = [o.ttft for o in bench.outcomes if o.label == label and o.ttft is not None]
        bench.details[f"{label}_ttft_ms"] = spread(values, scale=1000)
        if values:
            medians[label] = percentile(values, 50)
    if len(medians) == 2:
        bench.details["ratio"] = round(medians["newcomer"] / medians["idle"], 3)
    else:
        bench.problems.append("no time to first token to compare")


def _short(bench: Bench, index: int, label: str) -> Call:
    return bench.call(bench.prompt(index), max_tokens=4, stream=True, label=label)


async def _drop_streams(bench: Bench, streams: int, first: int) -> None:
    """Start long streams; when each has had two tokens, drop them all at once."""
    ready = Barrier(streams)
    async with trio.open_nursery() as nursery:
        for i in range(streams):
            call = bench.call(
                bench.prompt(first + i),
                max_tokens=bench.max_tokens(512),
                stream=True,
                events_wanted=2,
                on_events=ready.arrive,
            )
            nursery.start_soon(bench.client.perform, call)
        with trio.move_on_after(bench.options.timeout_s) as scope:
            await ready.open.wait()
        if scope.cancelled_caught:
            bench.problems.append("the long streams did not all begin")
        nursery.cancel_scope.cancel()


async def soak(bench: Bench) -> None:
    """Very many short requests; what the process holds must stay flat after the first 1000."""
    options = bench.options
    count, tokens = bench.requests(10_000), bench.max_tokens(8)
    share = 0.3 if options.cancel_share is None else options.cancel_share
    bench.progress.start("soak", count)
    samples: list[tuple[int, ProcessSample]] = []
    every = max(1, count // SOAK_SAMPLES)
    bench.details["samples"] = []

    def sample() -> None:
        done = len(bench.outcomes)
        if options.pid is not None and done % every == 0:
            samples.append((done, sample_process(options.pid)))

    calls: Iterator[Call] = (
        random_call(bench, bench.rng, i, max_tokens=tokens, share=share, quick_s=0.05)
        for i in range(count)
    )
    concurrency = min(options.concurrency, count)
    await bench.run_calls(calls, concurrency=concurrency, after_each=sample)
    _report_leavers(bench)
    await wait_until_idle(bench)
    if options.pid is None:
        bench.details["note"] = "without --pid neither memory nor file descriptors were watched"
        return
    samples.append((count, sample_process(options.pid)))
    bench.details["samples"] = [
        {"requests": n, "rss_bytes": s.rss_bytes, "fds": s.fds, "threads": s.threads}
        for n, s in samples
    ]
    bench.problems += growth(samples, warm_up=min(SOAK_WARM_UP, count // 2))


def growth(samples: list[tuple[int, ProcessSample]], *, warm_up: int) -> list[str]:
    """What grew by more than 5 % between ``warm_up`` requests and the end, one line each.

    The last sample is taken from an idle server; file descriptors and threads may differ by the
    few of the connections that were open at the earlier sample, so those only count when higher.
    """
    base = next((s for n, s in samples if n >= warm_up), None)
    if base is None or len(samples) < 2:
        return ["too few samples to judge growth"]
    last = samples[-1][1]
    found = []
    for name in ("rss_bytes", "fds", "threads"):
        before, after = getattr(base, name), getattr(last, name)
        spare = 0 if name == "rss_bytes" else FEW_CONNECTIONS
        if after > before * (1 + SOAK_GROWTH) + spare:
            found.append(f"{name} grew from {before} to {after} after the first {warm_up} requests")
    return found


def _report_leavers(bench: Bench) -> None:
    labels = Counter(o.label for o in bench.outcomes)
    bench.details["by_behaviour"] = dict(sorted(labels.items()))


def details_for_display(details: dict[str, Any]) -> dict[str, Any]:
    """The entries that fit in a table: no long lists, no bodies."""
    hidden = {"samples", "health_after", "slots_after"}
    return {key: value for key, value in details.items() if key not in hidden}


def check_writable(path: Path | None) -> str | None:
    """A reason why ``path`` cannot be written, before the load begins; None when it can."""
    if path is None or (path.parent.is_dir() and not path.is_dir()):
        return None
    return f"cannot write {path}: {'is a folder' if path.is_dir() else 'no such folder'}"
