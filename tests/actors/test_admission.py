"""AdmissionActor with a fake PrefillQueue."""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from typing import TypeVar

import pytest
import trio

from actors.admission import AdmissionActor
from actors.errors import ErrorCode
from actors.events import Accepted, Event, Failed, Finished, FinishReason, Started
from actors.kit.channels import drain
from actors.kit.journal import RingJournal
from actors.kit.supervise import RestartPolicy, Supervisor
from actors.limits import LANES, Limits
from actors.messages import Queued, Submit
from actors.phase import Phase, PhaseCell
from actors.requests import ChatPrompt, GenerationRequest, Priority, Prompt, TextPrompt
from actors.token_sender import TokenSender
from models.sampling import GREEDY
from models.scripted_text import TEMPLATE_ERROR_TRIGGER, ScriptedTextModel
from tests.actors.harness import ArmedFaults, chat

Clock = trio.testing.MockClock
LIMITS = Limits(slot_context_tokens=100, cache_budget_tokens=80)
T = TypeVar("T")


@dataclass
class Client:
    rx: trio.MemoryReceiveChannel[Event]
    freed: list[bool]

    def events(self) -> list[Event]:
        return drain(self.rx)

    def failure(self) -> Failed:
        (event,) = [event for event in self.events() if isinstance(event, Failed)]
        assert self.freed == [True]
        return event


@dataclass
class Bench:
    submit: dict[Priority, trio.MemorySendChannel[Submit]]
    lanes: dict[Priority, trio.MemoryReceiveChannel[Queued]]
    phase: PhaseCell
    actor: AdmissionActor
    supervisor: Supervisor
    journal: RingJournal
    faults: ArmedFaults
    scope: trio.CancelScope
    gate: trio.Event = field(default_factory=trio.Event)  # unset: tokenising takes for ever

    def send(
        self,
        prompt: Prompt | str,
        *,
        lane: Priority = Priority.NORMAL,
        max_tokens: int | None = 8,
        deadline_s: float = float("inf"),
    ) -> Client:
        freed: list[bool] = []
        tx, rx = trio.open_memory_channel[Event](LIMITS.token_channel)
        sender = TokenSender("r", tx, LIMITS.token_channel, lambda: freed.append(True))
        request = GenerationRequest(
            request_id="r",
            prompt=TextPrompt(text=prompt, add_special=False)
            if isinstance(prompt, str)
            else prompt,
            sampling=GREEDY,
            max_tokens=max_tokens,
            deadline_s=deadline_s,
            lane=lane,
        )
        self.submit[lane].send_nowait(
            Submit(request=request, senders=(sender,), arrived_s=trio.current_time())
        )
        return Client(rx, freed)

    async def settle(self) -> None:
        await trio.testing.wait_all_tasks_blocked()


@asynccontextmanager
async def bench() -> AsyncIterator[Bench]:
    submit = {lane: trio.open_memory_channel[Submit](LIMITS.submit_channel) for lane in LANES}
    lanes = {lane: trio.open_memory_channel[Queued](0) for lane in LANES}
    journal, faults = RingJournal(trio.current_time), ArmedFaults()
    phase = PhaseCell(phase=Phase.READY)
    supervisor = Supervisor(policy=RestartPolicy.from_limits(LIMITS), journal=journal)

    async def offload(fn: Callable[..., T], *args: object) -> T:
        await it.gate.wait()
        return fn(*args)

    actor = AdmissionActor(
        submit={lane: rx for lane, (_, rx) in submit.items()},
        lanes={lane: tx for lane, (tx, _) in lanes.items()},
        text=ScriptedTextModel(),
        limits=LIMITS,
        phase=phase,
        journal=journal,
        offload=offload,
        retry_after_s=lambda: 7.0,
        faults=faults,
    )
    async with trio.open_nursery() as nursery:
        it = Bench(
            submit={lane: tx for lane, (tx, _) in submit.items()},
            lanes={lane: rx for lane, (_, rx) in lanes.items()},
            phase=phase,
            actor=actor,
            supervisor=supervisor,
            journal=journal,
            faults=faults,
            scope=nursery.cancel_scope,
        )
        it.gate.set()
        nursery.start_soon(actor.supervised, supervisor)
        yield it
        nursery.cancel_scope.cancel()


async def test_accepted_comes_before_the_request_is_queued(autojump_clock: Clock) -> None:
    async with bench() as it:
        client = it.send("hello")
        await it.settle()
        assert client.events() == [Accepted(prompt_tokens=5)]
        assert it.actor.waiting == 1
        queued = await it.lanes[Priority.NORMAL].receive()
        assert queued.prompt_ids == tuple(b"hello")
        assert (queued.max_tokens, queued.total_tokens) == (8, 13)
        assert queued.deadline_s == LIMITS.request_timeout_s
        await it.settle()
        assert it.actor.waiting == 0
        assert client.freed == []


async def test_a_chat_is_rendered_by_the_template(autojump_clock: Clock) -> None:
    async with bench() as it:
        it.send(chat("hi"))
        queued = await it.lanes[Priority.NORMAL].receive()
        assert len(queued.prompt_ids) == len("user\nhi\nassistant\n") + 3


@pytest.mark.parametrize(
    ("prompt", "code", "param"),
    [
        ("", ErrorCode.INVALID_REQUEST, "prompt"),
        ("x" * 100, ErrorCode.CONTEXT_LENGTH, None),
        ("x" * 79, ErrorCode.CONTEXT_LENGTH, None),
        (chat(TEMPLATE_ERROR_TRIGGER), ErrorCode.INVALID_REQUEST, "messages"),
        (ChatPrompt(messages=({"role": "x"},)), ErrorCode.INVALID_REQUEST, "messages"),
    ],
)
async def test_a_bad_request_fails_alone(
    prompt: Prompt | str, code: ErrorCode, param: str | None, autojump_clock: Clock
) -> None:
    async with bench() as it:
        client = it.send(prompt)
        good = it.send("hello")
        assert (await it.lanes[Priority.NORMAL].receive()).prompt_ids == tuple(b"hello")
        failure = client.failure()
        assert (failure.code, failure.param) == (code, param)
        assert good.events() == [Accepted(prompt_tokens=5)]
        assert sum(it.supervisor.restarts.values()) == 0
        assert (it.actor.accepted, it.actor.refused) == (1, 1)


async def test_no_tokens_to_generate_finishes_at_once(autojump_clock: Clock) -> None:
    async with bench() as it:
        client = it.send("hello", max_tokens=0)
        await it.settle()
        accepted, started, finished = client.events()
        assert (accepted, started) == (Accepted(prompt_tokens=5), Started())
        assert isinstance(finished, Finished)
        assert (finished.reason, finished.usage.completion_tokens) == (FinishReason.LENGTH, 0)
        assert client.freed == [True]


async def test_draining_refuses(autojump_clock: Clock) -> None:
    async with bench() as it:
        it.phase.phase = Phase.DRAINING
        client = it.send("hello")
        await it.settle()
        failure = client.failure()
        assert (failure.code, failure.retry_after_s) == (ErrorCode.SHUTTING_DOWN, 7.0)


async def test_draining_that_begins_while_tokenising_refuses(autojump_clock: Clock) -> None:
    async with bench() as it:
        it.gate = trio.Event()
        client = it.send("hello")
        await it.settle()
        it.phase.phase = Phase.DRAINING
        it.gate.set()
        await it.settle()
        assert client.failure().code is ErrorCode.SHUTTING_DOWN


@pytest.mark.parametrize("while_tokenising", [False, True])
async def test_a_client_that_left_is_skipped(while_tokenising: bool, autojump_clock: Clock) -> None:
    async with bench() as it:
        it.gate = trio.Event()
        client = it.send("hello")
        if while_tokenising:
            await it.settle()
        client.rx.close()
        it.gate.set()
        await it.settle()
        assert client.freed == [True]
        (seen,) = [entry for entry in it.journal if entry.event == "cancel_seen"]
        assert seen["where"] == "admission"
        with pytest.raises(trio.WouldBlock):
            it.lanes[Priority.NORMAL].receive_nowait()


async def test_the_deadline_counts_while_nobody_takes_the_request(autojump_clock: Clock) -> None:
    async with bench() as it:
        client = it.send("hello", deadline_s=trio.current_time() + 1.0)
        late = it.send("hello", deadline_s=trio.current_time() - 1.0, lane=Priority.LOW)
        await trio.sleep(2)
        assert client.failure().code is ErrorCode.DEADLINE
        assert late.failure().code is ErrorCode.DEADLINE
        assert it.actor.waiting == 0


async def test_a_blocked_lane_does_not_block_another(autojump_clock: Clock) -> None:
    async with bench() as it:
        it.send("one", lane=Priority.LOW)
        it.send("two", lane=Priority.LOW)
        it.send("three", lane=Priority.HIGH)
        await it.settle()
        assert (await it.lanes[Priority.HIGH].receive()).prompt_ids == tuple(b"three")


@pytest.mark.parametrize("point", ["admission.in_hand", "admission.after_accept"])
async def test_a_crash_fails_the_request_in_hand_only(point: str, autojump_clock: Clock) -> None:
    async with bench() as it:
        waiting = it.send("low", lane=Priority.LOW)
        await it.settle()
        it.faults.arm(point)
        victim = it.send("a")
        behind = it.send("b")
        received = await it.lanes[Priority.NORMAL].receive()
        assert received.prompt_ids == tuple(b"b")
        assert victim.failure().code is ErrorCode.INTERNAL
        assert (await it.lanes[Priority.LOW].receive()).prompt_ids == tuple(b"low")
        assert waiting.freed == behind.freed == []
        assert it.supervisor.restarts["admission.normal"] == 1


async def test_its_end_fails_everything_it_holds(autojump_clock: Clock) -> None:
    async with bench() as it:
        held, behind = it.send("a"), it.send("b")
        await it.settle()
        it.phase.phase = Phase.STOPPED
        it.scope.cancel()
    assert held.failure().code is ErrorCode.SHUTTING_DOWN
    assert behind.failure().code is ErrorCode.SHUTTING_DOWN
