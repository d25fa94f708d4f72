"""One dedicated thread for all MLX work.

MLX arrays and streams belong to the thread that made them, so everything that touches them runs
here.  Jobs come in through a queue; outcomes are posted back into trio.  The thread is a child task
of the nursery that runs it: it ends when that task is cancelled, after the job in hand.
"""

from __future__ import annotations

import math
import queue
from collections.abc import Callable
from typing import Any, Generic, TypeVar

import outcome
import trio

from models.engine import EngineDead

T = TypeVar("T")


class Job(Generic[T]):
    """One call on the thread.  ``outcome`` is set on the trio side when it has ended."""

    __slots__ = ("_call", "_done", "outcome")

    def __init__(self, call: Callable[[], T]) -> None:
        self._call = call
        self._done = trio.Event()
        self.outcome: outcome.Outcome[T] | None = None

    def execute(self) -> outcome.Outcome[T]:
        """On the compute thread."""
        return outcome.capture(self._call)

    def settle(self, result: outcome.Outcome[T]) -> None:
        """On the trio thread; the first call wins."""
        if self.outcome is None:
            self.outcome = result
            self._done.set()

    async def wait(self) -> T:
        """The call's value, or its exception.  A cancelled waiter leaves the job running."""
        await self._done.wait()
        assert self.outcome is not None
        settled = self.outcome
        # An Outcome unwraps once; a job may be waited for again after a cancelled wait.
        if isinstance(settled, outcome.Value):
            value: T = settled.value
            return value
        assert isinstance(settled, outcome.Error)
        raise settled.error


class ComputeThread:
    """Start ``run`` with ``nursery.start``; jobs submitted after its end fail with EngineDead."""

    def __init__(self) -> None:
        self._jobs: queue.SimpleQueue[Job[Any] | None] = queue.SimpleQueue()
        self._open: list[Job[Any]] = []  # submitted, not settled; oldest first
        self._alive = False

    @property
    def alive(self) -> bool:
        return self._alive

    async def run(self, *, task_status: trio.TaskStatus[None] = trio.TASK_STATUS_IGNORED) -> None:
        """Until cancelled.  Raises EngineDead if the thread ends by itself."""
        token = trio.lowlevel.current_trio_token()
        self._alive = True
        try:
            async with trio.open_nursery() as nursery:
                nursery.start_soon(self._stop_when_cancelled)
                nursery.start_soon(self._thread, token)
                task_status.started()
        finally:
            self._bury(EngineDead("the compute thread has ended"))

    async def _thread(self, token: trio.lowlevel.TrioToken) -> None:
        # Its own limiter: other users of worker threads must never be able to hold it up.
        await trio.to_thread.run_sync(
            self._loop, token, abandon_on_cancel=False, limiter=trio.CapacityLimiter(1)
        )

    async def _stop_when_cancelled(self) -> None:
        """The wait for the thread cannot be cancelled, so the thread is asked to end."""
        try:
            await trio.sleep(math.inf)
        finally:
            self._jobs.put(None)

    def _loop(self, token: trio.lowlevel.TrioToken) -> None:
        """The compute thread's life."""
        while True:
            job = self._jobs.get()
            if job is None:
                return
            result = job.execute()
            try:
                token.run_sync_soon(self._settle, job, result)
            except trio.RunFinishedError:
                return
            if isinstance(result, outcome.Error) and not isinstance(result.error, Exception):
                raise EngineDead("the compute thread was interrupted") from result.error
            del job, result  # neither arrays nor tracebacks live until the next job

    def submit(self, call: Callable[[], T]) -> Job[T]:
        """Queue ``call``; jobs run in order, one at a time.  Never blocks.  Raises EngineDead."""
        if not self._alive:
            raise EngineDead("the compute thread has ended")
        job = Job(call)
        self._open.append(job)
        self._jobs.put(job)
        return job

    async def run_job(self, call: Callable[[], T]) -> T:
        """Submit and wait.  If the wait is cancelled the job still runs to its end."""
        return await self.submit(call).wait()

    def _settle(self, job: Job[Any], result: outcome.Outcome[Any]) -> None:
        if job in self._open:
            self._open.remove(job)
        job.settle(result)

    def _bury(self, error: EngineDead) -> None:
        self._alive = False
        while self._open:
            self._open.pop(0).settle(outcome.Error(error))
