"""One family of errors with a code; protocols map codes to statuses and bodies in one table."""

from __future__ import annotations

import enum
from collections.abc import Mapping


class ErrorCode(enum.Enum):
    INVALID_REQUEST = "invalid_request"
    CONTEXT_LENGTH = "context_length"
    NO_CHAT_MODEL = "no_chat_model"
    NOT_SUPPORTED = "not_supported"  # the loaded model cannot take this kind of input
    LOADING = "loading"
    SERVER_BUSY = "server_busy"
    REQUEST_MEMORY = "request_memory"  # one request alone needs more memory than one may have
    SHUTTING_DOWN = "shutting_down"
    DEADLINE = "deadline"
    SLOW_CLIENT = "slow_client"
    ENGINE_ERROR = "engine_error"
    ENGINE_DEAD = "engine_dead"
    INTERNAL = "internal"


class RequestError(Exception):
    """A request cannot be served.  ``message`` is shown to the client, so it holds no internals.

    ``details`` are further members of the error object.
    """

    def __init__(
        self,
        code: ErrorCode,
        message: str,
        *,
        param: str | None = None,
        retry_after_s: float | None = None,
        details: Mapping[str, int] | None = None,
    ) -> None:
        super().__init__(message)
        self.code = code
        self.message = message
        self.param = param
        self.retry_after_s = retry_after_s
        self.details = details
