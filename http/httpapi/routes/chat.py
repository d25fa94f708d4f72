"""POST /v1/chat/completions: parse, open, render."""

from __future__ import annotations

from functools import partial

from quart import Quart, Response, request

from actors.errors import RequestError
from actors.events import Failed, Finished, TextDelta
from actors.generation import Generation, open_generation
from httpapi.body import StreamBody
from httpapi.context import AppContext, current_record, json_bytes
from httpapi.protocols.openai_chat.request import lane_of, read_chat
from httpapi.protocols.openai_chat.response import ChatHead, chat_completion
from httpapi.protocols.openai_chat.stream import ChatStream
from httpapi.record import RequestRecord
from httpapi.sse import CONTENT_TYPE, HEADERS


def add_routes(app: Quart, context: AppContext) -> None:
    handler = partial(_chat_completions, context)
    for number, path in enumerate(("/v1/chat/completions", "/chat/completions")):
        app.add_url_rule(path, f"chat_{number}", handler, methods=["POST"])


async def _chat_completions(context: AppContext) -> Response:
    record = current_record()
    record.lane = lane_of(request.headers.get("X-Priority"))
    ports = context.ports
    call = await context.read_body(partial(read_chat, defaults=context.settings.defaults))
    head = ChatHead(
        id=ports.seams.new_id("chatcmpl-"),
        created=int(ports.seams.wall_time()),
        model=context.model_name(),
    )
    record.generation_id = head.id
    generation = open_generation(
        ports,
        call.generation_request(
            request_id=head.id,
            seed=ports.seams.sampling_seed(),
            lane=record.lane,
            deadline_s=record.deadline_s,
        ),
        record.hold,
    )
    # Until here an error is an error status, on streams too.
    record.prompt_tokens = await generation.wait_accepted()
    if call.stream:
        return _stream(context, record, generation, head, include_usage=call.include_usage)
    return await _whole(record, generation, head)


def _stream(
    context: AppContext,
    record: RequestRecord,
    generation: Generation,
    head: ChatHead,
    *,
    include_usage: bool,
) -> Response:
    body = StreamBody(
        generation,
        ChatStream(head, include_usage=include_usage),
        record,
        ping_interval_s=context.settings.sse_ping_interval_s,
    )
    response = Response(body, headers=HEADERS, content_type=CONTENT_TYPE)
    response.timeout = None  # otherwise Quart cuts the stream after a minute
    return response


async def _whole(record: RequestRecord, generation: Generation, head: ChatHead) -> Response:
    texts: list[str] = []
    async for event in generation:
        match event:
            case TextDelta():
                record.count_token(event.position)
                texts.append(event.text)
            case Finished():
                texts.append(event.text)
                record.outcome = event.reason.value
                record.completion_tokens = event.usage.completion_tokens
                return json_bytes(chat_completion(head, "".join(texts), event))
            case Failed():
                raise RequestError(
                    event.code,
                    event.message,
                    param=event.param,
                    retry_after_s=event.retry_after_s,
                )
    raise AssertionError("a generation ended without a terminal event")
