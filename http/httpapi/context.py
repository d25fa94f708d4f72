"""What every route needs, and the small steps that all of them share."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, TypeVar, cast

import trio
from quart import Response, request

from actors.ports import Ports
from httpapi.asgi import RECORD_KEY
from httpapi.errors import dump_json
from httpapi.record import RequestRecord
from httpapi.settings import HttpSettings

T = TypeVar("T")


@dataclass(frozen=True, slots=True, kw_only=True)
class AppContext:
    ports: Ports
    settings: HttpSettings
    json_limiter: trio.CapacityLimiter

    def model_name(self) -> str:
        """The served id; "" while there is neither an alias nor a model."""
        if self.settings.alias is not None:
            return self.settings.alias
        model = self.ports.model()
        return "" if model is None else model.name

    async def read_body(self, read: Callable[[bytes], T]) -> T:
        """``read(body)`` of the current request; on a worker thread when the body is long.

        ``read`` has to be pure.  Raises what it raises, and Quart's 408 and 413.
        """
        raw = await request.get_data(cache=False)
        assert isinstance(raw, bytes)
        if len(raw) <= self.settings.json_thread_bytes:
            return read(raw)
        return await trio.to_thread.run_sync(read, raw, limiter=self.json_limiter)


def current_record() -> RequestRecord:
    """The record that RequestScope keeps of the current request."""
    return cast(RequestRecord, cast(Mapping[str, Any], request.scope)[RECORD_KEY])


def json_response(
    value: Any, status: int = 200, headers: Mapping[str, str] | None = None
) -> Response:
    return json_bytes(dump_json(value), status, headers)


def json_bytes(
    body: bytes, status: int = 200, headers: Mapping[str, str] | None = None
) -> Response:
    return Response(
        body,
        status=status,
        headers=dict(headers) if headers else None,
        content_type="application/json",
    )
