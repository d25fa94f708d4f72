"""Opening the choices of a request and reading whole answers."""

from __future__ import annotations

import trio

from actors.errors import ErrorCode, RequestError
from actors.events import Chances, Failed, Finished, TextDelta
from actors.generation import Generation, open_generations
from actors.requests import GenerationRequest
from httpapi.context import AppContext
from httpapi.json_body import invalid
from httpapi.protocols.openai_chat.response import Answer
from httpapi.record import RequestRecord


def open_choices(
    context: AppContext, record: RequestRecord, request: GenerationRequest, choices: int
) -> list[Generation]:
    """One generation per choice, held by the record.  Raises RequestError."""
    places = context.ports.places.count
    if choices > places:
        raise invalid(f"n must not be above {places}, which is all that this server holds", "n")
    return open_generations(context.ports, request, choices, record.hold)


async def wait_accepted(record: RequestRecord, generations: list[Generation]) -> None:
    """Until here an error is an error status, on streams too.  Raises RequestError."""
    for generation in generations:
        record.prompt_tokens = await generation.wait_accepted()


async def read_answers(record: RequestRecord, generations: list[Generation]) -> list[Answer]:
    """Whole answers in the order of the choices.  The first failure fails all: RequestError."""
    if len(generations) == 1:
        return [await _read(record, generations[0])]
    answers: dict[int, Answer] = {}
    failures: list[RequestError] = []

    async def read(index: int, nursery: trio.Nursery) -> None:
        try:
            answers[index] = await _read(record, generations[index])
        except RequestError as error:
            failures.append(error)
            nursery.cancel_scope.cancel()

    async with trio.open_nursery() as nursery:
        for index in range(len(generations)):
            nursery.start_soon(read, index, nursery)
    if failures:
        raise failures[0]
    record.completion_tokens = sum(one.finished.usage.completion_tokens for one in answers.values())
    return [answers[index] for index in range(len(generations))]


async def _read(record: RequestRecord, generation: Generation) -> Answer:
    texts: list[str] = []
    chances: list[Chances] = []
    lengths: list[int] = []
    async for event in generation:
        match event:
            case TextDelta():
                record.count_token(event.position)
                texts.append(event.text)
                if event.chances is not None:
                    chances.append(event.chances)
                    lengths.append(len(event.text))
            case Finished():
                texts.append(event.text)
                record.outcome = event.reason.value
                record.completion_tokens = event.usage.completion_tokens
                text = "".join(texts)
                return Answer(text=text, finished=event, chances=chances, lengths=lengths)
            case Failed():
                raise RequestError(
                    event.code,
                    event.message,
                    param=event.param,
                    retry_after_s=event.retry_after_s,
                    details=event.details,
                )
    raise RequestError(ErrorCode.INTERNAL, "The request was lost inside the server.")
