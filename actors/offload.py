"""Where blocking text work (templates, tokenizers) runs: worker threads, or inline in tests."""

from __future__ import annotations

from collections.abc import Callable
from typing import Protocol, TypeVar

import trio

T = TypeVar("T")


class Offload(Protocol):
    """Calls ``fn(*args)`` away from the event loop and returns or raises what it does."""

    async def __call__(self, fn: Callable[..., T], *args: object) -> T: ...


class ThreadOffload:
    """At most ``workers`` threads at once.  A cancelled caller does not wait for its thread."""

    def __init__(self, *, workers: int) -> None:
        self._limiter = trio.CapacityLimiter(workers)

    async def __call__(self, fn: Callable[..., T], *args: object) -> T:
        def call() -> T:
            return fn(*args)

        return await trio.to_thread.run_sync(call, abandon_on_cancel=True, limiter=self._limiter)


async def inline_offload(fn: Callable[..., T], *args: object) -> T:
    """On the event loop itself: a mock clock does not wait for threads."""
    await trio.lowlevel.checkpoint()
    return fn(*args)
