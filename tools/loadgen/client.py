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

from tools.loadgen.exchange import Exchange
from tools.loadgen.outcome import Call, Leave, Outcome
from tools.loadgen.target import Target
from tools.loadgen.wire import WireError

RECV_BYTES = 64 * 1024
# How long the reactor may keep the event loop: the resolution of timeouts and of leaving.
HOLD_S = 0.002
CONNECT_GAP_S = 0.01


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
            self._read_for(HOLD_S)

    def _read_for(self, seconds: float) -> None:
        """Read what comes within ``seconds``, without the event loop; less if a request ends.

        A turn of the event loop costs several times as much as reading a token, and tokens of
        many streams come within moments of each other.
        """
        until = time.perf_counter() + seconds
        left = seconds
        while left > 0:
            ready = self._selector.select(left)
            ended = False
            for key, _ in ready:
                ended = key.data.on_readable() or ended
            if ended or not ready:
                return
            left = until - time.perf_counter()

    def close(self) -> None:
        self._selector.close()


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

    def on_readable(self) -> bool:
        """Read once.  True when a task may now have something to do."""
        try:
            data = self.sock.recv(RECV_BYTES)
        except BlockingIOError:
            return False
        except OSError as error:
            self._lost(f"connection lost: {_reason(error)}")
            return True
        exchange = self.exchange
        now = time.perf_counter()
        try:
            if data and self.draining:
                return False
            if exchange is None or exchange.done.is_set():
                self.drop()  # closed by the server while idle, or stray bytes
            elif data:
                return exchange.feed(data, now)
            else:
                exchange.reader.eof()
                self.drop()
                exchange.finish(now)
        except WireError as error:
            self._lost(str(error))
        return True

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
        return await self._connect()

    async def preconnect(self, count: int) -> None:
        """Have ``count`` idle connections, opened one by one.  Raises OSError.

        A burst of connects overflows a short listen queue, and the kernel then tries again only
        after a second: that would be measured instead of the server's work.
        """
        while len(self._idle) < count:
            self._idle.append(await self._connect())
            await trio.sleep(CONNECT_GAP_S)

    async def _connect(self) -> Connection:
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
