"""The HTTP client of the load generator.

All sockets sit in one selector whose own file descriptor is the only thing that trio waits for;
every wake-up reads all sockets that are ready, so a token costs one ``recv`` and one scan, and no
task switch.  Tasks wait only for the end of their request.
"""

from __future__ import annotations

import errno
import selectors
import socket
import struct
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, suppress

import trio

from tools.loadgen.outcome import (
    Call,
    Leave,
    Outcome,
    read_error_body,
    read_plain_body,
    read_stream_end,
)
from tools.loadgen.target import Target
from tools.loadgen.wire import EventScanner, ResponseReader, WireError

RECV_BYTES = 64 * 1024
MAX_BODY_BYTES = 16 * 1024 * 1024


class Reactor:
    """Calls ``on_readable`` of every connection that has data."""

    def __init__(self) -> None:
        self._selector = selectors.DefaultSelector()

    def add(self, connection: Connection) -> None:
        self._selector.register(connection.sock, selectors.EVENT_READ, connection)

    def remove(self, connection: Connection) -> None:
        self._selector.unregister(connection.sock)

    async def run(self) -> None:
        # Epoll and kqueue descriptors can be waited for like a socket.
        descriptor = self._selector.fileno()
        while True:
            await trio.lowlevel.wait_readable(descriptor)
            for key, _ in self._selector.select(0):
                key.data.on_readable()

    def close(self) -> None:
        self._selector.close()


class Exchange:
    """One request in flight on a connection."""

    __slots__ = ("_body", "_body_bytes", "_notify", "call", "done", "outcome", "reader", "scanner")

    def __init__(self, call: Call) -> None:
        self.call = call
        self.outcome = Outcome(label=call.label)
        self.done = trio.Event()
        self.reader = ResponseReader()
        self.scanner: EventScanner | None = None
        self._body: list[bytes] = []
        self._body_bytes = 0
        self._notify = call.on_events

    def feed(self, data: bytes, now: float) -> None:
        outcome = self.outcome
        if outcome.first_byte is None:
            outcome.first_byte = now
        body = self.reader.feed(data)
        if outcome.status == 0 and self.reader.head is not None:
            self._start_body()
        if self.scanner is not None:
            for _ in range(self.scanner.feed(body)):
                outcome.stamps.append(now)
        elif body:
            self._body.append(body)
            self._body_bytes += len(body)
            if self._body_bytes > MAX_BODY_BYTES:
                raise WireError("response body too large")
        if self._notify is not None and len(outcome.stamps) >= self.call.events_wanted:
            self._notify()
            self._notify = None
        if self.reader.done:
            self.finish(now)
        elif self._has_enough():
            outcome.left = True
            self.finish(now)

    def finish(self, now: float, error: str | None = None) -> None:
        if self.done.is_set():
            return
        outcome = self.outcome
        outcome.ended = now
        outcome.error = error
        outcome.body = b"".join(self._body)
        if error is None and not outcome.left:
            if outcome.status != 200:
                read_error_body(outcome)
            elif self.scanner is not None:
                read_stream_end(outcome, self.scanner)
            elif self.call.method == "POST":
                read_plain_body(outcome)
        self.done.set()

    def _start_body(self) -> None:
        head = self.reader.head
        assert head is not None
        self.outcome.status = head.status
        self.outcome.retry_after = head.headers.get("retry-after")
        if head.headers.get("content-type", "").lower().startswith("text/event-stream"):
            self.scanner = EventScanner()

    def _has_enough(self) -> bool:
        limit = self.call.leave_after_events
        return limit is not None and len(self.outcome.stamps) >= limit > 0


class Connection:
    """One socket, at most one exchange at a time."""

    __slots__ = ("_reactor", "_registered", "alive", "draining", "exchange", "gone", "sock", "used")

    def __init__(self, sock: socket.socket, reactor: Reactor) -> None:
        self.sock = sock
        self.exchange: Exchange | None = None
        self.alive = True
        self.used = False
        self.draining = False
        self.gone = trio.Event()
        self._reactor = reactor
        reactor.add(self)
        self._registered = True

    def on_readable(self) -> None:
        try:
            data = self.sock.recv(RECV_BYTES)
        except BlockingIOError:
            return
        except OSError as error:
            self._lost(f"connection lost: {_reason(error)}")
            return
        exchange = self.exchange
        now = time.perf_counter()
        try:
            if data and self.draining:
                return
            if exchange is None or exchange.done.is_set():
                self.drop()  # closed by the server while idle, or stray bytes
            elif data:
                exchange.feed(data, now)
            else:
                exchange.reader.eof()
                self.drop()
                exchange.finish(now)
        except WireError as error:
            self._lost(str(error))

    async def send(self, data: bytes) -> None:
        view = memoryview(data)
        while view:
            try:
                view = view[self.sock.send(view) :]
            except BlockingIOError:
                await trio.lowlevel.wait_writable(self.sock)

    def drop(self, leave: Leave = Leave.FIN) -> None:
        """Close the socket in the given way."""
        self.alive = False
        self.gone.set()
        if self._registered:
            self._reactor.remove(self)
            self._registered = False
        trio.lowlevel.notify_closing(self.sock)
        with suppress(OSError):  # the server may have closed it already
            if leave is Leave.RESET:
                linger = struct.pack("ii", 1, 0)
                self.sock.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, linger)
            else:
                self.sock.shutdown(socket.SHUT_WR)
        self.sock.close()

    def half_close(self) -> None:
        """Only the sending side; what still arrives is read and thrown away."""
        self.draining = True
        with suppress(OSError):  # the server was faster
            self.sock.shutdown(socket.SHUT_WR)

    def _lost(self, error: str) -> None:
        self.drop()
        if self.exchange is not None:
            self.exchange.finish(time.perf_counter(), error)


class Client:
    """Makes requests on pooled connections; use ``open_client``."""

    def __init__(
        self, target: Target, reactor: Reactor, *, timeout_s: float, keep_alive: bool = True
    ) -> None:
        self.target = target
        self.timeout_s = timeout_s
        self.keep_alive = keep_alive
        self._reactor = reactor
        self._idle: list[Connection] = []

    async def perform(self, call: Call) -> Outcome:
        """Make one request.  Never raises for what the server does: see ``Outcome.error``."""
        data = self.target.request(call.method, call.path, call.body, close=not self.keep_alive)
        while True:
            started = time.perf_counter()
            try:
                connection = await self._connection()
            except OSError as error:
                now = time.perf_counter()
                reason = f"cannot connect: {_reason(error)}"
                return Outcome(label=call.label, error=reason, started=started, ended=now)
            reused = connection.used
            outcome = await self._exchange(connection, call, data, started)
            # The server may close an idle connection just when it is used again.
            if not (reused and outcome.error and outcome.first_byte is None):
                return outcome
            if "timed out" in outcome.error:
                return outcome

    async def get(self, path: str) -> Outcome:
        return await self.perform(Call(body=b"", method="GET", path=path, stream=False))

    async def _exchange(
        self, connection: Connection, call: Call, data: bytes, started: float
    ) -> Outcome:
        exchange = Exchange(call)
        outcome = exchange.outcome
        outcome.started = started
        connection.exchange = exchange
        connection.used = True
        try:
            limit = self.timeout_s if call.leave_after_s is None else call.leave_after_s
            with trio.move_on_after(limit):
                try:
                    await connection.send(data)
                except OSError as error:
                    exchange.finish(time.perf_counter(), f"connection lost: {_reason(error)}")
                except trio.ClosedResourceError:  # the reactor closed it meanwhile
                    exchange.finish(time.perf_counter(), "connection lost")
                await exchange.done.wait()
            if not exchange.done.is_set():
                outcome.left = call.leave_after_s is not None
                late = None if outcome.left else f"timed out after {self.timeout_s:g} s"
                exchange.finish(time.perf_counter(), late)
            if outcome.left and call.leave is Leave.HALF_CLOSE and connection.alive:
                await self._wait_for_server(connection)
        finally:
            self._release(connection, exchange)
        return outcome

    async def _wait_for_server(self, connection: Connection) -> None:
        connection.half_close()
        with trio.move_on_after(0.2):  # then give up: the half-close alone is the signal
            await connection.gone.wait()

    async def _connection(self) -> Connection:
        while self._idle:
            connection = self._idle.pop()
            if connection.alive:
                return connection
        sock = socket.socket(self.target.family, socket.SOCK_STREAM)
        try:
            sock.setblocking(False)
            sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            code = sock.connect_ex(self.target.address)
            if code == errno.EINPROGRESS:
                with trio.move_on_after(self.timeout_s) as scope:
                    await trio.lowlevel.wait_writable(sock)
                if scope.cancelled_caught:
                    raise TimeoutError(errno.ETIMEDOUT, "timed out")
                code = sock.getsockopt(socket.SOL_SOCKET, socket.SO_ERROR)
            if code:
                raise OSError(code, errno.errorcode.get(code, "error"))
        except BaseException:
            sock.close()
            raise
        return Connection(sock, self._reactor)

    def _release(self, connection: Connection, exchange: Exchange) -> None:
        connection.exchange = None
        if not connection.alive:
            return
        head = exchange.reader.head
        complete = exchange.reader.done and head is not None and head.keep_alive
        if complete and self.keep_alive:
            self._idle.append(connection)
        else:
            connection.drop(exchange.call.leave if exchange.outcome.left else Leave.FIN)

    def close(self) -> None:
        """Close the idle connections."""
        while self._idle:
            connection = self._idle.pop()
            if connection.alive:
                connection.drop()


@asynccontextmanager
async def open_client(
    target: Target, *, timeout_s: float, keep_alive: bool = True
) -> AsyncIterator[Client]:
    """A client whose sockets are closed at the end of the block."""
    reactor = Reactor()
    client = Client(target, reactor, timeout_s=timeout_s, keep_alive=keep_alive)
    try:
        async with trio.open_nursery() as nursery:
            nursery.start_soon(reactor.run)
            try:
                yield client
            finally:
                client.close()
                nursery.cancel_scope.cancel()
    finally:
        reactor.close()


def _reason(error: OSError) -> str:
    match error.errno:
        case errno.ECONNREFUSED:
            return "connection refused"
        case errno.ECONNRESET:
            return "reset by the server"
        case errno.EPIPE:
            return "closed by the server"
        case errno.ETIMEDOUT:
            return "timed out"
    return (error.strerror or str(error)).lower()
