"""POST /v1/chat/completions: parse, open, render."""

from __future__ import annotations

from functools import partial

from quart import Quart, Response, request

from httpapi.body import StreamBody
from httpapi.collect import open_choices, read_answers, wait_accepted
from httpapi.context import AppContext, current_record, json_bytes
from httpapi.protocols.openai_chat.request import read_chat
from httpapi.protocols.openai_chat.response import ChatHead, chat_completion, sum_usage
from httpapi.protocols.openai_chat.stream import ChatStream
from httpapi.protocols.shared.call import lane_of
from httpapi.sse import stream_response


def add_routes(app: Quart, context: AppContext) -> None:
    handler = partial(_chat_completions, context)
    for number, path in enumerate(("/v1/chat/completions", "/chat/completions")):
        app.add_url_rule(path, f"chat_{number}", handler, methods=["POST"])


async def _chat_completions(context: AppContext) -> Response:
    record = current_record()
    record.lane = lane_of(request.headers.get("X-Priority"))
    ports = context.ports
    chat = await context.read_body(partial(read_chat, defaults=context.settings.defaults))
    call = chat.call
    head = ChatHead(
        id=ports.seams.new_id("chatcmpl-"),
        created=int(ports.seams.wall_time()),
        model=context.model_name(),
        tell_cached=ports.limits.prompt_cache.enabled,
    )
    record.generation_id = head.id
    wanted = call.generation_request(
        chat.prompt,
        request_id=head.id,
        seed=ports.seams.sampling_seed(),
        lane=record.lane,
        deadline_s=record.deadline_s,
    )
    generations = open_choices(context, record, wanted, call.choices)
    await wait_accepted(record, generations)
    if not call.stream:
        answers = await read_answers(record, generations)
        logprobs = call.sampling.logprobs is not None
        return json_bytes(chat_completion(head, answers, logprobs=logprobs))
    body = StreamBody(
        generations,
        [
            ChatStream(head, include_usage=call.include_usage, index=index)
            for index in range(call.choices)
        ],
        record,
        ping_interval_s=context.settings.sse_ping_interval_s,
        usage_of=sum_usage,
    )
    return stream_response(body)
