from __future__ import annotations

import logging

import pytest
import trio
import trio.testing

from actors.messages import Submit
from actors.requests import Priority
from tests.http.asgi_client import call, fetch
from tests.http.fakes import FakeRuntime, accept_only, chat, deltas, finished, ignore, say

PATH = "/v1/chat/completions"


@pytest.mark.parametrize("stream", [False, True])
async def test_client_leaves_before_accepted(runtime: FakeRuntime, stream: bool) -> None:
    runtime.answer = ignore
    async with trio.open_nursery() as clients:
        request = call(runtime.app, "POST", PATH, chat(stream=stream))
        clients.start_soon(request.run)
        await trio.testing.wait_all_tasks_blocked()
        assert not runtime.submits[0].sender.abandoned
        request.leave()
        await request.ended.wait()
        assert runtime.submits[0].sender.abandoned
        assert not request.started.is_set()


@pytest.mark.parametrize("stream", [False, True])
async def test_client_leaves_in_mid_answer(runtime: FakeRuntime, stream: bool) -> None:
    accepted: list[Submit] = []
    runtime.answer = accept_only(accepted)
    async with trio.open_nursery() as clients:
        request = call(runtime.app, "POST", PATH, chat(stream=stream))
        clients.start_soon(request.run)
        await trio.testing.wait_all_tasks_blocked()
        deltas(accepted[0], ["a", "b"])
        await trio.testing.wait_all_tasks_blocked()
        assert accepted[0].sender.room() > 0
        request.leave()
        await request.ended.wait()
        assert accepted[0].sender.room() == -1
        assert not request.completed
        assert request.started.is_set() == stream


async def test_cancelled_server_closes_the_request(runtime: FakeRuntime) -> None:
    runtime.answer = ignore
    async with trio.open_nursery() as clients:
        clients.start_soon(call(runtime.app, "POST", PATH, chat(stream=True)).run)
        await trio.testing.wait_all_tasks_blocked()
        clients.cancel_scope.cancel()
    assert runtime.submits[0].sender.abandoned


async def test_no_disconnect_is_seen_after_the_last_message(runtime: FakeRuntime) -> None:
    """The client's send of the last message goes on to the end, as it must for keep-alive."""
    went_on = trio.Event()
    request = call(runtime.app, "POST", PATH, chat())
    original = request._send

    async def slow_end(message: dict[str, object]) -> None:
        await original(message)  # puts http.disconnect into the queue at the end
        if request.completed:
            await trio.testing.wait_all_tasks_blocked()
            went_on.set()

    request._send = slow_end  # type: ignore[method-assign]
    await request.run()
    assert went_on.is_set()


async def test_the_channel_is_closed_after_a_normal_end(runtime: FakeRuntime) -> None:
    for stream in (False, True):
        await fetch(runtime.app, "POST", PATH, chat(stream=stream))
        assert runtime.submits[-1].sender.abandoned
    assert runtime.places.free == runtime.places.count


async def test_request_fields_reach_the_actors(runtime: FakeRuntime) -> None:
    before = trio.current_time()
    body = chat(max_tokens=9, stop="x", seed=5)
    reply = await fetch(runtime.app, "POST", PATH, body, headers=[("X-Priority", "high")])
    request = runtime.submits[0].request
    assert request.request_id == reply.json()["id"]
    assert request.lane is Priority.HIGH
    assert (request.max_tokens, request.stop, request.sampling.seed) == (9, ("x",), 5)
    timeout = runtime.settings.request_timeout_s
    assert before + timeout <= request.deadline_s <= trio.current_time() + timeout


async def test_unseeded_requests_get_different_seeds(runtime: FakeRuntime) -> None:
    for _ in range(3):
        await fetch(runtime.app, "POST", PATH, chat())
    assert len({submit.request.sampling.seed for submit in runtime.submits}) == 3
    assert len({submit.request.request_id for submit in runtime.submits}) == 3


async def test_one_log_line_per_request(
    runtime: FakeRuntime, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO, logger="mlxcel.http")
    secret = chat(messages=[{"role": "user", "content": "very private"}], stream=True)
    headers = [("Authorization", "Bearer hidden"), ("X-Priority", "low")]
    runtime.answer = say("a", "b")
    reply = await fetch(runtime.app, "POST", f"{PATH}?key=hidden", secret, headers=headers)
    await fetch(runtime.app, "GET", "/nope%0aforged")
    runtime.answer = ignore
    async with trio.open_nursery() as clients:
        request = call(runtime.app, "POST", PATH, chat())
        clients.start_soon(request.run)
        await trio.testing.wait_all_tasks_blocked()
        request.leave()
    lines = [record.getMessage() for record in caplog.records]
    assert len(lines) == 3
    first = lines[0]
    assert first.startswith(f"{reply.headers['x-request-id']} POST {PATH} 200 end=stop lane=low")
    assert "prompt_tokens=7 completion_tokens=2 first_token_ms=" in first
    assert "hidden" not in first
    assert "private" not in first
    assert "GET /nope%0aforged 404 end=404" in lines[1]
    assert f"POST {PATH} - end=client_left" in lines[2]


async def test_the_tail_of_a_buffered_answer_is_not_lost(runtime: FakeRuntime) -> None:
    accepted: list[Submit] = []
    runtime.answer = accept_only(accepted)
    async with trio.open_nursery() as clients:
        request = call(runtime.app, "POST", PATH, chat(stream=True))
        clients.start_soon(request.run)
        await trio.testing.wait_all_tasks_blocked()
        deltas(accepted[0], ["x"] * 60)
        accepted[0].sender.finish(finished(60, text="end"))
    assert request.text() == "x" * 60 + "end"
    assert request.completed
