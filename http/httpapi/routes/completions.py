"""POST /v1/completions: text in, text out, without a chat template."""

from __future__ import annotations

from functools import partial

from quart import Quart, Response, request

from actors.generation import Generation
from httpapi.body import StreamBody
from httpapi.collect import open_choices, read_answers, wait_accepted
from httpapi.context import AppContext, current_record, json_bytes
from httpapi.json_body import invalid
from httpapi.protocols.openai_chat.response import ChatHead
from httpapi.protocols.openai_completions.request import CompletionCall, read_completion
from httpapi.protocols.openai_completions.response import (
    CompletionStream,
    text_completion,
    total_usage,
)
from httpapi.protocols.shared.call import lane_of
from httpapi.record import RequestRecord
from httpapi.sse import stream_response


def add_routes(app: Quart, context: AppContext) -> None:
    handler = partial(_completions, context)
    app.add_url_rule("/v1/completions", "completions", handler, methods=["POST"])


async def _completions(context: AppContext) -> Response:
    record = current_record()
    record.lane = lane_of(request.headers.get("X-Priority"))
    ports = context.ports
    wanted = await context.read_body(partial(read_completion, defaults=context.settings.defaults))
    call = wanted.call
    head = ChatHead(
        id=ports.seams.new_id("cmpl-"),
        created=int(ports.seams.wall_time()),
        model=context.model_name(),
        tell_cached=ports.limits.prompt_cache.enabled,
    )
    record.generation_id = head.id
    generations = _open(context, record, wanted, head.id)
    await wait_accepted(record, generations)
    if not call.stream:
        answers = await read_answers(record, generations)
        logprobs = call.sampling.logprobs is not None
        return json_bytes(
            text_completion(head, answers, wanted.echoes, call.choices, logprobs=logprobs)
        )
    body = StreamBody(
        generations,
        [
            CompletionStream(
                head,
                include_usage=call.include_usage,
                index=index,
                echo=wanted.echoes[index // call.choices],
            )
            for index in range(len(generations))
        ],
        record,
        ping_interval_s=context.settings.sse_ping_interval_s,
        usage_of=partial(total_usage, choices=call.choices),
    )
    return stream_response(body)


def _open(
    context: AppContext, record: RequestRecord, wanted: CompletionCall, generation_id: str
) -> list[Generation]:
    """The choices of all prompts, in order.  Raises RequestError."""
    ports, call = context.ports, wanted.call
    places = ports.places.count
    if len(wanted.prompts) * call.choices > places:
        raise invalid(
            f"prompts times n must not be above {places}, which is all that this server holds",
            "prompt" if call.choices == 1 else "n",
        )
    seed = ports.seams.sampling_seed()
    generations: list[Generation] = []
    for place, prompt in enumerate(wanted.prompts):
        generations += open_choices(
            context,
            record,
            call.generation_request(
                prompt,
                request_id=generation_id if place == 0 else f"{generation_id}.{place}",
                seed=seed,
                lane=record.lane or lane_of(None),
                deadline_s=record.deadline_s,
            ),
            call.choices,
        )
    return generations
