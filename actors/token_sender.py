"""The sending half of one request's token channel, with its place in the server.

Whoever holds a :class:`TokenSender` must pass it on or finish it with ``finish``.  It never awaits:
the channel has room for everything the planner allows, and a full one is a bug.
"""

from __future__ import annotations

from collections.abc import Callable

import trio

from actors.errors import ErrorCode, RequestError
from actors.events import Event, Failed, Terminal


class TokenSender:
    """Created by ``actors.generation.open_generation``; owned by one actor at a time."""

    __slots__ = ("_capacity", "_closed", "_release_place", "_tx", "request_id")

    def __init__(
        self,
        request_id: str,
        tx: trio.MemorySendChannel[Event],
        capacity: int,
        release_place: Callable[[], None],
    ) -> None:
        self.request_id = request_id
        self._tx = tx
        self._capacity = capacity
        self._release_place = release_place
        self._closed = False

    @property
    def finished(self) -> bool:
        return self._closed

    def is_finished(self) -> bool:
        """The same, to be asked later."""
        return self._closed

    def room(self) -> int:
        """Events that fit now, or -1 when nobody holds the receive end any more."""
        stats = self._tx.statistics()
        if stats.open_receive_channels == 0:
            return -1
        return self._capacity - stats.current_buffer_used

    @property
    def abandoned(self) -> bool:
        """The client is gone: nobody will ever read another event."""
        return self._tx.statistics().open_receive_channels == 0

    def send(self, event: Event) -> bool:
        """False when the receiver is gone.  A full channel raises trio.WouldBlock: a bug."""
        assert not self._closed, f"{self.request_id}: event after the terminal one"
        try:
            self._tx.send_nowait(event)
        except trio.BrokenResourceError:
            return False
        return True

    def finish(self, event: Terminal) -> bool:
        """Send the one terminal event, close the channel, give the place back.

        Idempotent after the first call (returns False), so that crash handlers may be blunt.
        """
        if self._closed:
            return False
        try:
            delivered = self.send(event)
        finally:
            self._closed = True
            self._tx.close()
            self._release_place()
        return delivered

    def fail(
        self,
        code: ErrorCode,
        message: str,
        *,
        param: str | None = None,
        retry_after_s: float | None = None,
    ) -> bool:
        return self.finish(
            Failed(code=code, message=message, param=param, retry_after_s=retry_after_s)
        )

    def fail_with(self, error: RequestError) -> bool:
        return self.fail(
            error.code, error.message, param=error.param, retry_after_s=error.retry_after_s
        )
