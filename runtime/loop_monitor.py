"""Measures how late the event loop wakes a task: the time in which nothing else could run."""

from __future__ import annotations

from collections import deque

import trio

INTERVAL_S = 0.005
WINDOW = 60_000  # samples kept: five minutes


class LoopMonitor:
    """Sleeps in short intervals and keeps the overshoot of each, in seconds."""

    def __init__(self) -> None:
        self._lags: deque[float] = deque(maxlen=WINDOW)
        self._generation = 0

    async def run(self) -> None:
        while True:
            due = trio.current_time() + INTERVAL_S
            generation = self._generation
            await trio.sleep_until(due)
            if generation == self._generation:
                self._lags.append(max(0.0, trio.current_time() - due))

    def snapshot(self) -> dict[str, float]:
        """Milliseconds, over the window; also the number of samples.  Empty before the first."""
        if not self._lags:
            return {}
        ordered = sorted(self._lags)
        last = len(ordered) - 1
        return {
            "samples": len(ordered),
            "p50_ms": round(ordered[last // 2] * 1e3, 3),
            "p99_ms": round(ordered[int(last * 0.99)] * 1e3, 3),
            "max_ms": round(ordered[last] * 1e3, 3),
        }

    def reset(self) -> None:
        """Forget all, also the sleep that is under way."""
        self._generation += 1
        self._lags.clear()
