"""An :class:`models.engine.Engine` made of a Backend and the thread that it lives on."""

from __future__ import annotations

import math
from collections.abc import Awaitable, Callable
from functools import partial
from typing import TypeVar

import trio

from models.backend import Backend, BackendFatal
from models.compute_thread import ComputeThread, Job
from models.engine import EngineDead, EngineError, EngineInfo, StepPlan, StepResult

T = TypeVar("T")


class ThreadedEngine:
    """Implements Engine.  ``step_timeout_s`` is how long a step may take before it counts as dead.

    A step itself cannot be interrupted: after a timeout the thread may still be inside it, so the
    engine stays dead.
    """

    def __init__(
        self, thread: ComputeThread, backend: Backend, *, step_timeout_s: float = math.inf
    ) -> None:
        self._thread = thread
        self._backend = backend
        self._info = backend.info
        self._timeout_s = step_timeout_s
        self._step: Job[StepResult] | None = None
        self._step_number = 0
        self._dead = False

    @classmethod
    async def load(
        cls,
        thread: ComputeThread,
        factory: Callable[[], Backend],
        *,
        step_timeout_s: float = math.inf,
    ) -> ThreadedEngine:
        """Build the backend on the thread.  Raises what ``factory`` raises, or EngineDead."""
        backend = await thread.submit(factory).wait()
        return cls(thread, backend, step_timeout_s=step_timeout_s)

    @property
    def info(self) -> EngineInfo:
        return self._info

    @property
    def alive(self) -> bool:
        return not self._dead and self._thread.alive

    def start_step(self, plan: StepPlan) -> None:
        """Hand ``plan`` over.  On a dead engine the wait that follows raises EngineDead."""
        assert self._step is None, "a step is already in flight"
        self._step_number = plan.step
        self._step = self._thread.submit(partial(self._backend.step, plan))

    async def wait_step(self) -> StepResult:
        """The result of the step in flight.

        After a cancelled wait the step, ended or not, can be waited for again.
        """
        job = self._step
        assert job is not None, "no step is in flight"
        try:
            result = await self._outcome(job, "step")
        except EngineError:
            self._step = None
            raise
        # A cancelled wait comes by here neither way, also if the step ended at that very moment.
        self._step = None
        return result

    def abandon_step(self) -> None:
        if self._step is not None and not self._step.done:
            self._backend.abandon(self._step_number)

    async def reset(self) -> None:
        """Queues behind a running step, whose result nobody sees."""
        self._step = None
        await self._outcome(self._thread.submit(self._backend.reset), "reset")

    async def close(self) -> None:
        """Free the backend's memory, behind a running step.  The engine is dead afterwards."""
        self._step = None
        job = self._thread.submit(self._backend.close)
        self._dead = True
        await job.wait()

    async def _outcome(self, job: Job[T], what: str) -> T:
        if self._dead:
            raise EngineDead(f"the engine is dead, no {what} is possible")
        try:
            return await self._bounded(job.wait)
        except (EngineDead, BackendFatal, trio.TooSlowError) as error:
            self._dead = True
            raise EngineDead(f"the engine died in a {what}: {_describe(error)}") from error
        except Exception as error:
            # Whatever the backend raised concerns this step alone, so it gets the name that the
            # driver knows; trio's own exceptions are not Exceptions.
            raise EngineError(f"a {what} failed: {_describe(error)}") from error

    async def _bounded(self, wait: Callable[[], Awaitable[T]]) -> T:
        with trio.fail_after(self._timeout_s):
            return await wait()


def _describe(error: BaseException) -> str:
    return f"{type(error).__name__}: {error}" if str(error) else type(error).__name__
