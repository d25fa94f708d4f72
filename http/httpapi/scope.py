"""RequestScope: the outermost ASGI wrapper, which owns what a request holds.

A response body alone is not enough as an owner: a client that leaves before the first byte never
enters it.  So whatever a request opens is registered with its RequestRecord, and this wrapper
closes it in a ``finally`` that does not await.

It also repairs the keep-alive of the server below.  When a response is complete, Hypercorn puts
``http.disconnect`` into the request's queue; Quart-Trio takes that for a client that left and
cancels the request, and with it the very send call that was about to start the connection's idle
timer.  The connection then stays open for ever.  Hence: once the last body message was handed
over, no disconnect is delivered any more.
"""

from __future__ import annotations

import logging

import trio

from actors.ports import Ports
from httpapi.asgi import RECORD_KEY, ASGIApp, Message, Receive, Scope, Send
from httpapi.errors import CLOSING_STATUSES, dump_json, envelope, http_error, retry_after
from httpapi.record import CLIENT_LEFT, RequestRecord
from httpapi.settings import HttpSettings

logger = logging.getLogger("mlxcel.http")

_MAX_LOGGED_TARGET = 200


class RequestScope:
    """Wraps the application; one ``RequestRecord`` per HTTP request."""

    def __init__(self, app: ASGIApp, ports: Ports, settings: HttpSettings) -> None:
        self._app = app
        self._ports = ports
        self._settings = settings

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "websocket":
            await _refuse_websocket(scope, send)
            return
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        exchange = _Exchange(scope, receive, send, self._ports)
        record = exchange.record = self._new_record(scope, exchange.send)
        scope[RECORD_KEY] = record
        try:
            if self._head_fits(scope):
                await self._app(scope, exchange.receive, exchange.send)
            else:
                await exchange.refuse(431)
        except Exception:
            # The boundary of a request: a bug ends this request, is logged in full, and the
            # client learns no more than that it was the server's fault.
            logger.exception("%s: unhandled error", record.request_id)
            record.outcome = "internal"
            if not exchange.started:
                await exchange.refuse(500)
        finally:
            record.close_generations()
            if record.outcome is None and not exchange.completed:
                record.outcome = CLIENT_LEFT
            record.log(trio.current_time())

    def _new_record(self, scope: Scope, send: Send) -> RequestRecord:
        now = trio.current_time()
        return RequestRecord(
            request_id=self._ports.seams.new_id("req-"),
            method=scope["method"],
            # As sent, still percent-encoded: a decoded path could hold line breaks.
            target=_raw_path(scope).decode("latin-1")[:_MAX_LOGGED_TARGET],
            started_s=now,
            deadline_s=now + self._settings.request_timeout_s,
            send=send,
        )

    def _head_fits(self, scope: Scope) -> bool:
        headers = scope["headers"]
        if len(headers) > self._settings.max_headers:
            return False
        size = len(_raw_path(scope)) + len(scope.get("query_string", b""))
        size += sum(len(name) + len(value) for name, value in headers)
        return size <= self._settings.max_header_bytes


async def _refuse_websocket(scope: Scope, send: Send) -> None:
    """No route speaks WebSocket: the handshake is answered like an unknown path."""
    if "websocket.http.response" not in scope.get("extensions", {}):
        await send({"type": "websocket.close", "code": 1000})
        return
    type_, message = http_error(404)
    body = dump_json(envelope(message, type_))
    headers = [
        (b"content-type", b"application/json"),
        (b"content-length", str(len(body)).encode()),
    ]
    await send({"type": "websocket.http.response.start", "status": 404, "headers": headers})
    await send({"type": "websocket.http.response.body", "body": body, "more_body": False})


def _raw_path(scope: Scope) -> bytes:
    raw: bytes | None = scope.get("raw_path")
    return raw if raw is not None else ascii(scope["path"])[1:-1].encode()


class _Exchange:
    """The two ASGI callables of one request, with what the wrapper has to know about them."""

    __slots__ = ("_ports", "_receive", "_scope", "_send", "completed", "record", "started")

    record: RequestRecord

    def __init__(self, scope: Scope, receive: Receive, send: Send, ports: Ports) -> None:
        self._scope = scope
        self._receive = receive
        self._send = send
        self._ports = ports
        self.started = False
        self.completed = False

    async def receive(self) -> Message:
        message = await self._receive()
        if self.completed and message["type"] == "http.disconnect":
            await trio.sleep_forever()
        return message

    async def send(self, message: Message) -> None:
        if message["type"] == "http.response.body":
            if not message.get("more_body", False):
                self.completed = True
        elif message["type"] == "http.response.start":
            self.started = True
            self.record.status = message["status"]
            message["headers"] = self._headers(message["status"], message["headers"])
        await self._send(message)

    def _headers(
        self, status: int, headers: list[tuple[bytes, bytes]]
    ) -> list[tuple[bytes, bytes]]:
        names = {name.lower() for name, _ in headers}
        result = [*headers, (b"x-request-id", self.record.request_id.encode("ascii"))]
        if status == 503 and b"retry-after" not in names:
            result.append((b"retry-after", retry_after(self._ports.retry_after_s()).encode()))
        if status in CLOSING_STATUSES and str(self._scope["http_version"]).startswith("1"):
            result.append((b"connection", b"close"))
        return result

    async def refuse(self, status: int) -> None:
        """Send a JSON error without the application.

        The request's messages are read meanwhile: the server below puts them into a bounded queue
        and would wait for room in it, also when it ends the exchange.
        """
        type_, message = http_error(status)
        body = dump_json(envelope(message, type_))
        if self.record.outcome is None:
            self.record.outcome = str(status)
        async with trio.open_nursery() as nursery:
            nursery.start_soon(self._drain, nursery.cancel_scope)
            await self.send(
                {
                    "type": "http.response.start",
                    "status": status,
                    "headers": [
                        (b"content-type", b"application/json"),
                        (b"content-length", str(len(body)).encode()),
                    ],
                }
            )
            await self.send({"type": "http.response.body", "body": body, "more_body": False})
            nursery.cancel_scope.cancel()

    async def _drain(self, ended: trio.CancelScope) -> None:
        while (await self.receive())["type"] != "http.disconnect":
            pass
        ended.cancel()
