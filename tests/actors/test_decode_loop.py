"""DecodeLoop with a scripted engine, a fake PrefillQueue and a fake CacheManager."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass, field

import pytest
import trio

from actors.core.cost_model import CostModel
from actors.core.service_rate import ServiceRate
from actors.decode_loop import DecodeLoop
from actors.decode_row import DecodeCounters
from actors.errors import ErrorCode
from actors.events import Event, Failed, Finished, FinishReason, Started, TextDelta
from actors.kit.channels import drain
from actors.kit.journal import Entry, RingJournal
from actors.limits import Limits
from actors.messages import CacheLease, CacheMessage, ReleaseCache, SlotGrant, StartSequence
from actors.phase import Phase, PhaseCell
from actors.requests import LoopRule
from models.engine import EngineDead, EngineError
from models.sampling import SamplingParams
from models.scripted import EngineFaults, ScriptedEngine, Scripts, StepCost
from models.scripted_text import ScriptedTextModel, text_to_ids
from tests.actors.fakes import Requester, crashes_with
from tests.actors.harness import ArmedFaults, Crash

Clock = trio.testing.MockClock
STEP_S = 1.0
COST = StepCost(base_s=STEP_S, decode_row_s=0.0, prefill_token_s=0.0)
LIMITS = Limits(max_slots=3, token_buffer=4, poll_s=0.1, stall_s=20.0)


@dataclass
class Bench:
    limits: Limits
    engine: ScriptedEngine
    loop: DecodeLoop
    starts: trio.MemorySendChannel[StartSequence]
    grants: trio.MemoryReceiveChannel[SlotGrant]
    cache: trio.MemoryReceiveChannel[CacheMessage]
    counters: DecodeCounters
    phase: PhaseCell
    journal: RingJournal
    faults: ArmedFaults
    scope: trio.CancelScope
    free: list[int] = field(default_factory=list)
    leases: int = 0

    def requester(self, rid: str, **options: object) -> Requester:
        return Requester(rid, self.limits, **options)  # type: ignore[arg-type]

    def start(self, *requesters: Requester) -> None:
        for one in requesters:
            self.free += [grant.slot for grant in drain(self.grants)]
            self.leases += 1
            lease = CacheLease(lease_id=self.leases, tokens=one.queued.total_tokens)
            self.starts.send_nowait(
                StartSequence(slot=self.free.pop(0), queued=one.queued, lease=lease)
            )

    async def settle(self) -> None:
        await trio.testing.wait_all_tasks_blocked()

    async def steps(self, count: float) -> None:
        """Let ``count`` steps end, and the next one begin."""
        await trio.sleep(count * STEP_S)
        await self.settle()

    def released(self) -> list[str]:
        return [m.request_id for m in drain(self.cache) if isinstance(m, ReleaseCache)]

    def freed_slots(self) -> list[int]:
        return [grant.slot for grant in drain(self.grants)]

    def entries(self, *events: str) -> list[Entry]:
        return [entry for entry in self.journal if entry.event in events]

    def in_plans(self, rid: str) -> list[int]:
        """Steps whose plan held ``rid``."""
        return [
            entry["step"]
            for entry in self.entries("planned")
            if rid in entry["decode"] or rid in [name for name, _ in entry["prefill"]]
        ]


@asynccontextmanager
async def bench(
    *,
    scripts: Scripts | None = None,
    limits: Limits = LIMITS,
    faults: EngineFaults | None = None,
    cost: StepCost = COST,
) -> AsyncIterator[Bench]:
    starts_tx, starts_rx = trio.open_memory_channel[StartSequence](limits.starts_channel)
    grants_tx, grants_rx = trio.open_memory_channel[SlotGrant](limits.grants_channel)
    cache_tx, cache_rx = trio.open_memory_channel[CacheMessage](limits.cache_channel)
    engine = ScriptedEngine(scripts=scripts or {"": "abcdefgh" * 10}, cost=cost, faults=faults)
    phase, counters, armed = PhaseCell(phase=Phase.READY), DecodeCounters(), ArmedFaults()
    journal = RingJournal(trio.current_time)
    loop = DecodeLoop(
        engine=engine,
        text=ScriptedTextModel(),
        starts=starts_rx,
        grants=grants_tx,
        cache=cache_tx,
        limits=limits,
        phase=phase,
        counters=counters,
        cost=CostModel(),
        rate=ServiceRate(slots=limits.max_slots),
        journal=journal,
        faults=armed,
    )
    async with trio.open_nursery() as nursery:
        nursery.start_soon(loop.run)
        await trio.testing.wait_all_tasks_blocked()
        yield Bench(
            limits=limits,
            engine=engine,
            loop=loop,
            starts=starts_tx,
            grants=grants_rx,
            cache=cache_rx,
            counters=counters,
            phase=phase,
            journal=journal,
            faults=armed,
            scope=nursery.cancel_scope,
        )
        nursery.cancel_scope.cancel()


def text_of(events: list[Event]) -> str:
    return "".join(e.text for e in events if isinstance(e, TextDelta | Finished))


def last_failure(one: Requester) -> Failed:
    event = one.events()[-1]
    assert isinstance(event, Failed)
    assert one.places_freed == 1
    return event


async def test_every_slot_is_offered_at_the_start(autojump_clock: Clock) -> None:
    async with bench() as it:
        assert it.freed_slots() == [0, 1, 2]
        assert [slot.state for slot in it.loop.slots.status()] == ["idle"] * 3


async def test_a_token_is_delivered_while_the_next_step_runs(autojump_clock: Clock) -> None:
    async with bench() as it:
        one = it.requester("a")
        it.start(one)
        await it.settle()
        assert one.events() == [Started()]
        await it.steps(1)  # the prompt, with the first token
        assert [e.token_id for e in one.events() if isinstance(e, TextDelta)] == [ord("a")]
        assert it.in_plans("a") == [1, 2]  # the second step already runs
        await it.steps(1)
        assert [e.token_id for e in one.events() if isinstance(e, TextDelta)] == [ord("b")]


async def test_the_terminal_event_comes_first_then_the_lease_then_the_slot(
    autojump_clock: Clock,
) -> None:
    async with bench(scripts={"": "xy"}) as it:
        one = it.requester("a")
        it.start(one)
        await it.steps(5)
        events = one.events()
        assert text_of(events) == "xy"
        finished = events[-1]
        assert isinstance(finished, Finished)
        assert finished.reason is FinishReason.STOP
        assert finished.timings.prefill_s == pytest.approx(1.0)
        assert finished.timings.decode_s == pytest.approx(2.0)
        assert one.places_freed == 1
        assert it.released() == ["a"]
        order = [
            entry.event
            for entry in it.entries("terminal", "slot_freed", "granted")[LIMITS.max_slots :]
        ]
        assert order == ["terminal", "slot_freed", "granted"]
        assert it.engine.sequences == ()
        assert it.counters.completed == 1


async def test_length_wastes_no_row(autojump_clock: Clock) -> None:
    async with bench() as it:
        one = it.requester("a", max_tokens=3)
        it.start(one)
        await it.steps(6)
        finished = one.events()[-1]
        assert isinstance(finished, Finished)
        assert (finished.reason, finished.usage.completion_tokens) == (FinishReason.LENGTH, 3)
        assert it.in_plans("a") == [1, 2, 3]


async def test_a_stop_string_wastes_at_most_the_row_in_flight(autojump_clock: Clock) -> None:
    async with bench(scripts={"": "one END two"}) as it:
        one, other = it.requester("a", stop=("END",), max_tokens=20), it.requester("b", prompt="x")
        it.start(one, other)
        events: list[Event] = []
        for _ in range(12):
            await it.steps(1)
            events += one.events()
            other.events()
        finished = events[-1]
        assert isinstance(finished, Finished)
        assert (finished.reason, finished.stop_string) == (FinishReason.STOP_STRING, "END")
        assert text_of(events) == "one "
        assert finished.usage.completion_tokens == 7
        assert len(it.in_plans("a")) == 8  # seven tokens were needed, one step was in flight


@pytest.mark.parametrize("leaves_in_step", [1, 2, 3])
async def test_who_leaves_costs_at_most_the_step_in_flight(
    leaves_in_step: int, autojump_clock: Clock
) -> None:
    limits = Limits(max_slots=2, prefill_chunk_tokens=5)
    async with bench(limits=limits) as it:
        one = it.requester("a", prompt="x" * 10)  # two chunks
        it.start(one)
        await it.steps(leaves_in_step - 0.5)
        one.leave()
        assert one.places_freed == 0
        await it.steps(1)
        assert it.in_plans("a") == list(range(1, leaves_in_step + 1))
        assert one.places_freed == 1
        assert it.released() == ["a"]
        (seen,) = it.entries("cancel_seen")
        # The second step would have ended the prompt, but was given up.
        assert seen["where"] == ("prefill" if leaves_in_step < 3 else "decode")
        await it.steps(1)
        assert it.engine.sequences == ()
        assert it.counters.cancelled == 1


async def test_a_long_step_that_everyone_has_left_is_given_up(autojump_clock: Clock) -> None:
    limits = Limits(max_slots=2, poll_s=0.02)
    async with bench(limits=limits, cost=StepCost(base_s=10.0)) as it:
        one, other = it.requester("a"), it.requester("b")
        it.start(one, other)
        await it.settle()
        one.leave()
        await trio.sleep(5)
        assert one.places_freed == 0  # somebody still wants this step
        other.leave()
        await trio.sleep(0.05)
        assert (one.places_freed, other.places_freed) == (1, 1)
        assert sorted(it.released()) == ["a", "b"]
        newcomer = it.requester("c")
        it.start(newcomer)
        await trio.sleep(10.1)
        assert it.in_plans("c") != []
        assert any(isinstance(event, TextDelta) for event in newcomer.events())


async def test_the_slot_is_free_before_the_following_step(autojump_clock: Clock) -> None:
    async with bench() as it:
        one, stays = it.requester("a"), it.requester("b", max_tokens=50)
        it.start(one, stays)
        await it.steps(1.5)
        one.leave()
        await it.steps(1)
        planned = {entry["step"]: entry.time_s for entry in it.entries("planned")}
        (freed,) = it.entries("slot_freed")
        assert freed.time_s == planned[3]
        journal = list(it.journal)
        third = next(e for e in journal if e.event == "planned" and e["step"] == 3)
        assert journal.index(freed) < journal.index(third)


async def test_a_started_request_whose_client_has_left_never_runs(autojump_clock: Clock) -> None:
    async with bench() as it:
        one = it.requester("a")
        one.leave()
        it.start(one)
        await it.settle()
        assert it.in_plans("a") == []
        assert it.released() == ["a"]
        assert one.places_freed == 1


async def test_the_deadline_ends_a_running_request(autojump_clock: Clock) -> None:
    async with bench() as it:
        one = it.requester("a", deadline_s=trio.current_time() + 2.5, max_tokens=50)
        it.start(one)
        await it.steps(5)
        assert last_failure(one).code is ErrorCode.DEADLINE
        assert it.in_plans("a") == [1, 2, 3]
        assert it.released() == ["a"]


async def test_a_full_channel_parks_its_row_and_room_resumes_it(autojump_clock: Clock) -> None:
    async with bench() as it:
        slow = it.requester("slow", prompt="s", max_tokens=12)
        fast = it.requester("fast", prompt="f", max_tokens=12)
        it.start(slow, fast)
        fast_events: list[Event] = []
        for _ in range(13):
            await it.steps(1)
            fast_events += fast.events()
        assert isinstance(fast_events[-1], Finished)  # the other one is not slowed down
        assert len(it.in_plans("fast")) == 12
        parked = len(it.in_plans("slow"))
        # Started, then deltas, and always one place for the terminal event.
        assert slow.sender.room() == 1
        assert parked == LIMITS.token_channel - 2
        assert [entry["rid"] for entry in it.entries("parked")] == ["slow"]
        events = slow.events()
        while slow.places_freed == 0:
            await it.steps(1)
            events += slow.events()
        positions = [e.position for e in events if isinstance(e, TextDelta)]
        assert positions == list(range(12))
        assert text_of(events) == "abcdefghabcd"
        assert [entry["rid"] for entry in it.entries("resumed")] == ["slow"]


async def test_a_client_that_reads_nothing_is_ended_after_the_stall_time(
    autojump_clock: Clock,
) -> None:
    async with bench() as it:
        one = it.requester("a", max_tokens=50)
        it.start(one)
        await trio.sleep(LIMITS.stall_s + 10)
        (parked,) = it.entries("parked")
        (terminal,) = it.entries("terminal")
        assert terminal.time_s - parked.time_s == pytest.approx(LIMITS.stall_s, abs=LIMITS.poll_s)
        assert last_failure(one).code is ErrorCode.SLOW_CLIENT
        assert it.released() == ["a"]


async def test_a_newcomer_joins_while_others_decode_and_while_all_are_parked(
    autojump_clock: Clock,
) -> None:
    async with bench() as it:
        one = it.requester("a", max_tokens=50)
        it.start(one)
        await it.steps(2)
        second = it.requester("b", max_tokens=1)
        it.start(second)
        await it.steps(3)
        assert isinstance(second.events()[-1], Finished)
        await it.steps(5)  # "a" is parked by now
        third = it.requester("c", max_tokens=1)
        it.start(third)
        await it.settle()
        assert it.in_plans("c") != []  # at once, not at the next poll


async def test_long_prompts_are_chunked_beside_decoding_rows(autojump_clock: Clock) -> None:
    limits = Limits(max_slots=2, prefill_chunk_tokens=100, token_buffer=64)
    async with bench(limits=limits) as it:
        one = it.requester("a", prompt="s", max_tokens=50)
        it.start(one)
        await it.steps(2)
        it.start(it.requester("b", prompt="x" * 250))
        await it.steps(6)
        chunks = [e["prefill"] for e in it.entries("planned") if e["prefill"]]
        assert chunks == [(("a", 1),), (("b", 100),), (("b", 100),), (("b", 50),)]
        assert it.in_plans("a") == sorted(e["step"] for e in it.entries("planned"))
        assert it.counters.prefill_tokens == 251


async def test_a_row_that_the_engine_loses_fails_alone(autojump_clock: Clock) -> None:
    async with bench(faults=EngineFaults(failing_rows={3: 0})) as it:
        lost, kept = it.requester("a"), it.requester("b", max_tokens=4)
        it.start(lost, kept)
        await it.steps(6)
        failure = last_failure(lost)
        assert (failure.code, failure.message) == (ErrorCode.ENGINE_ERROR, "Generation error.")
        assert text_of(kept.events()) == "abcd"
        assert it.released() == ["a", "b"]
        assert it.engine.sequences == ()


async def test_a_row_lost_in_the_step_that_a_stop_string_wasted_is_not_dropped_twice(
    autojump_clock: Clock,
) -> None:
    faults = EngineFaults(failing_rows={4: 0})
    async with bench(scripts={"": "END and more"}, faults=faults) as it:
        one, other = it.requester("a", stop=("END",)), it.requester("b", max_tokens=4)
        it.start(one, other)
        await it.steps(9)
        finished = one.events()[-1]
        assert isinstance(finished, Finished)
        assert finished.reason is FinishReason.STOP_STRING
        assert it.in_plans("a") == [1, 2, 3, 4]
        assert text_of(other.events()) == "END "
        assert it.engine.sequences == ()


async def test_a_failed_step_fails_every_running_request(autojump_clock: Clock) -> None:
    one, other = Requester("a", LIMITS), Requester("b", LIMITS)
    with crashes_with(EngineError):
        async with bench(faults=EngineFaults(failing={2})) as it:
            it.start(one, other)
            await trio.sleep_forever()
    for requester in (one, other):
        assert last_failure(requester).code is ErrorCode.ENGINE_ERROR
    assert [entry["step"] for entry in it.entries("engine_fault")] == [2]


@pytest.mark.parametrize("faults", [EngineFaults(dead=2), EngineFaults(hanging=2)])
async def test_a_dead_or_silent_engine_fails_them_with_that_code(
    faults: EngineFaults, autojump_clock: Clock
) -> None:
    one = Requester("a", LIMITS)
    with crashes_with(EngineDead):
        async with bench(faults=faults) as it:
            it.start(one)
            await trio.sleep_forever()
    assert last_failure(one).code is ErrorCode.ENGINE_DEAD
    assert it.phase.engine_dead
    assert trio.current_time() <= LIMITS.step_timeout_s + 2


@pytest.mark.parametrize(
    "point",
    ["decode.after_absorb", "decode.before_step", "decode.after_step", "decode.deliver"],
)
async def test_a_crash_fails_what_it_holds(point: str, autojump_clock: Clock) -> None:
    one, other = Requester("a", LIMITS), Requester("b", LIMITS)
    with crashes_with(Crash):
        async with bench() as it:
            it.faults.arm(point, nth=2)
            it.start(one, other)
            await trio.sleep_forever()
    for requester in (one, other):
        assert last_failure(requester).code is ErrorCode.ENGINE_ERROR
    kinds = [(e["rid"], e["kind"]) for e in it.entries("terminal")]
    assert kinds == [("a", "failed"), ("b", "failed")]


async def test_its_end_waits_for_the_step_in_flight_and_fails_what_runs(
    autojump_clock: Clock,
) -> None:
    one = Requester("a", LIMITS, max_tokens=50)
    async with bench() as it:
        it.start(one)
        await it.steps(1.5)
        it.phase.phase = Phase.STOPPED
        it.scope.cancel()
    assert trio.current_time() == pytest.approx(2 * STEP_S)
    assert last_failure(one).code is ErrorCode.SHUTTING_DOWN
    assert it.in_plans("a") == [1, 2]


async def test_the_cost_of_steps_is_learnt(autojump_clock: Clock) -> None:
    async with bench() as it:
        it.start(it.requester("a", prompt="x" * 10))
        await it.steps(4)
        cost = it.loop.cost.snapshot()
        assert cost["decode_step_s"] == pytest.approx(STEP_S)
        assert cost["prefill_token_s"] == pytest.approx(STEP_S / 10)


async def test_a_loop_ends_the_request_with_the_token_that_closes_it(
    autojump_clock: Clock,
) -> None:
    async with bench(scripts={"": "xababab and on"}) as it:
        rule = LoopRule(min_size=1, max_size=3, count=3)
        one = it.requester("a", max_tokens=14, loop=rule)
        it.start(one)
        events: list[Event] = []
        for _ in range(9):
            await it.steps(1)
            events += one.events()
        finished = events[-1]
        assert isinstance(finished, Finished)
        assert finished.reason is FinishReason.LOOP
        assert text_of(events) == "xababab"
        assert it.in_plans("a") == list(range(1, 8))


async def test_log_probabilities_come_with_their_tokens(autojump_clock: Clock) -> None:
    async with bench(scripts={"": "az"}) as it:
        asks = it.requester("a", sampling=SamplingParams(temperature=0.0, logprobs=2))
        plain = it.requester("b")
        it.start(asks, plain)
        await it.steps(4)
        first, second = (e.chances for e in asks.events() if isinstance(e, TextDelta))
        assert first is not None
        assert second is not None
        assert first.drawn.token_id == ord("a")
        assert first.drawn.data == b"a"
        assert [chance.data for chance in first.top] == [b"a", b"b"]
        assert first.drawn.logprob == first.top[0].logprob > first.top[1].logprob
        assert second.drawn.data == b"z"
        assert [e.chances for e in plain.events() if isinstance(e, TextDelta)] == [None, None]


@pytest.mark.parametrize(
    ("prompt", "script", "budget", "tokens"),
    [
        ("q", "<think>abcdefg", 2, "<think>ab</think>defg"),
        ("q", "<think>abcdefg", 0, "<think></think>bcdefg"),
        ("q", "<think>abcdefg", None, "<think>abcdefg"),
        ("q", "<think>a</think>cdefg", 2, "<think>a</think>cdefg"),
        ("q<think>", "abcdefg", 3, "abc</think>efg"),
        ("q<think>\n", "abcdefg", 0, "</think>bcdefg"),
    ],
)
async def test_a_reasoning_block_ends_after_its_budget(
    prompt: str, script: str, budget: int | None, tokens: str, autojump_clock: Clock
) -> None:
    limits = Limits(max_slots=1)
    async with bench(scripts={"": text_to_ids(script)}, limits=limits) as it:
        one = it.requester("a", prompt=prompt, max_tokens=20, thinking_budget=budget)
        it.start(one)
        await it.steps(12)
        events = one.events()
        drawn = [e.token_id for e in events if isinstance(e, TextDelta)]
        assert drawn == text_to_ids(tokens)
        finished = events[-1]
        assert isinstance(finished, Finished)
        assert finished.usage.completion_tokens == len(drawn)
