"""Hypercorn's connection handler with a shorter way for small writes and a prompt end.

A streamed token is one small write.  Hypercorn guards each write with a lock and a shielded cancel
scope, and trio adds a scheduling point; together they cost about as much as the write itself.  A
socket that has room takes such a write at once, so it is tried first, without awaiting; only what
the socket does not take goes the ordinary way.  The number of such writes without a scheduling
point is bounded by the token buffer of the request.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from functools import partial
from typing import Any

import trio
from hypercorn.config import Config
from hypercorn.events import Event, RawData, Updated
from hypercorn.trio.tcp_server import TCPServer
from hypercorn.trio.worker_context import WorkerContext
from hypercorn.typing import AppWrapper, ConnectionState


class DirectTCPServer(TCPServer):
    """One connection.  Plain TCP only; Hypercorn's own way is the fallback for everything else."""

    _peer_gone = False

    async def _read_data(self) -> None:
        """Until the peer closes.  The idle timer of a connection that is gone ends with it.

        Otherwise Hypercorn would keep the socket open until the timer runs out.
        """
        await super()._read_data()
        self._peer_gone = True
        await self.idle_task.stop()

    async def protocol_send(self, event: Event) -> None:
        if self._peer_gone and isinstance(event, Updated):
            return  # no more timers
        if type(event) is RawData and not self.send_lock.locked():
            rest = self._try_write(event.data)
            if not rest:
                return
            event = RawData(data=rest)
        await super().protocol_send(event)

    def _try_write(self, data: bytes) -> bytes:
        """What is left to be written."""
        try:
            written = os.write(self.stream.socket.fileno(), data)
        except OSError:
            # No room now, or the peer is gone: the ordinary way waits, or finds out again.
            return data
        return data[written:]


async def serve_listeners(
    app: AppWrapper,
    config: Config,
    listeners: Sequence[trio.SocketListener],
    *,
    shutdown: trio.Event,
) -> None:
    """Accept connections until ``shutdown``; then open ones get ``config.graceful_timeout``."""
    context = WorkerContext(None)
    handler: Any = partial(DirectTCPServer, app, config, context, ConnectionState({}))
    async with trio.open_nursery() as connections:
        async with trio.open_nursery() as accepting:
            accepting.start_soon(
                partial(trio.serve_listeners, handler, list(listeners), handler_nursery=connections)
            )
            await shutdown.wait()
            accepting.cancel_scope.cancel()
        await context.terminated.set()
        connections.cancel_scope.deadline = trio.current_time() + config.graceful_timeout
