"""An Engine made of a blocking Backend and the compute thread it lives on."""

from __future__ import annotations

import trio

from models.backend import Backend
from models.compute_thread import ComputeThread, Job
from models.engine import EngineDead, EngineError, EngineInfo, StepPlan, StepResult


class ThreadedEngine:
    """Implements :class:`models.engine.Engine`.  ``backend`` was built on ``thread``."""

    def __init__(self, *, thread: ComputeThread, backend: Backend) -> None:
        self._thread = thread
        self._backend = backend
        self._info = backend.info
        self._step: Job[StepResult] | None = None
        self._dead = False

    @property
    def info(self) -> EngineInfo:
        return self._info

    @property
    def alive(self) -> bool:
        return self._thread.alive and not self._dead

    def start_step(self, plan: StepPlan) -> None:
        assert self._step is None, "a step is in flight"
        backend = self._backend
        self._step = self._thread.submit(lambda: backend.step(plan))

    async def wait_step(self) -> StepResult:
        job = self._step
        assert job is not None, "no step is in flight"
        try:
            result = await job.wait()
        except trio.Cancelled:
            raise  # still in flight: only reset() may follow
        except EngineDead:
            self._dead = True
            self._step = None
            raise
        except Exception as error:
            self._step = None
            raise EngineError(f"the engine step failed: {type(error).__name__}") from error
        self._step = None
        return result

    async def reset(self) -> None:
        """Queued behind a running step, whose result nobody reads any more."""
        self._step = None
        try:
            await self._thread.run_job(self._backend.reset)
        except EngineDead:
            self._dead = True
            raise
        except Exception as error:
            self._dead = True
            raise EngineDead("the engine cannot be reset") from error
