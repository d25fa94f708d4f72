"""Percentiles and throughput of a list of outcomes."""

from __future__ import annotations

import math
from bisect import bisect_right
from collections import Counter
from collections.abc import Sequence
from typing import Any

from tools.loadgen.outcome import Outcome

QUANTILES = (50, 90, 99)


def percentile(values: Sequence[float], q: float) -> float:
    """The q-th percentile (0..100), linear between neighbours.  ``values`` must not be empty."""
    if not values:
        raise ValueError("no values")
    if not 0 <= q <= 100:
        raise ValueError("q must be within 0..100")
    ordered = sorted(values)
    place = (len(ordered) - 1) * q / 100
    low = math.floor(place)
    high = min(low + 1, len(ordered) - 1)
    # Written as a step from the lower neighbour, so that equal neighbours give exactly themselves.
    return ordered[low] + (ordered[high] - ordered[low]) * (place - low)


def spread(values: Sequence[float], *, scale: float = 1.0) -> dict[str, float] | None:
    """count, mean, p50, p90, p99 and max, times ``scale``; None without values."""
    if not values:
        return None
    ordered = sorted(values)
    result: dict[str, float] = {"count": len(ordered)}
    result["mean"] = round(scale * math.fsum(ordered) / len(ordered), 4)
    for q in QUANTILES:
        result[f"p{q}"] = round(scale * percentile(ordered, q), 4)
    result["max"] = round(scale * ordered[-1], 4)
    return result


def steady_rate(outcomes: Sequence[Outcome]) -> tuple[int, float | None]:
    """Peak number of decoding streams, and tokens per second while all of them decode.

    A stream decodes from its first to its last content event; the start and the tail of a run,
    where fewer streams are active, are left out.  Between two events of a stream its count is
    taken as growing evenly, so a border inside a burst of events has no effect on the rate.  Where
    the usage tells of more tokens than content events, each event counts for its share of them.
    """
    streams = [o for o in outcomes if len(o.stamps) > 1]
    edges = sorted([(o.stamps[0], 1) for o in streams] + [(o.stamps[-1], -1) for o in streams])
    levels: list[int] = []
    active = 0
    for _, change in edges:
        active += change
        levels.append(active)
    peak = max(levels, default=0)
    full = [
        (edges[i][0], edges[i + 1][0])
        for i in range(len(edges) - 1)
        if levels[i] == peak and edges[i + 1][0] > edges[i][0]
    ]
    seconds = sum(end - start for start, end in full)
    if seconds <= 0:
        return peak, None
    starts = [start for start, _ in full]
    count = 0.0
    for outcome in streams:
        stamps, share = outcome.stamps, outcome.tokens / len(outcome.stamps)
        for i in range(max(0, bisect_right(starts, stamps[0]) - 1), len(full)):
            start, end = full[i]
            if start >= stamps[-1]:
                break
            count += share * (_events_until(stamps, end) - _events_until(stamps, start))
    return peak, count / seconds


def _events_until(stamps: Sequence[float], at: float) -> float:
    """Events after the first one, with a fraction for the gap that ``at`` falls into."""
    right = bisect_right(stamps, at)
    if right == 0:
        return 0.0
    if right == len(stamps):
        return float(right - 1)
    before, after = stamps[right - 1], stamps[right]
    return right - 1 + (at - before) / (after - before)


def summarise(outcomes: Sequence[Outcome], *, wall_s: float, cpu_s: float) -> dict[str, Any]:
    """The part of a report that every scenario has.  Times in the result are milliseconds."""
    answered = [o for o in outcomes if o.ok]
    seen = [o for o in outcomes if o.stamps]
    tokens = sum(o.tokens for o in outcomes)
    events = sum(len(o.stamps) for o in outcomes)
    peak, steady = steady_rate(seen)
    per_stream = [
        (o.tokens - 1) / (o.stamps[-1] - o.stamps[0])
        for o in seen
        if len(o.stamps) > 1 and o.stamps[-1] > o.stamps[0]
    ]
    return {
        "wall_s": round(wall_s, 4),
        "requests": _count_requests(outcomes),
        "tokens": {
            "total": tokens,
            "content_events": events,
            "source": _token_source(outcomes),
            "prompt": sum(o.prompt_tokens or 0 for o in outcomes),
            "finish_reasons": dict(Counter(o.finish_reason or "none" for o in answered)),
        },
        "throughput": {
            "tokens_per_s": round(tokens / wall_s, 3) if wall_s > 0 else None,
            "steady_tokens_per_s": None if steady is None else round(steady, 3),
            "steady_streams": peak,
            "per_stream_tokens_per_s": spread(per_stream),
        },
        "latency_ms": {
            "ttft": spread([o.ttft for o in seen if o.ttft is not None], scale=1000),
            "itl": spread([gap for o in seen for gap in o.gaps], scale=1000),
            "e2e": spread([o.ended - o.started for o in answered], scale=1000),
        },
        "client": {
            "cpu_s": round(cpu_s, 4),
            "cpu_us_per_token": round(1e6 * cpu_s / tokens, 2) if tokens else None,
        },
    }


def _count_requests(outcomes: Sequence[Outcome]) -> dict[str, Any]:
    failed = [o for o in outcomes if o.error is not None]
    return {
        "sent": len(outcomes),
        "ok": sum(o.ok for o in outcomes),
        "left": sum(o.left for o in outcomes),
        "failed": len(failed),
        "by_status": dict(Counter(str(o.status or "none") for o in outcomes)),
        "errors": dict(Counter(o.error or "" for o in failed).most_common(20)),
        "retry_after": dict(Counter(o.retry_after for o in outcomes if o.retry_after)),
    }


def _token_source(outcomes: Sequence[Outcome]) -> str:
    kinds = {o.usage_tokens is not None for o in outcomes if o.stamps or o.usage_tokens is not None}
    if not kinds:
        return "none"
    if len(kinds) == 2:
        return "usage, and content events where there is none"
    return "usage" if kinds.pop() else "content events"
