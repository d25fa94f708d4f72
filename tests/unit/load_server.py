"""A small OpenAI-like server on a loopback socket, for the tests of the load generator."""

from __future__ import annotations

import json
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import trio


@dataclass(slots=True, kw_only=True)
class FakeServer:
    """``slots`` requests at a time are served, more get 503; tokens come every ``gap_s``.

    ``requests`` holds the bodies received, ``left`` counts clients that went away early.
    """

    slots: int = 1000
    gap_s: float = 0.0
    close_delimited: bool = False
    error_event: bool = False
    silent: bool = False
    retry_after: bool = True
    requests: list[dict[str, Any]] = field(default_factory=list)
    connections: int = 0
    active: int = 0
    most: int = 0
    left: int = 0
    port: int = 0

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.port}"

    async def serve(self, stream: trio.SocketStream) -> None:
        self.connections += 1
        async with stream:
            try:
                while await self._one(stream):
                    pass
            except (trio.BrokenResourceError, trio.ClosedResourceError):
                self.left += 1

    async def _one(self, stream: trio.SocketStream) -> bool:
        head = b""
        while b"\r\n\r\n" not in head:
            data = await stream.receive_some()
            if not data:
                return False
            head += data
        head, _, body = head.partition(b"\r\n\r\n")
        lines = head.decode().lower().split("\r\n")
        length = next((int(x.split(":")[1]) for x in lines if x.startswith("content-length")), 0)
        while len(body) < length:
            body += await stream.receive_some()
        if lines[0].startswith("get /v1/models"):
            await self._json(stream, 200, {"data": [{"id": "fake"}]})
        elif lines[0].startswith("get /health"):
            batch = {"active_sequences": self.active, "queue_depth": 0}
            await self._json(stream, 200, {"status": "ok", "batch": batch})
        elif lines[0].startswith("get "):
            await self._json(stream, 404, {"error": {"message": "no such route"}})
        else:
            return await self._chat(stream, json.loads(body))
        return "connection: close" not in lines

    async def _json(self, stream: trio.SocketStream, status: int, value: Any) -> None:
        body = json.dumps(value).encode()
        hint = "Retry-After: 2\r\n" if status == 503 and self.retry_after else ""
        head = f"HTTP/1.1 {status} X\r\nContent-Length: {len(body)}\r\n{hint}\r\n"
        await stream.send_all(head.encode() + body)

    async def _chat(self, stream: trio.SocketStream, request: dict[str, Any]) -> bool:
        self.requests.append(request)
        if self.silent:
            await trio.sleep_forever()
        if self.active >= self.slots:
            await self._json(stream, 503, {"error": {"message": "busy"}})
            return True
        self.active += 1
        self.most = max(self.most, self.active)
        try:
            return await self._generate(stream, request)
        finally:
            self.active -= 1

    async def _generate(self, stream: trio.SocketStream, request: dict[str, Any]) -> bool:
        count = request["max_tokens"]
        usage = {"prompt_tokens": 5, "completion_tokens": count}
        if not request["stream"]:
            await trio.sleep(self.gap_s * count)
            choice = {"message": {"content": "x " * count}, "finish_reason": "length"}
            await self._json(stream, 200, {"choices": [choice], "usage": usage})
            return True
        framing = "Connection: close" if self.close_delimited else "Transfer-Encoding: chunked"
        head = f"HTTP/1.1 200 OK\r\nContent-Type: text/event-stream\r\n{framing}\r\n\r\n"
        await stream.send_all(head.encode())
        send = partial(self._event, stream)
        await send({"choices": [{"delta": {"role": "assistant"}, "finish_reason": None}]})
        for index in range(count):
            await trio.sleep(self.gap_s)
            if self.error_event and index == 1:
                await send({"error": {"message": "the batch was lost"}})
                break
            await send({"choices": [{"delta": {"content": f"t{index} "}}]})
        else:
            await send({"choices": [{"delta": {}, "finish_reason": "length"}]})
            await send({"choices": [], "usage": usage})
        await send(None)
        if not self.close_delimited:
            await stream.send_all(b"0\r\n\r\n")
        return not self.close_delimited

    async def _event(self, stream: trio.SocketStream, value: Any) -> None:
        text = "[DONE]" if value is None else json.dumps(value)
        data = f"data: {text}\n\n".encode()
        if not self.close_delimited:
            data = b"%x\r\n%b\r\n" % (len(data), data)
        await stream.send_all(data)


@asynccontextmanager
async def running(server: FakeServer) -> AsyncIterator[FakeServer]:
    """``server`` on a free loopback port."""
    async with trio.open_nursery() as nursery:
        listeners = await nursery.start(
            partial(trio.serve_tcp, server.serve, 0, host="127.0.0.1", handler_nursery=nursery)
        )
        server.port = listeners[0].socket.getsockname()[1]
        yield server
        nursery.cancel_scope.cancel()
