"""The caller's side of a generation: open it, read its events, close it.

Holding the receive end is what keeps the request alive; closing it cancels the request.
"""

from __future__ import annotations

from collections.abc import Callable
from types import TracebackType

import trio

from actors.errors import ErrorCode, RequestError
from actors.events import Accepted, Event, Failed, Finished
from actors.messages import Submit
from actors.phase import Phase
from actors.ports import Ports
from actors.requests import GenerationRequest
from actors.token_sender import TokenSender

BUSY_MESSAGE = "All slots are busy. Please try again later."
LOADING_MESSAGE = "The model is still loading. Please try again later."
DRAINING_MESSAGE = "The server is shutting down."
ENGINE_DEAD_MESSAGE = "The engine has stopped."
LOST_MESSAGE = "The request was lost inside the server."


class Generation:
    """Receive end of one request.  Async-iterate it for its events; close it when done."""

    __slots__ = ("_rx", "_terminal", "accepted_tokens", "request_id")

    def __init__(self, request_id: str, rx: trio.MemoryReceiveChannel[Event]) -> None:
        self.request_id = request_id
        self.accepted_tokens: int | None = None
        self._rx = rx
        self._terminal = False

    async def wait_accepted(self) -> int:
        """Prompt tokens, once the request is valid and queued.  Raises RequestError otherwise."""
        match await self._receive():
            case Accepted(prompt_tokens=count):
                self.accepted_tokens = count
                return count
            case Failed() as failed:
                self._terminal = True
                raise RequestError(
                    failed.code,
                    failed.message,
                    param=failed.param,
                    retry_after_s=failed.retry_after_s,
                    details=failed.details,
                )
            case other:
                raise AssertionError(f"{other!r} before Accepted")

    async def _receive(self) -> Event:
        try:
            return await self._rx.receive()
        except trio.EndOfChannel:
            # Only a bug can end a channel without a terminal event; the client still hears of it.
            return Failed(code=ErrorCode.INTERNAL, message=LOST_MESSAGE)

    def __aiter__(self) -> Generation:
        return self

    async def __anext__(self) -> Event:
        if self._terminal:
            raise StopAsyncIteration
        event = await self._receive()
        if isinstance(event, Finished | Failed):
            self._terminal = True
        return event

    def receive_nowait(self) -> Event | None:
        """The next event if one is waiting; None when there is none yet or no more will come."""
        if self._terminal:
            return None
        try:
            event = self._rx.receive_nowait()
        except trio.WouldBlock:
            return None
        except trio.EndOfChannel:
            event = Failed(code=ErrorCode.INTERNAL, message=LOST_MESSAGE)
        if isinstance(event, Finished | Failed):
            self._terminal = True
        return event

    def close(self) -> None:
        """Idempotent and never awaits.  Cancels the request if it still runs."""
        self._rx.close()

    def __enter__(self) -> Generation:
        return self

    def __exit__(
        self,
        exc_type: type[BaseException] | None,
        exc: BaseException | None,
        tb: TracebackType | None,
    ) -> None:
        self.close()


def open_generation(
    ports: Ports,
    request: GenerationRequest,
    register: Callable[[Generation], None] | None = None,
) -> Generation:
    """Take a place and submit ``request``.  Never awaits.

    ``register`` gets the Generation before the request is submitted, so that the caller's scope
    owns it from the first moment on.  Raises RequestError (loading, draining, busy).
    """
    return open_generations(ports, request, 1, register)[0]


def open_generations(
    ports: Ports,
    request: GenerationRequest,
    choices: int,
    register: Callable[[Generation], None] | None = None,
) -> list[Generation]:
    """The same for several choices of one prompt: a place for each of them, or none at all.

    The ids of further choices are the request's with a ``#`` and their number.
    """
    assert choices > 0
    match ports.phase.phase:
        case Phase.STARTING:
            raise _refused(ports, ErrorCode.LOADING, LOADING_MESSAGE)
        case Phase.DRAINING | Phase.STOPPED:
            raise _refused(ports, ErrorCode.SHUTTING_DOWN, DRAINING_MESSAGE)
        case Phase.READY:
            pass
    releases = ports.places.take_many(choices)
    if releases is None:
        raise _refused(ports, ErrorCode.SERVER_BUSY, BUSY_MESSAGE)
    generations: list[Generation] = []
    senders: list[TokenSender] = []
    for choice, release in enumerate(releases):
        name = request.request_id if choice == 0 else f"{request.request_id}#{choice}"
        tx, rx = trio.open_memory_channel[Event](ports.limits.token_channel)
        senders.append(TokenSender(name, tx, ports.limits.token_channel, release))
        generations.append(Generation(name, rx))
        if register is not None:
            register(generations[-1])
    try:
        ports.submit[request.lane].send_nowait(
            Submit(request=request, senders=tuple(senders), arrived_s=trio.current_time())
        )
    except trio.BrokenResourceError:
        # The actors have given up and the phase has not caught up yet.
        for generation, release in zip(generations, releases, strict=True):
            generation.close()
            release()
        raise _refused(ports, ErrorCode.ENGINE_DEAD, ENGINE_DEAD_MESSAGE) from None
    return generations


def _refused(ports: Ports, code: ErrorCode, message: str) -> RequestError:
    ports.note_refusal(code.value)
    return RequestError(code, message, retry_after_s=ports.retry_after_s())
