"""What runs on the compute thread: the blocking counterpart of :class:`models.engine.Engine`."""

from __future__ import annotations

from typing import Protocol

from models.engine import EngineInfo, StepPlan, StepResult


class BackendFatal(Exception):
    """The device or the process is in a state in which no further step can work."""


class Backend(Protocol):
    """All methods are called on one and the same thread, which also built the object."""

    @property
    def info(self) -> EngineInfo: ...

    def step(self, plan: StepPlan) -> StepResult:
        """Run one step to its end.

        Any exception means that the whole batch is lost; BackendFatal that the backend is too.
        """
        ...

    def abandon(self, step: int) -> None:
        """Give up the step of that number if it runs; called from another thread, at any time."""
        ...

    def reset(self) -> None:
        """Free every sequence."""
        ...

    def close(self) -> None:
        """Free everything; nothing is called afterwards."""
        ...
