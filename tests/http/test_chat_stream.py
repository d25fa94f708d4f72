from __future__ import annotations

import json
import random

import pytest
import trio

from actors.errors import ErrorCode
from actors.events import FinishReason
from actors.kit.seams import Seams
from actors.messages import Submit
from tests.http.asgi_client import call, fetch
from tests.http.fakes import FakeRuntime, accept, chat, deltas, finished, say

PATH = "/v1/chat/completions"


def expected_id() -> str:
    seams = Seams(rng=random.Random(1))
    seams.new_id("req-")
    return seams.new_id("chatcmpl-")


async def test_golden_transcript(runtime: FakeRuntime) -> None:
    runtime.answer = say("Hel", "", 'lo "\n', reason=FinishReason.LENGTH, tail="é\U0001f600")
    reply = await fetch(
        runtime.app, "POST", PATH, chat(stream=True, stream_options={"include_usage": True})
    )
    assert reply.status == 200
    assert reply.headers["content-type"] == "text/event-stream"
    assert reply.headers["cache-control"] == "no-cache"
    assert reply.headers["x-accel-buffering"] == "no"
    assert "content-length" not in reply.headers

    def chunk(choices: str, rest: str = "") -> bytes:
        return (
            f'data: {{"id":"{expected_id()}","object":"chat.completion.chunk",'
            f'"created":1715000000,"model":"tiny-chat","system_fingerprint":null,'
            f'"choices":[{choices}]{rest}}}\n\n'
        ).encode()

    def choice(delta: str, reason: str = "null") -> bytes:
        return chunk(
            f'{{"index":0,"delta":{delta},"finish_reason":{reason},"logprobs":null}}',
        )

    assert reply.chunks == [
        choice('{"role":"assistant"}'),
        choice('{"content":"Hel"}'),
        choice('{"content":"lo \\"\\n"}'),
        choice('{"content":"é\U0001f600"}'),
        choice("{}", '"length"'),
        chunk(
            "",
            ',"usage":{"prompt_tokens":7,"completion_tokens":3,"total_tokens":10,'
            '"prompt_tokens_details":{"cached_tokens":0}}',
        ),
        b"data: [DONE]\n\n",
    ]


@pytest.mark.parametrize("options", [None, {}, {"include_usage": False}, {"include_usage": None}])
async def test_usage_only_when_asked_for(
    runtime: FakeRuntime, options: dict[str, object] | None
) -> None:
    reply = await fetch(runtime.app, "POST", PATH, chat(stream=True, stream_options=options))
    events = reply.events()
    assert events[-1] == "[DONE]"
    assert all("usage" not in event for event in events[:-1])
    assert all(event["choices"] for event in events[:-1])
    assert len({event["id"] for event in events[:-1]}) == 1
    reasons = [event["choices"][0]["finish_reason"] for event in events[:-1]]
    assert [reason for reason in reasons if reason] == ["stop"]
    assert reasons[-1] == "stop"


async def test_stream_options_are_ignored_without_stream(runtime: FakeRuntime) -> None:
    reply = await fetch(
        runtime.app, "POST", PATH, chat(stream_options={"include_usage": True}, stream=False)
    )
    assert reply.json()["object"] == "chat.completion"


async def test_streamed_text_and_usage_equal_the_whole_answer(runtime: FakeRuntime) -> None:
    runtime.answer = say("one ", "", "two", reason=FinishReason.STOP_STRING, tail=" 漢字")
    whole = await fetch(runtime.app, "POST", PATH, chat())
    streamed = await fetch(
        runtime.app, "POST", PATH, chat(stream=True, stream_options={"include_usage": True})
    )
    message = whole.json()["choices"][0]["message"]
    assert message == {"role": "assistant", "content": "one two 漢字"}
    assert streamed.text() == message["content"]
    assert whole.json()["choices"][0]["finish_reason"] == "stop"
    assert streamed.events()[-2]["usage"] == whole.json()["usage"]
    assert streamed.events()[-2]["choices"] == []


async def test_whole_answer_has_every_field(runtime: FakeRuntime) -> None:
    reply = await fetch(runtime.app, "POST", "/chat/completions", chat())
    assert reply.status == 200
    assert reply.headers["content-type"] == "application/json"
    assert reply.json() == {
        "id": expected_id(),
        "object": "chat.completion",
        "created": 1715000000,
        "model": "tiny-chat",
        "system_fingerprint": None,
        "choices": [
            {
                "index": 0,
                "message": {"role": "assistant", "content": "Hello"},
                "finish_reason": "stop",
                "logprobs": None,
            }
        ],
        "usage": {
            "prompt_tokens": 7,
            "completion_tokens": 1,
            "total_tokens": 8,
            "prompt_tokens_details": {"cached_tokens": 0},
        },
    }


async def test_empty_answer_is_an_empty_string(runtime: FakeRuntime) -> None:
    runtime.answer = say(reason=FinishReason.LENGTH)
    whole = await fetch(runtime.app, "POST", PATH, chat(max_tokens=0))
    assert whole.json()["choices"][0]["message"]["content"] == ""
    assert whole.json()["choices"][0]["finish_reason"] == "length"
    streamed = await fetch(runtime.app, "POST", PATH, chat(max_tokens=0, stream=True))
    assert [event["choices"][0]["delta"] for event in streamed.events()[:-1]] == [
        {"role": "assistant"},
        {},
    ]


async def test_failure_in_mid_stream_ends_with_an_error_event(runtime: FakeRuntime) -> None:
    async def answer(submit: Submit) -> None:
        accept(submit)
        deltas(submit, ["Hel"])
        submit.sender.fail(ErrorCode.ENGINE_ERROR, "Generation error: step failed")

    runtime.answer = answer
    reply = await fetch(
        runtime.app, "POST", PATH, chat(stream=True, stream_options={"include_usage": True})
    )
    assert reply.status == 200
    events = reply.events()
    assert events[-1] == "[DONE]"
    assert events[-3]["choices"][0]["finish_reason"] == "error"
    assert events[-2] == {
        "error": {"message": "Generation error: step failed", "type": "server_error", "code": None}
    }
    assert all("usage" not in event for event in events[:-1])
    assert reply.completed


async def test_a_channel_that_ends_without_an_end_is_an_error(runtime: FakeRuntime) -> None:
    async def answer(submit: Submit) -> None:
        accept(submit)
        submit.sender._tx.close()  # what only a bug can do

    runtime.answer = answer
    streamed = await fetch(runtime.app, "POST", PATH, chat(stream=True))
    assert streamed.events()[-3]["choices"][0]["finish_reason"] == "error"
    whole = await fetch(runtime.app, "POST", PATH, chat())
    assert whole.status == 500
    assert whole.error()["type"] == "server_error"


async def test_every_event_is_one_write_even_when_they_are_buffered(runtime: FakeRuntime) -> None:
    async def answer(submit: Submit) -> None:
        accept(submit)
        deltas(submit, [str(number) for number in range(50)])
        submit.sender.finish(finished(50))

    runtime.answer = answer
    reply = await fetch(runtime.app, "POST", PATH, chat(stream=True))
    assert len(reply.chunks) == 1 + 50 + 1 + 1
    assert reply.text() == "".join(map(str, range(50)))


async def test_a_stream_sends_its_first_event_before_the_first_token(
    nursery: trio.Nursery, autojump_clock: trio.testing.MockClock
) -> None:
    runtime = FakeRuntime()
    nursery.start_soon(runtime.run)
    runtime.answer = say("late", every_s=3.0)
    request = call(runtime.app, "POST", PATH, chat(stream=True))
    await request.run()
    assert request.chunk_times[0] < 0.1
    assert request.chunk_times[1] >= 3.0
    nursery.cancel_scope.cancel()


async def test_heartbeats_fill_silence(
    nursery: trio.Nursery, autojump_clock: trio.testing.MockClock
) -> None:
    runtime = FakeRuntime(sse_ping_interval_s=10.0)
    nursery.start_soon(runtime.run)
    runtime.answer = say("a", "b", every_s=25.0)
    start = trio.current_time()
    reply = await fetch(runtime.app, "POST", PATH, chat(stream=True))
    pings = [
        round(when - start)
        for when, chunk in zip(reply.chunk_times, reply.chunks, strict=True)
        if chunk == b": keep-alive\n\n"
    ]
    assert pings == [10, 20, 35, 45]
    assert reply.text() == "ab"
    assert reply.events()[-1] == "[DONE]"
    nursery.cancel_scope.cancel()


async def test_no_heartbeat_while_tokens_flow(
    nursery: trio.Nursery, autojump_clock: trio.testing.MockClock
) -> None:
    runtime = FakeRuntime(sse_ping_interval_s=10.0)
    nursery.start_soon(runtime.run)
    runtime.answer = say(*"abcdef", every_s=9.0)
    reply = await fetch(runtime.app, "POST", PATH, chat(stream=True))
    assert not [chunk for chunk in reply.chunks if chunk.startswith(b":")]
    assert reply.text() == "abcdef"
    nursery.cancel_scope.cancel()


async def test_tokens_without_text_do_not_silence_the_heartbeat(
    nursery: trio.Nursery, autojump_clock: trio.testing.MockClock
) -> None:
    """Held-back text is silence too, however many tokens there are."""
    runtime = FakeRuntime(sse_ping_interval_s=10.0)
    nursery.start_soon(runtime.run)
    runtime.answer = say("", "", "", "", tail="x", every_s=6.0)
    reply = await fetch(runtime.app, "POST", PATH, chat(stream=True))
    assert reply.chunks.count(b": keep-alive\n\n") == 2
    nursery.cancel_scope.cancel()


async def test_heartbeats_can_be_switched_off(
    nursery: trio.Nursery, autojump_clock: trio.testing.MockClock
) -> None:
    runtime = FakeRuntime(sse_ping_interval_s=-1)
    nursery.start_soon(runtime.run)
    runtime.answer = say("a", every_s=300.0)
    reply = await fetch(runtime.app, "POST", PATH, chat(stream=True))
    assert not [chunk for chunk in reply.chunks if chunk.startswith(b":")]
    assert reply.text() == "a"
    nursery.cancel_scope.cancel()


async def test_events_are_json_without_half_characters(runtime: FakeRuntime) -> None:
    pieces = ["🧿", "👩‍🚀", "漢字", "नमस्ते", "\u2028\x00\x7f\\"]
    runtime.answer = say(*pieces)
    reply = await fetch(runtime.app, "POST", PATH, chat(stream=True))
    assert reply.text() == "".join(pieces)
    for chunk in reply.chunks[:-1]:
        json.loads(chunk.decode("utf-8")[6:])
