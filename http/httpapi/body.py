"""StreamBody: the events of a generation as a streamed response body.

Each SSE event is one item, hence one ASGI message, one HTTP chunk and one write to the socket.

Heartbeats come from a task of their own and go past the iteration, straight to ASGI ``send``: a
timeout around every wait would cost each token a cancel scope.  The server below serialises the
writes of both tasks, and a heartbeat that is cut off while it waits for its turn is a whole HTTP
chunk that never shows.
"""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import AbstractAsyncContextManager
from types import TracebackType
from typing import Protocol

import trio
from quart.wrappers.response import ResponseBody

from actors.events import Failed, Finished, TextDelta
from actors.generation import Generation
from httpapi.record import RequestRecord
from httpapi.sse import HEARTBEAT


class StreamEncoder(Protocol):
    """A protocol's state machine: events in, frames out."""

    def start(self) -> list[bytes]: ...
    def delta(self, text: str) -> bytes: ...
    def finish(self, finished: Finished) -> list[bytes]: ...
    def fail(self, failed: Failed) -> list[bytes]: ...


class StreamBody(ResponseBody):
    """Iterates frames until the generation's terminal event; closes the generation at its exit."""

    def __init__(
        self,
        generation: Generation,
        encoder: StreamEncoder,
        record: RequestRecord,
        *,
        ping_interval_s: float,
    ) -> None:
        self._generation = generation
        self._encoder = encoder
        self._record = record
        self._ping_interval_s = ping_interval_s  # -1: no heartbeats
        self._frames = encoder.start()  # to be sent before anything else is received
        self._next_frame = 0
        self._ended = False
        self._last_write_s = 0.0
        self._nursery_manager: AbstractAsyncContextManager[trio.Nursery] | None = None
        self._nursery: trio.Nursery | None = None

    async def __aenter__(self) -> StreamBody:
        self._last_write_s = trio.current_time()
        if self._ping_interval_s > 0:
            self._nursery_manager = trio.open_nursery()
            self._nursery = await self._nursery_manager.__aenter__()
            self._nursery.start_soon(self._ping)
        return self

    async def __aexit__(
        self,
        exc_type: type[BaseException] | None,
        exc_value: BaseException | None,
        tb: TracebackType | None,
    ) -> None:
        self._generation.close()
        if self._nursery_manager is not None and self._nursery is not None:
            self._nursery.cancel_scope.cancel()
            await self._nursery_manager.__aexit__(exc_type, exc_value, tb)

    def __aiter__(self) -> AsyncIterator[bytes]:
        return self

    async def __anext__(self) -> bytes:
        frame = await self._advance()
        self._last_write_s = trio.current_time()
        return frame

    async def _advance(self) -> bytes:
        while True:
            if self._next_frame < len(self._frames):
                self._next_frame += 1
                return self._frames[self._next_frame - 1]
            if self._ended:
                raise StopAsyncIteration
            event = self._generation.receive_nowait()
            if event is None:
                event = await self._generation.__anext__()
            if type(event) is TextDelta:
                self._record.count_token(event.position)
                if event.text:
                    return self._encoder.delta(event.text)
            elif isinstance(event, Finished | Failed):
                self._end(event)

    def _end(self, event: Finished | Failed) -> None:
        self._ended = True
        self._next_frame = 0
        if isinstance(event, Finished):
            self._frames = self._encoder.finish(event)
            self._record.outcome = event.reason.value
            self._record.completion_tokens = event.usage.completion_tokens
        else:
            self._frames = self._encoder.fail(event)
            self._record.outcome = event.code.value

    async def _ping(self) -> None:
        interval = self._ping_interval_s
        while True:
            await trio.sleep_until(self._last_write_s + interval)
            if trio.current_time() >= self._last_write_s + interval:
                await self._record.send(
                    {"type": "http.response.body", "body": HEARTBEAT, "more_body": True}
                )
                self._last_write_s = trio.current_time()
