from __future__ import annotations

import logging
from typing import Any

import pytest
import trio

from actors.errors import ErrorCode
from actors.generation import BUSY_MESSAGE
from actors.messages import Submit
from actors.phase import Phase
from httpapi.errors import SHAPES
from tests.http.asgi_client import call, fetch
from tests.http.fakes import FakeRuntime, accept, chat, deltas, ignore, refuse

PATH = "/v1/chat/completions"

BAD_BODIES = [
    b"",
    b"   ",
    b"{",
    b"nonsense",
    b"[]",
    b'"text"',
    b"5",
    b"null",
    b"\xff\xfe",
    b'{"a":"\xc3\x28"}',
    b'{"model":"m","messages":[{"role":"user","content":"x"}],"temperature":NaN}',
    b'{"model":"m","messages":[{"role":"user","content":"x"}],"temperature":Infinity}',
    b'{"model":"m","messages":[{"role":"user","content":"x"}],"temperature":-Infinity}',
    b'{"model":"m","messages":[{"role":"user","content":"x"}],"temperature":1e999}',
    b'{"model":"m","messages":[{"role":"user","content":"x"}],"whatever":1e999}',
    b'{"model":"m","messages":[{"role":"user","content":"x"}],"top_k":' + b"9" * 5000 + b"}",
    b'{"model":"m","messages":[{"role":"user","content":"x"}],"top_k":' + b"9" * 400 + b"}",
    b'{"model":"m","messages":[{"role":"user","content":"\\ud83d"}]}',
    b'{"model":"m","messages":' + b"[" * 100_000 + b"]" * 100_000 + b"}",
    b'{"model":"m","x":' + b'{"a":' * 500 + b"1" + b"}" * 500 + b"}",
    b'{"model":"m","x":' + b"[" * 200 + b"]" * 200 + b',"messages":[]}',
]


@pytest.mark.parametrize("body", BAD_BODIES, ids=lambda body: repr(body[:50]))
async def test_malformed_bodies_are_400(runtime: FakeRuntime, body: bytes) -> None:
    reply = await fetch(runtime.app, "POST", PATH, body=body)
    assert reply.status == 400
    assert reply.headers["content-type"] == "application/json"
    error = reply.error()
    assert error["type"] == "invalid_request_error"
    assert error["code"] is None
    assert not runtime.submits
    assert runtime.places.free == runtime.places.count


async def test_body_forms_that_are_fine(runtime: FakeRuntime) -> None:
    text = b'{"model":"m","model":"n","messages":[{"role":"user","content":"\\ud83d\\ude00"}]}'
    for body in (text, b"\xef\xbb\xbf" + text, b"\n " + text + b" "):
        for headers in ([], [("Content-Type", "application/x-www-form-urlencoded")]):
            reply = await fetch(runtime.app, "POST", PATH, body=body, headers=headers)
            assert reply.status == 200
    prompt: Any = runtime.submits[0].request.prompt
    assert prompt.messages[0]["content"] == "\U0001f600"


async def test_a_long_body_is_parsed_on_a_thread(nursery: trio.Nursery) -> None:
    runtime = FakeRuntime(json_thread_bytes=1000)
    nursery.start_soon(runtime.run)
    text = "word " * 1000
    reply = await fetch(
        runtime.app, "POST", PATH, chat(messages=[{"role": "user", "content": text}])
    )
    assert reply.status == 200
    prompt: Any = runtime.submits[0].request.prompt
    assert prompt.messages[0]["content"] == text
    assert (await fetch(runtime.app, "POST", PATH, body=b"[" * 2000)).status == 400
    nursery.cancel_scope.cancel()


@pytest.mark.parametrize("code", list(ErrorCode))
async def test_each_error_code_has_its_status(runtime: FakeRuntime, code: ErrorCode) -> None:
    runtime.answer = refuse(code, "the reason", param="messages")
    for stream in (False, True):
        reply = await fetch(runtime.app, "POST", PATH, chat(stream=stream))
        shape = SHAPES[code]
        assert reply.status == shape.status
        assert reply.headers["content-type"] == "application/json"
        assert reply.error() == {
            "message": "the reason",
            "type": shape.type,
            "code": shape.code,
            "param": "messages",
        }
        assert ("retry-after" in reply.headers) == (shape.status == 503)


async def test_a_failure_after_accepted_is_a_status_when_not_streamed(
    runtime: FakeRuntime,
) -> None:
    async def answer(submit: Submit) -> None:
        accept(submit)
        submit.sender.fail(ErrorCode.DEADLINE, "too late")

    runtime.answer = answer
    reply = await fetch(runtime.app, "POST", PATH, chat())
    assert reply.status == 504
    assert reply.error()["type"] == "server_timeout"


@pytest.mark.parametrize("stream", [False, True])
async def test_full_server_refuses_at_once(runtime: FakeRuntime, stream: bool) -> None:
    runtime.answer = ignore
    async with trio.open_nursery() as clients:
        for _ in range(runtime.places.count):
            clients.start_soon(call(runtime.app, "POST", PATH, chat()).run)
        await trio.testing.wait_all_tasks_blocked()
        reply = await fetch(runtime.app, "POST", PATH, chat(stream=stream))
        assert reply.status == 503
        assert reply.headers["content-type"] == "application/json"
        assert reply.headers["retry-after"] == "3"  # 2.4 rounded up
        assert reply.error()["type"] == "server_busy"
        assert reply.error()["message"] == BUSY_MESSAGE
        clients.cancel_scope.cancel()
    assert runtime.refusals == ["server_busy"]
    assert len(runtime.submits) == runtime.places.count


async def test_the_estimate_of_the_error_wins(runtime: FakeRuntime) -> None:
    for seconds, header in ((0.0, "1"), (0.2, "1"), (7.0, "7"), (7.1, "8")):
        runtime.answer = refuse(ErrorCode.SERVER_BUSY, retry_after_s=seconds)
        reply = await fetch(runtime.app, "POST", PATH, chat())
        assert reply.headers["retry-after"] == header


@pytest.mark.parametrize("phase", [Phase.STARTING, Phase.DRAINING, Phase.STOPPED])
async def test_every_503_has_retry_after(runtime: FakeRuntime, phase: Phase) -> None:
    runtime.phase.phase = phase
    if phase is Phase.STARTING:
        runtime.model = None
    seen = 0
    for method, path in (
        ("POST", PATH),
        ("GET", "/health"),
        ("GET", "/"),
        ("GET", "/v1/models"),
        ("GET", "/slots"),
        ("HEAD", "/health"),
    ):
        reply = await fetch(runtime.app, method, path, chat() if method == "POST" else None)
        if reply.status == 503:
            seen += 1
            assert int(reply.headers["retry-after"]) >= 1
    assert seen == (6 if phase is Phase.STARTING else 4)


async def test_bad_requests_are_400_even_when_there_is_no_place(runtime: FakeRuntime) -> None:
    runtime.phase.phase = Phase.DRAINING
    assert (await fetch(runtime.app, "POST", PATH, body=b"{")).status == 400


@pytest.mark.parametrize(
    "path", ["/nope", "/v1", "/v1/chat/completions/x", "/v1//models", "/v1/%2e%2e/health", "*"]
)
async def test_unknown_paths_are_404(runtime: FakeRuntime, path: str) -> None:
    for method in ("GET", "POST", "DELETE"):
        reply = await fetch(runtime.app, method, path)
        assert reply.status == 404
        assert reply.error()["type"] == "not_found"
        assert reply.headers["content-type"] == "application/json"


@pytest.mark.parametrize(
    ("method", "path", "allow"),
    [
        ("GET", PATH, "POST"),
        ("PUT", PATH, "POST"),
        ("BREW", PATH, "POST"),
        ("POST", "/v1/models", "GET"),
        ("DELETE", "/health", "GET"),
        ("POST", "/", "GET"),
    ],
)
async def test_wrong_methods_are_405_with_allow(
    runtime: FakeRuntime, method: str, path: str, allow: str
) -> None:
    reply = await fetch(runtime.app, method, path)
    assert reply.status == 405
    assert allow in reply.headers["allow"].split(", ")
    assert reply.error()["type"] == "invalid_request_error"


@pytest.mark.parametrize("path", ["/v1/models", "/models", "/", "/health", "/v1/health", "/slots"])
async def test_head_and_trailing_slash(runtime: FakeRuntime, path: str) -> None:
    assert (await fetch(runtime.app, "HEAD", path)).status == 200
    if path != "/":
        assert (await fetch(runtime.app, "GET", f"{path}/")).status == 200


async def test_chat_with_a_trailing_slash(runtime: FakeRuntime) -> None:
    assert (await fetch(runtime.app, "POST", f"{PATH}/", chat())).status == 200


async def test_body_too_large(nursery: trio.Nursery) -> None:
    runtime = FakeRuntime(max_body_bytes=100)
    nursery.start_soon(runtime.run)
    reply = await fetch(runtime.app, "POST", PATH, body=b"x" * 101)
    assert reply.status == 413
    assert reply.error()["message"] == "Request body too large."
    assert reply.error()["type"] == "invalid_request_error"
    assert reply.headers["connection"] == "close"
    nursery.cancel_scope.cancel()


async def test_body_that_stalls_is_408(
    nursery: trio.Nursery, autojump_clock: trio.testing.MockClock
) -> None:
    runtime = FakeRuntime(body_timeout_s=5.0)
    nursery.start_soon(runtime.run)
    request = call(runtime.app, "POST", PATH, body=b"{")
    request._from_client.receive_nowait()
    request._to_app.send_nowait({"type": "http.request", "body": b"{", "more_body": True})
    start = trio.current_time()
    await request.run()
    assert trio.current_time() - start == pytest.approx(5.0, abs=0.1)
    assert request.status == 408
    assert request.error()["type"] == "invalid_request_error"
    assert request.headers["connection"] == "close"
    nursery.cancel_scope.cancel()


@pytest.mark.parametrize(
    "headers",
    [
        [("x-big", "v" * 40_000)],
        [("x-big", "v" * 20_000), ("x-also", "v" * 20_000)],
        [(f"x-{number}", "v") for number in range(101)],
    ],
)
async def test_large_heads_are_431(runtime: FakeRuntime, headers: list[tuple[str, str]]) -> None:
    reply = await fetch(runtime.app, "POST", PATH, chat(), headers=headers)
    assert reply.status == 431
    assert reply.error()["type"] == "invalid_request_error"
    assert reply.headers["connection"] == "close"
    assert not runtime.submits


async def test_long_target_is_431(runtime: FakeRuntime) -> None:
    assert (await fetch(runtime.app, "GET", "/" + "a" * 40_000)).status == 431
    assert (await fetch(runtime.app, "GET", "/health?" + "a" * 40_000)).status == 431


async def test_a_refused_head_does_not_wait_for_the_body(runtime: FakeRuntime) -> None:
    """The server below may be blocked on a full queue of body messages."""
    request = call(runtime.app, "POST", PATH, body=b"x", headers=[("x", "v" * 40_000)])
    async with trio.open_nursery() as nursery:
        nursery.start_soon(request.run)
        for _ in range(30):
            await request._to_app.send({"type": "http.request", "body": b"x", "more_body": True})
            if request.completed:
                break
        await request.ended.wait()
    assert request.status == 431


async def test_a_bug_is_500_without_internals(
    runtime: FakeRuntime, caplog: pytest.LogCaptureFixture
) -> None:
    def broken() -> Any:
        raise ValueError("secret detail")

    object.__setattr__(runtime.ports, "status", broken)
    with caplog.at_level(logging.INFO, logger="mlxcel.http"):
        reply = await fetch(runtime.app, "GET", "/slots")
    assert reply.status == 500
    assert reply.error() == {
        "message": "Internal server error.",
        "type": "server_error",
        "code": None,
    }
    assert reply.headers["x-request-id"]
    assert b"secret" not in reply.body
    errors = [record for record in caplog.records if record.levelno == logging.ERROR]
    assert len(errors) == 1
    assert "secret detail" in (errors[0].exc_text or "")
    assert reply.headers["x-request-id"] in errors[0].getMessage()


async def test_a_bug_in_mid_stream_ends_the_exchange(
    runtime: FakeRuntime, caplog: pytest.LogCaptureFixture
) -> None:
    async def answer(submit: Submit) -> None:
        accept(submit)
        deltas(submit, ["fine", 5])  # type: ignore[list-item]

    runtime.answer = answer
    reply = await fetch(runtime.app, "POST", PATH, chat(stream=True))
    assert reply.text() == "fine"
    assert not reply.completed  # so that the server below cuts the connection
    assert runtime.submits[0].sender.abandoned
    assert [record.levelno for record in caplog.records].count(logging.ERROR) == 1
