"""StreamBody: the events of one or several generations as a streamed response body.

Each SSE event is one item, hence one ASGI message, one HTTP chunk and one write to the socket.

Heartbeats come from a task of their own and go past the iteration, straight to ASGI ``send``: a
timeout around every wait would cost each token a cancel scope.  The server below serialises the
writes of both tasks, and a heartbeat that is cut off while it waits for its turn is a whole HTTP
chunk that never shows.
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import AbstractAsyncContextManager
from types import TracebackType
from typing import Protocol

import trio
from quart.wrappers.response import ResponseBody

from actors.events import Event, Failed, Finished, TextDelta, Usage
from actors.generation import Generation
from httpapi.record import RequestRecord
from httpapi.sse import HEARTBEAT


class StreamEncoder(Protocol):
    """A protocol's state machine for one choice: events in, frames out."""

    def start(self) -> list[bytes]: ...
    def delta(self, text: str) -> bytes: ...
    def token(self, event: TextDelta) -> bytes: ...
    def finish(self, finished: Finished) -> list[bytes]: ...
    def fail(self, failed: Failed) -> list[bytes]: ...
    def done(self, usage: Usage) -> list[bytes]: ...
    def failed(self, failed: Failed) -> list[bytes]: ...


class StreamBody(ResponseBody):
    """Iterates frames until every choice has had its terminal event; closes them all at its exit.

    ``usage_of`` adds up the usages of the choices, in their order.
    """

    def __init__(
        self,
        generations: Sequence[Generation],
        encoders: Sequence[StreamEncoder],
        record: RequestRecord,
        *,
        ping_interval_s: float,
        usage_of: Callable[[Sequence[Usage]], Usage],
    ) -> None:
        self._generations = generations
        self._encoders = encoders
        self._record = record
        self._ping_interval_s = ping_interval_s  # -1: no heartbeats
        self._usage_of = usage_of
        # To be sent before anything else is received.
        self._frames = [frame for encoder in encoders for frame in encoder.start()]
        self._next_frame = 0
        self._terminal: dict[int, Finished | Failed] = {}
        self._last_write_s = 0.0
        self._nursery_manager: AbstractAsyncContextManager[trio.Nursery] | None = None
        self._nursery: trio.Nursery | None = None
        self._merged: trio.MemoryReceiveChannel[tuple[int, Event]] | None = None

    async def __aenter__(self) -> StreamBody:
        self._last_write_s = trio.current_time()
        if self._ping_interval_s > 0 or len(self._generations) > 1:
            self._nursery_manager = trio.open_nursery()
            self._nursery = await self._nursery_manager.__aenter__()
        if self._nursery is not None and self._ping_interval_s > 0:
            self._nursery.start_soon(self._ping)
        if self._nursery is not None and len(self._generations) > 1:
            # Without a buffer: whoever reads slowly holds up the choices, not the memory.
            tx, self._merged = trio.open_memory_channel[tuple[int, Event]](0)
            for index, generation in enumerate(self._generations):
                self._nursery.start_soon(self._read, index, generation, tx.clone())
            tx.close()
        return self

    async def __aexit__(
        self,
        exc_type: type[BaseException] | None,
        exc_value: BaseException | None,
        tb: TracebackType | None,
    ) -> None:
        for generation in self._generations:
            generation.close()
        if self._nursery_manager is not None and self._nursery is not None:
            self._nursery.cancel_scope.cancel()
            await self._nursery_manager.__aexit__(exc_type, exc_value, tb)

    async def _read(
        self,
        index: int,
        generation: Generation,
        tx: trio.MemorySendChannel[tuple[int, Event]],
    ) -> None:
        with tx:
            async for event in generation:
                await tx.send((index, event))

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
            if len(self._terminal) == len(self._generations):
                raise StopAsyncIteration
            index = 0
            event: Event | None
            if self._merged is not None:
                index, event = await self._merged.receive()
            else:
                event = self._generations[0].receive_nowait()
                if event is None:
                    event = await self._generations[0].__anext__()
            if type(event) is TextDelta:
                self._record.count_token(event.position)
                if event.chances is not None:
                    return self._encoders[index].token(event)
                if event.text:
                    return self._encoders[index].delta(event.text)
            elif isinstance(event, Finished | Failed):
                self._end(index, event)

    def _end(self, index: int, event: Finished | Failed) -> None:
        encoder = self._encoders[index]
        self._terminal[index] = event
        self._next_frame = 0
        if isinstance(event, Finished):
            self._frames = encoder.finish(event)
        else:
            self._frames = encoder.fail(event)
        if len(self._terminal) < len(self._generations):
            return
        ends = [self._terminal[place] for place in range(len(self._generations))]
        failure = next((end for end in ends if isinstance(end, Failed)), None)
        if failure is not None:
            self._frames = self._frames + encoder.failed(failure)
            self._record.outcome = failure.code.value
            return
        finished = [end for end in ends if isinstance(end, Finished)]
        usage = self._usage_of([end.usage for end in finished])
        self._frames = self._frames + encoder.done(usage)
        self._record.outcome = finished[0].reason.value
        self._record.completion_tokens = usage.completion_tokens

    async def _ping(self) -> None:
        interval = self._ping_interval_s
        while True:
            await trio.sleep_until(self._last_write_s + interval)
            if trio.current_time() >= self._last_write_s + interval:
                await self._record.send(
                    {"type": "http.response.body", "body": HEARTBEAT, "more_body": True}
                )
                self._last_write_s = trio.current_time()
