"""Server-sent events: frames and headers."""

from __future__ import annotations

from typing import Any

from quart import Response
from quart.wrappers.response import ResponseBody

from httpapi.errors import dump_json

#: A comment, which every SSE client ignores; it keeps the connection's idle timers quiet.
HEARTBEAT = b": keep-alive\n\n"
DONE = b"data: [DONE]\n\n"

CONTENT_TYPE = "text/event-stream"
#: Without the second one, nginx collects events into blocks.
HEADERS = {"Cache-Control": "no-cache", "X-Accel-Buffering": "no"}


def data_frame(value: Any) -> bytes:
    """One unnamed event with ``value`` as JSON."""
    return b"data: " + dump_json(value) + b"\n\n"


def stream_response(body: ResponseBody) -> Response:
    response = Response(body, headers=HEADERS, content_type=CONTENT_TYPE)
    response.timeout = None  # otherwise Quart cuts the stream after a minute
    return response
