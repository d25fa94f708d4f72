"""Error codes and statuses -> the OpenAI error envelope, in one table."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from actors.errors import ErrorCode


@dataclass(frozen=True, slots=True)
class ErrorShape:
    """How one kind of error looks on the wire; ``code`` is almost always null."""

    status: int
    type: str
    code: str | None = None


SHAPES: Mapping[ErrorCode, ErrorShape] = {
    ErrorCode.INVALID_REQUEST: ErrorShape(400, "invalid_request_error"),
    ErrorCode.CONTEXT_LENGTH: ErrorShape(400, "invalid_request_error"),
    ErrorCode.NO_CHAT_MODEL: ErrorShape(501, "not_implemented"),
    ErrorCode.NOT_SUPPORTED: ErrorShape(501, "not_supported_error"),
    ErrorCode.LOADING: ErrorShape(503, "server_busy"),
    ErrorCode.SERVER_BUSY: ErrorShape(503, "server_busy"),
    ErrorCode.REQUEST_MEMORY: ErrorShape(
        503, "request_memory_budget_exceeded", "request_memory_budget_exceeded"
    ),
    ErrorCode.SHUTTING_DOWN: ErrorShape(503, "server_busy"),
    ErrorCode.DEADLINE: ErrorShape(504, "server_timeout"),
    ErrorCode.SLOW_CLIENT: ErrorShape(500, "server_error"),
    ErrorCode.ENGINE_ERROR: ErrorShape(500, "server_error"),
    ErrorCode.ENGINE_DEAD: ErrorShape(503, "server_error"),
    ErrorCode.INTERNAL: ErrorShape(500, "server_error"),
}

#: Errors that HTTP itself knows: status -> (type, message).  Others fall back by status class.
HTTP_ERRORS: Mapping[int, tuple[str, str]] = {
    404: ("not_found", "There is no such route on this server."),
    405: ("invalid_request_error", "This method is not allowed here; see the Allow header."),
    408: ("invalid_request_error", "The request body did not arrive in time."),
    413: ("invalid_request_error", "Request body too large."),
    431: ("invalid_request_error", "Request header fields too large."),
    500: ("server_error", "Internal server error."),
}

#: After these the rest of the request is not worth reading: the connection is closed.
CLOSING_STATUSES = frozenset({408, 413, 431})


def http_error(status: int) -> tuple[str, str]:
    """Type and message for an error that only has a status."""
    known = HTTP_ERRORS.get(status)
    if known is not None:
        return known
    if status >= 500:
        return "server_error", "The server could not answer this request."
    return "invalid_request_error", "The request is not valid."


def envelope(
    message: str,
    type_: str,
    *,
    code: str | None = None,
    param: str | None = None,
    details: Mapping[str, int] | None = None,
) -> dict[str, Any]:
    """The ``error`` object in its envelope; ``param`` appears only when it is known."""
    error: dict[str, Any] = {"message": message, "type": type_, "code": code}
    if param is not None:
        error["param"] = param
    if details is not None:
        error.update(details)
    return {"error": error}


def code_envelope(
    code: ErrorCode,
    message: str,
    param: str | None = None,
    details: Mapping[str, int] | None = None,
) -> dict[str, Any]:
    shape = SHAPES[code]
    return envelope(message, shape.type, code=shape.code, param=param, details=details)


def retry_after(seconds: float) -> str:
    """Header value: whole seconds, at least 1."""
    return str(max(1, math.ceil(seconds)))


def dump_json(value: Any) -> bytes:
    """Compact UTF-8 JSON.  Half surrogates, which have no UTF-8 form, become question marks."""
    text = json.dumps(value, ensure_ascii=False, separators=(",", ":"), allow_nan=False)
    return text.encode("utf-8", "replace")
