"""Errors raised in routes, by Quart or by Werkzeug -> JSON answers in the error envelope."""

from __future__ import annotations

from quart import Quart, Response
from werkzeug.exceptions import HTTPException, MethodNotAllowed

from actors.errors import RequestError
from httpapi.context import current_record, json_response
from httpapi.errors import SHAPES, code_envelope, envelope, http_error, retry_after


def install(app: Quart) -> None:
    app.register_error_handler(RequestError, _request_error)
    app.register_error_handler(HTTPException, _http_exception)


async def _request_error(error: RequestError) -> Response:
    current_record().outcome = error.code.value
    status = SHAPES[error.code].status
    headers: dict[str, str] = {}
    if status == 503 and error.retry_after_s is not None:
        headers["Retry-After"] = retry_after(error.retry_after_s)
    body = code_envelope(error.code, error.message, error.param, error.details)
    return json_response(body, status, headers)


async def _http_exception(error: HTTPException) -> Response:
    status = error.code or 500
    current_record().outcome = str(status)
    type_, message = http_error(status)
    headers: dict[str, str] = {}
    if isinstance(error, MethodNotAllowed) and error.valid_methods:
        headers["Allow"] = ", ".join(sorted(error.valid_methods))
    return json_response(envelope(message, type_), status, headers)
