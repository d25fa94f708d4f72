"""Real sockets on loopback and the real Hypercorn; every wait is on an event or the peer."""

from __future__ import annotations

import json
import socket
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import pytest
import trio
import trio.testing

from actors.messages import Submit
from httpapi.server import BindError, bind_sockets, serve_http
from httpapi.settings import HttpSettings
from tests.http.fakes import FakeRuntime, accept_only, chat, deltas, finished, ignore

pytestmark = pytest.mark.e2e


class Server:
    def __init__(self, runtime: FakeRuntime, port: int, shutdown: trio.Event) -> None:
        self.runtime = runtime
        self.port = port
        self.shutdown = shutdown
        self.ended = trio.Event()

    async def connect(self) -> Client:
        return Client(await trio.open_tcp_stream("127.0.0.1", self.port))


class Client:
    """A client that shows what is on the wire."""

    def __init__(self, stream: trio.SocketStream) -> None:
        self.stream = stream
        self._buffer = b""

    async def send(self, method: str, path: str, payload: Any = None, extra: str = "") -> None:
        body = b"" if payload is None else json.dumps(payload).encode()
        head = f"{method} {path} HTTP/1.1\r\nHost: x\r\nContent-Length: {len(body)}\r\n{extra}\r\n"
        await self.stream.send_all(head.encode() + body)

    async def _more(self) -> None:
        data = await self.stream.receive_some()
        assert data, f"the connection ended early: {self._buffer!r}"
        self._buffer += bytes(data)

    async def _until(self, mark: bytes) -> bytes:
        while mark not in self._buffer:
            await self._more()
        found, _, self._buffer = self._buffer.partition(mark)
        return found

    async def head(self) -> tuple[int, dict[str, str]]:
        lines = (await self._until(b"\r\n\r\n")).decode().split("\r\n")
        fields = dict(line.lower().split(": ", 1) for line in lines[1:])
        return int(lines[0].split(" ")[1]), fields

    async def body(self, length: int) -> bytes:
        while len(self._buffer) < length:
            await self._more()
        found, self._buffer = self._buffer[:length], self._buffer[length:]
        return found

    async def chunk(self) -> bytes:
        """One HTTP chunk; b"" is the last one."""
        size = int(await self._until(b"\r\n"), 16)
        data = await self.body(size)
        assert await self.body(2) == b"\r\n"
        return data

    async def at_end(self) -> bool:
        return not self._buffer and not await self.stream.receive_some()


@asynccontextmanager
async def serving(runtime: FakeRuntime) -> AsyncIterator[Server]:
    sockets = bind_sockets("127.0.0.1", 0, runtime.settings)
    server = Server(runtime, sockets[0].getsockname()[1], trio.Event())

    async def serve(task_status: trio.TaskStatus[list[str]]) -> None:
        await serve_http(
            runtime.app,
            sockets,
            shutdown=server.shutdown,
            settings=runtime.settings,
            task_status=task_status,
        )
        server.ended.set()

    with trio.fail_after(20):
        async with trio.open_nursery() as nursery:
            nursery.start_soon(runtime.run)
            await nursery.start(serve)
            yield server
            nursery.cancel_scope.cancel()


async def abandoned(submit: Submit) -> None:
    """Waits until nobody holds the receive end; the surrounding timeout bounds it."""
    while not submit.sender.abandoned:  # noqa: ASYNC110 - it has no event to wait for
        await trio.sleep(0.005)


async def first(submits: list[Submit]) -> Submit:
    while not submits:  # noqa: ASYNC110 - a list
        await trio.sleep(0.005)
    return submits[0]


async def test_a_stream_on_the_wire() -> None:
    async with serving(FakeRuntime()) as server:
        client = await server.connect()
        await client.send("POST", "/v1/chat/completions", chat(stream=True))
        status, headers = await client.head()
        assert status == 200
        assert headers["transfer-encoding"] == "chunked"
        assert "server" not in headers
        chunks = []
        while chunk := await client.chunk():
            chunks.append(chunk)
        assert len(chunks) == 4
        assert all(chunk.startswith(b"data: ") and chunk.endswith(b"\n\n") for chunk in chunks)
        assert chunks[-1] == b"data: [DONE]\n\n"
        # the connection is still good for another request
        await client.send("HEAD", "/v1/models")
        status, headers = await client.head()
        assert status == 200
        assert int(headers["content-length"]) > 0
        await client.send("GET", "/health")
        status, headers = await client.head()
        assert status == 200
        assert json.loads(await client.body(int(headers["content-length"])))["status"] == "ok"


async def test_idle_connections_are_closed_after_a_response() -> None:
    async with serving(FakeRuntime(keep_alive_timeout_s=0.2)) as server:
        client = await server.connect()
        await client.send("POST", "/v1/chat/completions", chat())
        _, headers = await client.head()
        await client.body(int(headers["content-length"]))
        assert await client.at_end()


@pytest.mark.parametrize("stream", [False, True])
async def test_a_connection_that_its_client_ended_is_closed_at_once(stream: bool) -> None:
    async with serving(FakeRuntime(keep_alive_timeout_s=3600.0)) as server:
        client = await server.connect()
        await client.send("POST", "/v1/chat/completions", chat(stream=stream))
        _, headers = await client.head()
        if stream:
            while await client.chunk():
                pass
        else:
            await client.body(int(headers["content-length"]))
        await client.stream.send_eof()
        assert await client.at_end()  # not after the idle time


async def test_connection_close_is_honoured() -> None:
    async with serving(FakeRuntime()) as server:
        client = await server.connect()
        await client.send("GET", "/health", extra="Connection: close\r\n")
        _, headers = await client.head()
        await client.body(int(headers["content-length"]))
        assert await client.at_end()


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("way", ["close", "reset", "half-close"])
async def test_leaving_closes_the_generation(way: str, stream: bool) -> None:
    accepted: list[Submit] = []
    runtime = FakeRuntime()
    runtime.answer = accept_only(accepted)
    async with serving(runtime) as server:
        client = await server.connect()
        await client.send("POST", "/v1/chat/completions", chat(stream=stream))
        submit = await first(accepted)
        if stream:
            await client.head()
            await client.chunk()
        assert not submit.sender.abandoned
        if way == "half-close":
            await client.stream.send_eof()
        else:
            if way == "reset":
                client.stream.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, b"\x01\0\0\0\0\0\0\0")
            await client.stream.aclose()
        await abandoned(submit)


async def test_leaving_before_the_first_byte() -> None:
    runtime = FakeRuntime()
    runtime.answer = ignore
    async with serving(runtime) as server:
        client = await server.connect()
        await client.send("POST", "/v1/chat/completions", chat(stream=True))
        submit = await first(runtime.submits)
        await client.stream.aclose()
        await abandoned(submit)


async def test_a_pipelining_client_that_leaves_is_noticed_by_a_heartbeat() -> None:
    accepted: list[Submit] = []
    runtime = FakeRuntime(sse_ping_interval_s=0.05)
    runtime.answer = accept_only(accepted)
    async with serving(runtime) as server:
        client = await server.connect()
        await client.send("POST", "/v1/chat/completions", chat(stream=True))
        await client.send("GET", "/health")
        submit = await first(accepted)
        await client.head()
        await client.chunk()
        assert await client.chunk() == b": keep-alive\n\n"
        await client.stream.aclose()
        await abandoned(submit)


async def test_heartbeats_and_tokens_share_the_connection() -> None:
    accepted: list[Submit] = []
    runtime = FakeRuntime(sse_ping_interval_s=0.002)
    runtime.answer = accept_only(accepted)
    async with serving(runtime) as server:
        client = await server.connect()
        await client.send("POST", "/v1/chat/completions", chat(stream=True))
        submit = await first(accepted)
        await client.head()
        for _ in range(20):
            deltas(submit, ["x"])
            await trio.sleep(0.003)
        submit.sender.finish(finished(20))
        chunks = []
        while chunk := await client.chunk():
            chunks.append(chunk)
        assert chunks[-1] == b"data: [DONE]\n\n"
        assert chunks.count(b": keep-alive\n\n") >= 1
        assert sum(b'"content":"x"' in chunk for chunk in chunks) == 20


async def test_errors_on_the_wire() -> None:
    async with serving(FakeRuntime(max_body_bytes=1000)) as server:
        for method, path, payload, extra, expected in (
            ("GET", "/nope", None, "", 404),
            ("GET", "/v1/chat/completions", None, "", 405),
            ("POST", "/v1/chat/completions", None, "", 400),
            ("POST", "/v1/chat/completions", chat(x="y" * 2000), "", 413),
            ("POST", "/v1/chat/completions", chat(), f"X: {'v' * 33_000}\r\n", 431),
        ):
            client = await server.connect()
            await client.send(method, path, payload, extra)
            status, headers = await client.head()
            assert status == expected
            body = json.loads(await client.body(int(headers["content-length"])))
            assert body["error"]["message"]
            assert ("allow" in headers) == (expected == 405)
            if expected in (413, 431):
                assert await client.at_end()
            await client.stream.aclose()


async def test_a_websocket_handshake_gets_a_404() -> None:
    async with serving(FakeRuntime()) as server:
        client = await server.connect()
        upgrade = (
            "Upgrade: websocket\r\nConnection: Upgrade\r\nSec-WebSocket-Version: 13\r\n"
            "Sec-WebSocket-Key: dGhlIHNhbXBsZSBub25jZQ==\r\n"
        )
        await client.send("GET", "/v1/realtime", extra=upgrade)
        status, headers = await client.head()
        assert status == 404
        body = json.loads(await client.body(int(headers["content-length"])))
        assert body["error"]["type"] == "not_found"


async def test_shutdown_lets_a_stream_end_and_closes_idle_connections() -> None:
    accepted: list[Submit] = []
    runtime = FakeRuntime(graceful_timeout_s=10.0)
    runtime.answer = accept_only(accepted)
    async with serving(runtime) as server:
        idle = await server.connect()
        await idle.send("GET", "/health")
        _, headers = await idle.head()
        await idle.body(int(headers["content-length"]))
        client = await server.connect()
        await client.send("POST", "/v1/chat/completions", chat(stream=True))
        submit = await first(accepted)
        await client.head()
        server.shutdown.set()
        assert await idle.at_end()
        with pytest.raises(OSError):
            await trio.open_tcp_stream("127.0.0.1", server.port)
        assert not server.ended.is_set()
        deltas(submit, ["tail"])
        submit.sender.finish(finished(1))
        chunks = []
        while chunk := await client.chunk():
            chunks.append(chunk)
        assert any(b"tail" in chunk for chunk in chunks)
        await server.ended.wait()


def test_port_in_use_is_one_line() -> None:
    settings = HttpSettings()
    (taken,) = bind_sockets("127.0.0.1", 0, settings)
    port = taken.getsockname()[1]
    with taken, pytest.raises(BindError) as caught:
        bind_sockets("127.0.0.1", port, settings)
    assert f"127.0.0.1:{port}" in str(caught.value)
    assert "in use" in str(caught.value)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(("host", "port"), [("no such host.invalid", 80), ("127.0.0.1", 70_000)])
def test_bad_addresses_are_bind_errors(host: str, port: int) -> None:
    with pytest.raises(BindError) as caught:
        bind_sockets(host, port, HttpSettings())
    assert host in str(caught.value)


def test_socket_options() -> None:
    for sock in bind_sockets("localhost", 0, HttpSettings(tcp_user_timeout_s=3.0)):
        with sock:
            assert sock.getsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR)
            if hasattr(socket, "TCP_USER_TIMEOUT"):
                assert sock.getsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT) == 3000
