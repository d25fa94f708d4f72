"""Waiting for an engine step: it cannot be interrupted, only given up by the engine itself."""

from __future__ import annotations

from collections.abc import Callable

import trio

from actors.kit.journal import Journal
from actors.limits import Limits
from models.engine import Engine, EngineDead, EngineError, StepPlan, StepResult

NAME = "decode"


async def wait_step(
    engine: Engine,
    plan: StepPlan,
    *,
    unwanted: Callable[[], bool],
    limits: Limits,
    journal: Journal,
) -> StepResult:
    """The result of ``plan``.  Raises EngineError, or EngineDead when it takes too long.

    ``unwanted`` is asked now and then: if it says so, the engine may give the step up half-way.
    A cancellation is taken up only once the step is over.
    """
    try:
        with trio.CancelScope(shield=True) as scope:
            scope.deadline = trio.current_time() + limits.step_timeout_s
            result = await _wait_while_wanted(engine, unwanted, limits)
    except EngineError:
        journal.record(NAME, "engine_fault", plan.step)
        raise
    if scope.cancelled_caught:
        journal.record(NAME, "engine_fault", plan.step)
        raise EngineDead(f"step {plan.step} took over {limits.step_timeout_s} s")
    assert result.step == plan.step, (result.step, plan.step)
    journal.record(NAME, "stepped", plan.step)
    await trio.lowlevel.checkpoint_if_cancelled()
    return result


async def _wait_while_wanted(
    engine: Engine, unwanted: Callable[[], bool], limits: Limits
) -> StepResult:
    while True:
        with trio.move_on_after(limits.poll_s):
            return await engine.wait_step()
        if unwanted():
            engine.abandon_step()
            return await engine.wait_step()
