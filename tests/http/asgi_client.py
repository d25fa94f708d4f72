"""An in-memory ASGI client: one call per request, with control over when the client leaves."""

from __future__ import annotations

import json
from collections.abc import Iterable
from typing import Any

import trio

Headers = Iterable[tuple[str, str]]


class Call:
    """One request.  ``chunks`` are the body messages that were not empty, in order."""

    def __init__(self, app: Any, method: str, path: str, body: bytes, headers: Headers) -> None:
        self._app = app
        raw_path, _, query = path.partition("?")
        self.scope: dict[str, Any] = {
            "type": "http",
            "asgi": {"version": "3.0", "spec_version": "2.1"},
            "http_version": "1.1",
            "method": method,
            "scheme": "http",
            "path": raw_path,
            "raw_path": raw_path.encode(),
            "query_string": query.encode(),
            "root_path": "",
            "headers": [
                (b"host", b"test"),
                (b"content-length", str(len(body)).encode()),
                *((name.lower().encode(), value.encode()) for name, value in headers),
            ],
            "client": ("127.0.0.1", 1),
            "server": ("127.0.0.1", 2),
            "state": {},
            "extensions": {},
        }
        self._to_app, self._from_client = trio.open_memory_channel[dict[str, Any]](10)
        self._to_app.send_nowait({"type": "http.request", "body": body, "more_body": False})
        self.status = 0
        self.headers: dict[str, str] = {}
        self.chunks: list[bytes] = []
        self.chunk_times: list[float] = []
        self.started = trio.Event()
        self.completed = False
        self.ended = trio.Event()

    async def run(self) -> Call:
        try:
            await self._app(self.scope, self._from_client.receive, self._send)
        finally:
            self.ended.set()
        return self

    async def _send(self, message: dict[str, Any]) -> None:
        await trio.lowlevel.checkpoint()
        if message["type"] == "http.response.start":
            assert not self.started.is_set()
            self.status = message["status"]
            self.headers = {k.decode().lower(): v.decode() for k, v in message["headers"]}
            self.started.set()
            return
        assert message["type"] == "http.response.body"
        assert self.started.is_set()
        assert not self.completed, "a body message after the last one"
        if message.get("body"):
            self.chunks.append(message["body"])
            self.chunk_times.append(trio.current_time())
        if not message.get("more_body"):
            self.completed = True
            # What Hypercorn does at the end of an exchange.
            await self._to_app.send({"type": "http.disconnect"})

    def leave(self) -> None:
        self._to_app.send_nowait({"type": "http.disconnect"})

    @property
    def body(self) -> bytes:
        return b"".join(self.chunks)

    def json(self) -> Any:
        return json.loads(self.body)

    def error(self) -> dict[str, Any]:
        error = self.json()["error"]
        assert set(error) <= {"message", "type", "code", "param"}
        assert isinstance(error["message"], str)
        assert error["message"]
        return error

    def events(self) -> list[Any]:
        """The data events of a stream, decoded; ``[DONE]`` stays a string.  One per chunk."""
        events: list[Any] = []
        for chunk in self.chunks:
            if chunk.startswith(b":"):
                continue
            assert chunk.startswith(b"data: "), chunk
            assert chunk.endswith(b"\n\n"), chunk
            assert chunk.count(b"\n") == 2, chunk
            text = chunk[6:-2].decode()
            events.append(text if text == "[DONE]" else json.loads(text))
        return events

    def text(self) -> str:
        """All content deltas joined."""
        return "".join(
            choice["delta"].get("content", "")
            for event in self.events()
            if isinstance(event, dict)
            for choice in event.get("choices", [])
        )


def call(
    app: Any,
    method: str,
    path: str,
    payload: Any = None,
    *,
    body: bytes | None = None,
    headers: Headers = (),
) -> Call:
    if body is None:
        body = b"" if payload is None else json.dumps(payload).encode()
    return Call(app, method, path, body, headers)


async def fetch(app: Any, method: str, path: str, payload: Any = None, **kwargs: Any) -> Call:
    return await call(app, method, path, payload, **kwargs).run()
