"""A runtime behind the HTTP layer that does what a test tells it to."""

from __future__ import annotations

import random
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import replace
from typing import Any

import trio

from actors.errors import ErrorCode
from actors.events import Accepted, Finished, FinishReason, Started, TextDelta, Timings, Usage
from actors.kit.seams import Seams
from actors.limits import Limits
from actors.messages import StoreMessage, Submit
from actors.phase import Phase, PhaseCell
from actors.ports import Places, Ports, RuntimeStatus, ServedModel, SlotStatus
from actors.requests import Priority
from httpapi.app import create_app
from httpapi.settings import HttpSettings

PROMPT_TOKENS = 7
WALL_TIME = 1_715_000_000.9
MODEL = ServedModel(
    name="tiny-chat",
    context_length=4096,
    vocab_size=512,
    has_chat_template=True,
    supports_tools=False,
    created_s=1_700_000_000,
    notes={"device": "cpu", "dtype": "float32"},
)
IDLE = RuntimeStatus(
    phase=Phase.READY,
    engine_alive=True,
    slots=(
        SlotStatus(slot=0, request_id=None, state="idle"),
        SlotStatus(slot=1, request_id=None, state="idle"),
    ),
    queue_depth=0,
    leases=0,
    leased_tokens=0,
    sequences_started=3,
    sequences_completed=2,
    sequences_cancelled=1,
    prefill_tokens=40,
    decode_tokens=50,
    decode_steps=60,
    prefill_chunks=4,
    requests_refused=5,
    restarts={"pipeline": 1},
)
BUSY = replace(
    IDLE,
    slots=(
        SlotStatus(slot=0, request_id="a", state="decode"),
        SlotStatus(slot=1, request_id="b", state="prefill"),
    ),
    queue_depth=2,
)

Answer = Callable[[Submit], Awaitable[None]]


class FakeRuntime:
    """``app`` is the application under test; ``submits`` what reached the actors.

    ``answer`` is started as a task for each submit; by default it says "Hello" and stops.
    """

    def __init__(self, **settings: Any) -> None:
        self.phase = PhaseCell(phase=Phase.READY)
        self.limits = Limits(max_slots=2, max_queue_depth=2)
        self.places = Places(self.limits.places)
        self.model: ServedModel | None = MODEL
        self.status = IDLE
        self.refusals: list[str] = []
        self.submits: list[Submit] = []
        self.retry_after_s = 2.4
        self.answer: Answer = say("Hello")
        self.settings = HttpSettings(**settings)
        store_tx, self._store_rx = trio.open_memory_channel[StoreMessage](1)
        channels = {
            lane: trio.open_memory_channel[Submit](self.limits.submit_channel) for lane in Priority
        }
        self._receive_ends = [rx for _, rx in channels.values()]
        self.ports = Ports(
            phase=self.phase,
            places=self.places,
            submit={lane: tx for lane, (tx, _) in channels.items()},
            store=store_tx,
            status=lambda: self.status,
            model=lambda: self.model,
            note_refusal=self.refusals.append,
            retry_after_s=lambda: self.retry_after_s,
            seams=Seams(rng=random.Random(1), wall_time=lambda: WALL_TIME),
            limits=self.limits,
        )
        self.app = create_app(self.ports, self.settings)

    async def run(self) -> None:
        async with trio.open_nursery() as nursery:
            for rx in self._receive_ends:
                nursery.start_soon(self._serve, nursery, rx)

    async def _serve(self, nursery: trio.Nursery, rx: trio.MemoryReceiveChannel[Submit]) -> None:
        async for submit in rx:
            self.submits.append(submit)
            nursery.start_soon(self.answer, submit)


def accept(submit: Submit) -> None:
    submit.sender.send(Accepted(prompt_tokens=PROMPT_TOKENS))
    submit.sender.send(Started())


def deltas(submit: Submit, pieces: Sequence[str]) -> None:
    for position, text in enumerate(pieces):
        submit.sender.send(TextDelta(position, 100 + position, text))


def finished(
    tokens: int, reason: FinishReason = FinishReason.STOP, text: str = "", **kwargs: Any
) -> Finished:
    return Finished(
        reason=reason,
        usage=Usage(prompt_tokens=PROMPT_TOKENS, completion_tokens=tokens),
        timings=Timings(queued_s=0.0, prefill_s=0.1, decode_s=0.2),
        text=text,
        **kwargs,
    )


def say(
    *pieces: str, reason: FinishReason = FinishReason.STOP, tail: str = "", every_s: float = 0.0
) -> Answer:
    """Accept, send ``pieces`` as deltas ``every_s`` apart, finish with ``tail``."""

    async def answer(submit: Submit) -> None:
        accept(submit)
        for position, text in enumerate(pieces):
            if every_s:
                await trio.sleep(every_s)
            if not submit.sender.send(TextDelta(position, 100 + position, text)):
                break
        submit.sender.finish(finished(len(pieces), reason, tail))

    return answer


def refuse(code: ErrorCode, message: str = "no", **kwargs: Any) -> Answer:
    """Fail before Accepted."""

    async def answer(submit: Submit) -> None:
        submit.sender.fail(code, message, **kwargs)

    return answer


def accept_only(submits: list[Submit]) -> Answer:
    """Accept and leave the rest to the test."""

    async def answer(submit: Submit) -> None:
        accept(submit)
        submits.append(submit)

    return answer


async def ignore(submit: Submit) -> None:
    """Stay silent: the request waits before Accepted."""


def chat(**fields: Any) -> dict[str, Any]:
    """A valid chat body with ``fields`` on top."""
    return {"model": "any", "messages": [{"role": "user", "content": "Hi"}], **fields}
