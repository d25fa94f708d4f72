"""Which failure a request gets when the actor that holds it ends, and when it is simply gone."""

from __future__ import annotations

from actors.errors import ErrorCode
from actors.events import Failed
from actors.phase import Phase, PhaseCell

SHUTTING_DOWN = Failed(
    code=ErrorCode.SHUTTING_DOWN, message="The server is shutting down.", retry_after_s=1.0
)
ENGINE_DEAD = Failed(code=ErrorCode.ENGINE_DEAD, message="The engine has stopped.")
ENGINE_ERROR = Failed(code=ErrorCode.ENGINE_ERROR, message="Generation error.")
INTERNAL = Failed(
    code=ErrorCode.INTERNAL,
    message="Internal server error. Please try again.",
    retry_after_s=1.0,
)
DEADLINE = Failed(code=ErrorCode.DEADLINE, message="The request took longer than its time limit.")
SLOW_CLIENT = Failed(
    code=ErrorCode.SLOW_CLIENT, message="The client read too slowly; the request was ended."
)


def closing_failure(phase: PhaseCell, otherwise: Failed = INTERNAL) -> Failed:
    """The failure of a request whose holder ends now, from the most to the least telling cause."""
    if phase.engine_dead:
        return ENGINE_DEAD
    if phase.phase in (Phase.DRAINING, Phase.STOPPED):
        return SHUTTING_DOWN
    return otherwise
