"""One long-lived thread that runs jobs in order and posts their outcomes back into trio.

MLX arrays and streams belong to the thread that made them, so loading, building and evaluating
must all happen on the same thread.  :meth:`ComputeThread.run` is that thread's life as a trio task;
:meth:`ComputeThread.submit` may be called from any task of the same trio run.
"""

from __future__ import annotations

import queue
from collections.abc import Callable
from typing import Any, Generic, TypeVar

import trio

from models.engine import EngineDead

T = TypeVar("T")


class Job(Generic[T]):
    """A submitted call.  Several tasks may wait for it; a cancelled waiter drops the outcome."""

    def __init__(self, fn: Callable[[], T]) -> None:
        self._fn = fn
        self._done = trio.Event()
        self._value: T
        self._error: BaseException | None = None

    @property
    def done(self) -> bool:
        return self._done.is_set()

    async def wait(self) -> T:
        """The call's value.  Raises what the call raised, or EngineDead if the thread is gone."""
        await self._done.wait()
        if self._error is not None:
            raise self._error
        return self._value

    def call(self) -> T:
        return self._fn()

    def finish(self, value: T) -> None:
        self._value = value
        self._done.set()

    def fail(self, error: BaseException) -> None:
        self._error = error
        self._done.set()


class ComputeThread:
    """Not reusable: once :meth:`run` has ended, every job fails with EngineDead."""

    def __init__(self, name: str = "compute") -> None:
        self._name = name
        self._queue: queue.SimpleQueue[Job[Any] | None] = queue.SimpleQueue()
        self._outstanding: set[Job[Any]] = set()
        self._stopping = False  # read by the thread before each job
        self._ended = False
        self._trio: trio.lowlevel.TrioToken | None = None

    @property
    def alive(self) -> bool:
        """False once the thread has ended or was told to."""
        return not (self._ended or self._stopping)

    async def run(self, *, task_status: trio.TaskStatus[None] = trio.TASK_STATUS_IGNORED) -> None:
        """Be the thread until :meth:`stop` or cancellation; ends after the job that is running.

        Raises EngineDead, in a group, if the thread ended by itself.
        """
        assert self._trio is None, "a compute thread runs once"
        self._trio = trio.lowlevel.current_trio_token()
        try:
            async with trio.open_nursery() as nursery:
                nursery.start_soon(self._guard)
                task_status.started()
                # A limiter of its own: the thread never gives its place back.
                await trio.to_thread.run_sync(
                    self._loop, limiter=trio.CapacityLimiter(1), thread_name=self._name
                )
                nursery.cancel_scope.cancel()
        finally:
            self._ended = True
            outstanding, self._outstanding = self._outstanding, set()
            for job in outstanding:
                job.fail(self._death())

    def submit(self, fn: Callable[[], T]) -> Job[T]:
        """Queue ``fn`` behind all earlier jobs.  Never blocks."""
        job = Job(fn)
        if self._ended or self._stopping:
            job.fail(self._death())
            return job
        self._outstanding.add(job)
        self._queue.put(job)
        return job

    async def run_job(self, fn: Callable[[], T]) -> T:
        """Submit and wait.  If the wait is cancelled the job still runs to its end."""
        return await self.submit(fn).wait()

    def stop(self) -> None:
        """End after the running job; queued jobs fail with EngineDead."""
        self._stopping = True
        self._queue.put(None)

    async def _guard(self) -> None:
        # The wait for the thread cannot be cancelled, so this task turns cancellation into a stop.
        try:
            await trio.sleep_forever()
        finally:
            self.stop()

    def _death(self) -> EngineDead:
        return EngineDead(f"the {self._name} thread has ended")

    def _loop(self) -> None:
        """Runs on the thread.  Anything but an ordinary exception of a job ends it."""
        while True:
            job = self._queue.get()
            if job is None or self._stopping:
                return
            try:
                value = job.call()
            except Exception as error:  # handed to the waiter, nothing is swallowed
                self._post(job, None, error)
                del error
            except BaseException as error:  # SystemExit and the like are not a job's own affair
                raise self._death() from error
            else:
                self._post(job, value, None)
                del value
            del job  # while it waits, the thread holds nothing of the last job

    def _post(self, job: Job[Any], value: Any, error: Exception | None) -> None:
        assert self._trio is not None
        self._trio.run_sync_soon(self._settle, job, value, error)

    def _settle(self, job: Job[Any], value: Any, error: Exception | None) -> None:
        if job not in self._outstanding:
            return  # the run has ended meanwhile and failed it
        self._outstanding.remove(job)
        if error is None:
            job.finish(value)
        else:
            job.fail(error)
