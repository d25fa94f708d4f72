"""The actors together: a request's life, places, crashes, drain, and nothing that leaks."""

from __future__ import annotations

import pytest
import trio

from actors.errors import ErrorCode, RequestError
from actors.events import Accepted, Failed, Finished, FinishReason, Started, TextDelta
from actors.kit.supervise import SupervisionFailed
from actors.limits import Limits
from actors.phase import Phase
from actors.requests import Priority
from models.engine import EngineInfo
from models.scripted import EngineFaults, ScriptedEngine
from tests.actors.fakes import crashes_with
from tests.actors.harness import World, chat, open_world, read_all, read_text

Clock = trio.testing.MockClock
ONE_SLOT = Limits(max_slots=1, max_queue_depth=3)
LONG = {"": "x" * 400}


async def settle() -> None:
    await trio.testing.wait_all_tasks_blocked()


async def test_a_request_from_start_to_end(autojump_clock: Clock) -> None:
    engine = ScriptedEngine(scripts={"hello": "héy"})
    async with open_world(engine=engine) as world:
        with world.open("hello") as generation:
            events = await read_all(generation)
        await settle()
        world.assert_idle()
    assert events[:2] == [Accepted(prompt_tokens=5), Started()]
    deltas = [event for event in events if isinstance(event, TextDelta)]
    assert [delta.position for delta in deltas] == [0, 1, 2, 3]
    assert [delta.text for delta in deltas] == ["h", "", "é", "y"]
    finished = events[-1]
    assert isinstance(finished, Finished)
    assert finished.reason is FinishReason.STOP
    assert (finished.usage.prompt_tokens, finished.usage.completion_tokens) == (5, 4)


async def test_many_at_once_each_get_their_own_text(autojump_clock: Clock) -> None:
    limits = Limits(max_slots=4, max_queue_depth=40)
    async with open_world(limits=limits) as world:
        texts: dict[int, str] = {}

        async def one(index: int) -> None:
            prompt = f"prompt {index}"
            with world.open(prompt, max_tokens=None, lane=Priority(index % 3)) as generation:
                texts[index], _ = await read_text(generation)
            script = bytes(world.engine.script_for(tuple(prompt.encode())))
            assert texts[index] == script.decode()

        async with trio.open_nursery() as nursery:
            for index in range(40):
                nursery.start_soon(one, index)
        await settle()
        world.assert_idle()
    assert len(texts) == 40


async def test_a_burst_gets_slots_plus_queue_places_and_the_rest_is_refused(
    autojump_clock: Clock,
) -> None:
    async with open_world(limits=ONE_SLOT) as world:
        inside = [world.open() for _ in range(ONE_SLOT.places)]
        with pytest.raises(RequestError) as caught:
            world.open()
        assert caught.value.code is ErrorCode.SERVER_BUSY
        assert (caught.value.retry_after_s or 0) >= 1.0
        await trio.sleep(0.001)
        status = world.ports.status()
        assert (status.active, status.queue_depth) == (1, 3)
        async with trio.open_nursery() as nursery:
            for generation in inside:
                nursery.start_soon(read_all, generation)
        await settle()
        world.assert_idle()
        assert world.ports.status().requests_refused == 1


async def test_who_leaves_while_queued_gives_the_place_back_within_one_sweep(
    autojump_clock: Clock,
) -> None:
    engine = ScriptedEngine(scripts=LONG)
    async with open_world(limits=ONE_SLOT, engine=engine) as world:
        running, queued = world.open(max_tokens=400), world.open()
        await settle()
        queued.close()
        await trio.sleep(ONE_SLOT.sweep_s)
        await settle()
        assert world.ports.places.free == 3
        running.close()
        await trio.sleep(1)
        world.assert_idle()


async def test_the_cache_budget_holds_requests_back(autojump_clock: Clock) -> None:
    limits = Limits(max_slots=4, cache_budget_tokens=30, slot_context_tokens=30)
    async with open_world(limits=limits) as world:
        generations = [world.open("x" * 10, max_tokens=10) for _ in range(3)]
        async with trio.open_nursery() as nursery:
            for generation in generations:
                nursery.start_soon(read_all, generation)
        leased = [entry["leased_tokens"] for entry in world.entries("leased", "lease_released")]
        assert max(leased) == 20
        assert world.entries("lease_refused") != []
        starts = [entry["rid"] for entry in world.entries("started")]
        assert starts == ["r1", "r2", "r3"]
        await settle()
        world.assert_idle()


async def test_a_failed_step_restarts_the_pipeline_and_the_queue_survives(
    autojump_clock: Clock,
) -> None:
    engine = ScriptedEngine(faults=EngineFaults(failing={2}), scripts={"": "ok go"})
    async with open_world(limits=ONE_SLOT, engine=engine) as world:
        running, queued, also = (world.open(chat(name)) for name in "abc")
        _, failed = await read_text(running)
        assert isinstance(failed, Failed)
        assert (failed.code, failed.message) == (ErrorCode.ENGINE_ERROR, "Generation error.")
        assert not world.ports.status().engine_alive
        for generation in (queued, also):
            text, finished = await read_text(generation)
            assert (text, type(finished)) == ("ok go", Finished)
        assert world.ports.status().restarts["pipeline"] == 1
        assert world.ports.status().engine_alive
        assert engine.resets == 2
        await settle()
        world.assert_idle()


@pytest.mark.parametrize(
    ("point", "queued_survive"),
    [
        ("cache.reserve", True),
        ("cache.release", True),
        ("decode.after_absorb", True),
        ("decode.before_step", True),
        ("decode.after_step", True),
        ("decode.deliver", True),
        ("prefill.after_pick", False),
        ("prefill.after_reserve", False),
    ],
)
async def test_a_crash_anywhere_in_the_pipeline(
    point: str, queued_survive: bool, autojump_clock: Clock
) -> None:
    limits = Limits(max_slots=2, max_queue_depth=8)
    async with open_world(limits=limits) as world:
        world.faults.arm(point, nth=2)
        results: list[Finished | Failed] = []

        async def one() -> None:
            _, terminal = await read_text(world.open(max_tokens=8))
            results.append(terminal)

        async with trio.open_nursery() as nursery:
            for _ in range(6):
                nursery.start_soon(one)
        assert len(results) == 6
        codes = {result.code for result in results if isinstance(result, Failed)}
        finished = sum(isinstance(result, Finished) for result in results)
        if queued_survive:
            assert codes <= {ErrorCode.ENGINE_ERROR}
            assert finished >= 4
        else:
            assert ErrorCode.INTERNAL in codes
        # The next incarnation works.
        _, terminal = await read_text(world.open())
        assert isinstance(terminal, Finished)
        assert world.supervisor.restarts["pipeline"] == 1
        await settle()
        world.assert_idle()


async def test_starts_that_were_never_seated_go_first_again(autojump_clock: Clock) -> None:
    limits = Limits(max_slots=2, max_queue_depth=8)
    engine = ScriptedEngine(faults=EngineFaults(failing={2}), scripts=LONG)
    async with open_world(limits=limits, engine=engine) as world:
        first = world.open(max_tokens=50)
        await trio.sleep(0.0055)  # its prompt is done: step 2, which fails, is in flight
        second, third = world.open("second", max_tokens=2), world.open("third", max_tokens=2)
        _, failed = await read_text(first)
        assert isinstance(failed, Failed)
        for generation in (second, third):
            _, terminal = await read_text(generation)
            assert isinstance(terminal, Finished)
        assert "r2" in [entry["rid"] for entry in world.entries("requeued")]
        assert [entry["rid"] for entry in world.entries("started")] == ["r1", "r2", "r3"]
        await settle()
        world.assert_idle()


async def test_too_many_failures_escalate_and_nobody_is_left_waiting(
    autojump_clock: Clock,
) -> None:
    engine = ScriptedEngine(faults=EngineFaults(failing=set(range(1, 100))))
    limits = Limits(max_slots=1, max_queue_depth=20)
    results: list[Failed] = []

    async def one(world: World) -> None:
        _, terminal = await read_text(world.open())
        assert isinstance(terminal, Failed)
        results.append(terminal)

    async with trio.open_nursery() as readers:
        with crashes_with(SupervisionFailed):
            async with open_world(limits=limits, engine=engine) as world:
                for _ in range(10):
                    readers.start_soon(one, world)
                await trio.sleep_forever()
    assert len(results) == 10
    assert world.ports.places.free == world.ports.places.count
    assert world.supervisor.restarts["pipeline"] == limits.restart_max


@pytest.mark.parametrize("faults", [EngineFaults(dead=2), EngineFaults(hanging=2)])
async def test_a_dead_engine_fails_everyone_at_once(
    faults: EngineFaults, autojump_clock: Clock
) -> None:
    engine = ScriptedEngine(faults=faults)
    codes: list[ErrorCode] = []

    async def one(world: World) -> None:
        _, terminal = await read_text(world.open())
        assert isinstance(terminal, Failed)
        codes.append(terminal.code)

    async with trio.open_nursery() as readers:
        with crashes_with(SupervisionFailed):
            async with open_world(limits=ONE_SLOT, engine=engine) as world:
                for _ in range(4):
                    readers.start_soon(one, world)
                await trio.sleep_forever()
    assert codes == [ErrorCode.ENGINE_DEAD] * 4
    assert world.supervisor.restarts["pipeline"] == 0
    assert world.ports.places.free == world.ports.places.count


async def test_draining_refuses_newcomers_and_finishes_the_rest(autojump_clock: Clock) -> None:
    async with open_world(limits=ONE_SLOT) as world:
        running, queued = world.open(), world.open()
        await settle()
        world.phase.phase = Phase.DRAINING
        with pytest.raises(RequestError) as caught:
            world.open()
        assert caught.value.code is ErrorCode.SHUTTING_DOWN
        for generation in (running, queued):
            _, terminal = await read_text(generation)
            assert isinstance(terminal, Finished)


async def test_the_end_of_the_drain_fails_what_remains(autojump_clock: Clock) -> None:
    engine = ScriptedEngine(scripts=LONG)
    async with open_world(limits=ONE_SLOT, engine=engine) as world:
        generations = [world.open(max_tokens=400) for _ in range(4)]
        await trio.sleep(0.05)
        world.phase.phase = Phase.STOPPED
        world.scope.cancel()
    for generation in generations:
        _, terminal = await read_text(generation)
        assert isinstance(terminal, Failed)
        assert terminal.code is ErrorCode.SHUTTING_DOWN
    assert world.ports.places.free == world.ports.places.count


async def test_every_request_ends_once_in_the_journal(autojump_clock: Clock) -> None:
    async with open_world(limits=ONE_SLOT) as world:
        stays, leaves, queued_leaves = (world.open(max_tokens=30) for _ in range(3))
        refused = world.open("x" * 9000)
        await trio.sleep(0.01)
        queued_leaves.close()
        await trio.sleep(0.3)
        leaves.close()
        await read_text(stays)
        _, failed = await read_text(refused)
        assert isinstance(failed, Failed)
        await trio.sleep(1)
        ends = [entry["rid"] for entry in world.entries("terminal", "refused", "cancel_seen")]
        assert sorted(ends) == ["r1", "r2", "r3", "r4"]


async def test_more_slots_than_the_engine_can_batch_is_a_bug(autojump_clock: Clock) -> None:
    info = EngineInfo(
        model_type="x", vocab_size=260, context_length=100, kv_bytes_per_token=1, max_batch=2
    )
    with pytest.raises(AssertionError):
        async with open_world(limits=Limits(max_slots=3), engine=ScriptedEngine(info=info)):
            raise RuntimeError("unreachable")
