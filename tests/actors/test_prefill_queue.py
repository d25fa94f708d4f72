"""PrefillQueue with a fake DecodeLoop and a fake CacheManager."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass, field

import pytest
import trio

from actors.errors import ErrorCode
from actors.events import Failed
from actors.kit.channels import PeerGone, drain
from actors.kit.journal import RingJournal
from actors.limits import LANES, Limits
from actors.messages import (
    CacheLease,
    CacheMessage,
    CacheRefused,
    Queued,
    ReserveCache,
    SlotGrant,
    StartSequence,
)
from actors.prefill_queue import PrefillQueue, Room, open_room
from actors.requests import Priority
from tests.actors.fakes import Requester, crashes_with
from tests.actors.harness import ArmedFaults, Crash

Clock = trio.testing.MockClock
LIMITS = Limits(max_slots=2, priority_max_skips=2)


@dataclass
class Bench:
    room: Room
    lanes: dict[Priority, trio.MemorySendChannel[Queued]]
    grants: trio.MemorySendChannel[SlotGrant]
    starts: trio.MemoryReceiveChannel[StartSequence]
    cache: trio.MemoryReceiveChannel[CacheMessage]
    queue: PrefillQueue
    journal: RingJournal
    faults: ArmedFaults
    refuse: bool = False
    lose_replies: bool = False
    reserved: list[str] = field(default_factory=list)
    gate: trio.Event = field(default_factory=trio.Event)  # unset: the cache does not answer

    async def serve_cache(self) -> None:
        async for message in self.cache:
            assert isinstance(message, ReserveCache)
            await self.gate.wait()
            self.reserved.append(message.request_id)
            if self.lose_replies:
                message.reply_tx.close()
                continue
            lease = CacheLease(lease_id=len(self.reserved), tokens=message.total_tokens)
            message.reply_tx.send_nowait(CacheRefused(free_tokens=0) if self.refuse else lease)
            message.reply_tx.close()

    async def queue_up(self, *requesters: Requester) -> None:
        for one in requesters:
            await self.lanes[one.request.lane].send(one.queued)
        await trio.testing.wait_all_tasks_blocked()

    def grant(self, slot: int = 0) -> None:
        self.grants.send_nowait(SlotGrant(slot=slot))

    def started(self) -> list[str]:
        return [start.queued.sender.request_id for start in drain(self.starts)]


@asynccontextmanager
async def bench(limits: Limits = LIMITS) -> AsyncIterator[Bench]:
    lanes = {lane: trio.open_memory_channel[Queued](0) for lane in LANES}
    grants_tx, grants_rx = trio.open_memory_channel[SlotGrant](limits.grants_channel)
    starts_tx, starts_rx = trio.open_memory_channel[StartSequence](limits.starts_channel)
    cache_tx, cache_rx = trio.open_memory_channel[CacheMessage](limits.cache_channel)
    journal, faults, room = RingJournal(trio.current_time), ArmedFaults(), open_room(limits)
    queue = PrefillQueue(
        room=room,
        lanes={lane: rx for lane, (_, rx) in lanes.items()},
        grants=grants_rx,
        starts=starts_tx,
        cache=cache_tx,
        limits=limits,
        journal=journal,
        faults=faults,
    )
    it = Bench(
        room=room,
        lanes={lane: tx for lane, (tx, _) in lanes.items()},
        grants=grants_tx,
        starts=starts_rx,
        cache=cache_rx,
        queue=queue,
        journal=journal,
        faults=faults,
    )
    it.gate.set()
    async with trio.open_nursery() as nursery:
        nursery.start_soon(queue.run)
        nursery.start_soon(it.serve_cache)
        yield it
        nursery.cancel_scope.cancel()


async def test_nobody_starts_without_a_grant_and_each_grant_starts_one(
    autojump_clock: Clock,
) -> None:
    async with bench() as it:
        await it.queue_up(Requester("a", LIMITS), Requester("b", LIMITS))
        assert it.started() == []
        it.grant(1)
        await trio.testing.wait_all_tasks_blocked()
        (start,) = drain(it.starts)
        assert (start.slot, start.queued.sender.request_id) == (1, "a")
        assert len(it.room) == 1


async def test_grants_wait_for_requests(autojump_clock: Clock) -> None:
    async with bench() as it:
        it.grant(0)
        it.grant(1)
        await trio.testing.wait_all_tasks_blocked()
        await it.queue_up(Requester("a", LIMITS), Requester("b", LIMITS))
        assert it.started() == ["a", "b"]
        assert it.queue.free_grants == 0


async def test_lanes_and_the_skip_rule(autojump_clock: Clock) -> None:
    async with bench() as it:
        await it.queue_up(Requester("low", LIMITS, lane=Priority.LOW))
        for index in range(4):
            await it.queue_up(Requester(f"high{index}", LIMITS, lane=Priority.HIGH))
        order: list[str] = []
        for _ in range(5):
            it.grant()
            await trio.testing.wait_all_tasks_blocked()
            order += it.started()
        assert order == ["high0", "high1", "low", "high2", "high3"]
        picks = [entry for entry in it.journal if entry.event == "picked"]
        assert [entry["by_skip"] for entry in picks] == [0, 0, 1, 0, 0]


async def test_a_refused_head_keeps_its_turn_and_is_tried_again_at_the_next_change(
    autojump_clock: Clock,
) -> None:
    async with bench() as it:
        it.refuse = True
        it.grant(0)
        await it.queue_up(Requester("a", LIMITS), Requester("b", LIMITS))
        assert it.started() == []
        assert set(it.reserved) == {"a"}  # nobody overtakes inside a lane
        assert it.queue.free_grants == 1
        tries = len(it.reserved)
        await trio.sleep(10)
        assert len(it.reserved) == tries  # no polling
        it.refuse = False
        it.grant(1)
        await trio.testing.wait_all_tasks_blocked()
        assert it.started() == ["a", "b"]


async def test_a_change_during_a_reservation_is_not_missed(autojump_clock: Clock) -> None:
    async with bench() as it:
        it.gate = trio.Event()
        it.refuse = True
        it.grant(0)
        await it.queue_up(Requester("a", LIMITS))
        it.grant(1)  # arrives while the cache thinks
        await trio.testing.wait_all_tasks_blocked()
        it.refuse = True
        it.gate.set()
        await trio.testing.wait_all_tasks_blocked()
        assert it.reserved == ["a", "a"]  # refused, then tried again because of the grant


async def test_who_left_or_is_late_goes_within_one_sweep(autojump_clock: Clock) -> None:
    async with bench() as it:
        gone, stays = Requester("gone", LIMITS), Requester("stays", LIMITS)
        late = Requester("late", LIMITS, deadline_s=trio.current_time() + 0.1)
        await it.queue_up(gone, late, stays)
        gone.leave()
        await trio.sleep(LIMITS.sweep_s)
        await trio.testing.wait_all_tasks_blocked()
        assert len(it.room) == 1
        assert (gone.places_freed, late.places_freed, stays.places_freed) == (1, 1, 0)
        (failed,) = late.events()
        assert isinstance(failed, Failed)
        assert failed.code is ErrorCode.DEADLINE


async def test_a_dead_head_is_never_picked(autojump_clock: Clock) -> None:
    async with bench() as it:
        gone = Requester("gone", LIMITS)
        await it.queue_up(gone, Requester("b", LIMITS))
        gone.leave()
        it.grant()
        await trio.testing.wait_all_tasks_blocked()
        assert it.started() == ["b"]


async def test_who_leaves_during_the_reservation_is_started_all_the_same(
    autojump_clock: Clock,
) -> None:
    async with bench() as it:
        it.gate = trio.Event()
        one = Requester("a", LIMITS)
        it.grant()
        await it.queue_up(one)
        one.leave()
        it.gate.set()
        await trio.testing.wait_all_tasks_blocked()
        assert it.started() == ["a"]


async def test_cancelled_with_one_in_hand_it_goes_back_to_the_front(
    autojump_clock: Clock,
) -> None:
    one = Requester("a", LIMITS)
    async with bench() as it:
        it.gate = trio.Event()
        it.grant()
        await it.queue_up(one, Requester("b", LIMITS))
        assert len(it.room) == 2
    assert not it.queue.crashed
    assert it.room.depths() == (0, 2, 0)
    picked = it.room.pick()
    assert picked is not None
    assert picked.item is one.queued
    assert one.places_freed == 0


@pytest.mark.parametrize("point", ["prefill.after_pick", "prefill.after_reserve"])
async def test_its_own_crash_is_told_apart_and_loses_nobody(
    point: str, autojump_clock: Clock
) -> None:
    with crashes_with(Crash):
        async with bench() as it:
            it.faults.arm(point)
            it.grant()
            await it.queue_up(Requester("a", LIMITS), Requester("b", LIMITS))
            await trio.sleep_forever()
    assert it.queue.crashed
    assert it.room.depths() == (0, 2, 0)  # the pipeline fails them


async def test_a_crashed_cache_is_not_its_own_crash(autojump_clock: Clock) -> None:
    with crashes_with(PeerGone):
        async with bench() as it:
            it.lose_replies = True
            it.grant()
            await it.queue_up(Requester("a", LIMITS))
            await trio.sleep_forever()
    assert not it.queue.crashed
    assert it.room.depths() == (0, 1, 0)
