from __future__ import annotations

import time

import trio

from runtime.loop_monitor import LoopMonitor


async def test_a_blocked_loop_shows() -> None:
    monitor = LoopMonitor()
    assert monitor.snapshot() == {}
    async with trio.open_nursery() as nursery:
        nursery.start_soon(monitor.run)
        await trio.sleep(0.02)
        time.sleep(0.05)  # noqa: ASYNC251 - the very fault it is to show
        await trio.sleep(0.02)
        nursery.cancel_scope.cancel()
    assert monitor.snapshot()["max_ms"] > 30


async def test_a_reset_forgets_the_sleep_under_way() -> None:
    monitor = LoopMonitor()
    async with trio.open_nursery() as nursery:
        nursery.start_soon(monitor.run)
        await trio.sleep(0.02)
        time.sleep(0.2)  # noqa: ASYNC251
        monitor.reset()
        for _ in range(3):
            await trio.lowlevel.checkpoint()
        nursery.cancel_scope.cancel()
    assert monitor.snapshot().get("max_ms", 0.0) < 190
