from __future__ import annotations

from typing import Any

import pytest
import trio

from actors.cache_manager import CacheManager
from actors.core.prefix_cache import CacheMemory
from actors.kit.channels import PeerGone, ask
from actors.kit.journal import RingJournal
from actors.limits import Limits, PromptCacheLimits
from actors.messages import (
    CacheCleared,
    CacheControl,
    CacheGrown,
    CacheLease,
    CacheMessage,
    CacheRefused,
    CacheReleased,
    CacheReply,
    ClearCache,
    GrowCache,
    ReleaseCache,
    ReserveCache,
    ShrinkCache,
)
from models.engine import KeptPrefix
from tests.actors.harness import ArmedFaults, Crash

Clock = trio.testing.MockClock
ROOT = b"root"


class Desk:
    """A CacheManager and everything it talks to."""

    def __init__(self, budget: int = 10, quantum: int = 256, **more: Any) -> None:
        self.tx, rx = trio.open_memory_channel[CacheMessage](8)
        self.control, control_rx = trio.open_memory_channel[CacheControl](1)
        self.faults = ArmedFaults()
        self.memory = CacheMemory()
        self.woken = 0
        prompt_cache = PromptCacheLimits(block_tokens=4, min_prefix=4)
        self.cache = CacheManager(
            inbox=rx,
            control=control_rx,
            limits=Limits(
                cache_budget_tokens=budget,
                lease_quantum_tokens=quantum,
                kv_bytes_per_token=10,
                prompt_cache=prompt_cache,
            ),
            memory=self.memory,
            on_forget=self.wake,
            journal=RingJournal(trio.current_time),
            faults=self.faults,
            **more,
        )

    def wake(self) -> None:
        self.woken += 1

    def reserve(
        self,
        most: int,
        prompt: tuple[int, ...] = (1,),
        root: bytes | None = None,
        rid: str = "r",
    ) -> trio.MemoryReceiveChannel[CacheReply]:
        reply_tx, reply_rx = trio.open_memory_channel[CacheReply](1)
        message = ReserveCache(
            request_id=rid,
            prompt_ids=prompt,
            total_tokens=most,
            cache_root=root,
            reply_tx=reply_tx,
        )
        self.tx.send_nowait(message)
        return reply_rx

    async def lease(self, most: int, *args: Any, **kwargs: Any) -> CacheLease:
        lease = await ask(self.reserve(most, *args, **kwargs))
        assert isinstance(lease, CacheLease)
        return lease

    async def grow(self, lease: CacheLease, tokens: int) -> CacheGrown | CacheRefused:
        reply_tx, reply_rx = trio.open_memory_channel[CacheGrown | CacheRefused](1)
        self.tx.send_nowait(
            GrowCache(request_id="r", lease_id=lease.lease_id, tokens=tokens, reply_tx=reply_tx)
        )
        return await ask(reply_rx)

    async def release(self, lease: CacheLease, tokens: tuple[int, ...]) -> CacheReleased:
        reply_tx, reply_rx = trio.open_memory_channel[CacheReleased](1)
        self.tx.send_nowait(
            ReleaseCache(request_id="r", lease_id=lease.lease_id, tokens=tokens, reply_tx=reply_tx)
        )
        return await ask(reply_rx)

    async def clear(self) -> CacheCleared:
        reply_tx, reply_rx = trio.open_memory_channel[CacheCleared](1)
        self.control.send_nowait(ClearCache(reply_tx=reply_tx))
        return await ask(reply_rx)


async def test_leases_until_the_budget_is_used_and_again_after_a_release(
    autojump_clock: Clock,
) -> None:
    desk = Desk(budget=10)
    async with trio.open_nursery() as nursery:
        nursery.start_soon(desk.cache.run)
        lease = await desk.lease(7)
        assert await ask(desk.reserve(4)) == CacheRefused(free_tokens=3)
        desk.tx.send_nowait(ReleaseCache(request_id="r", lease_id=lease.lease_id))
        # Releases and reservations keep their order: the second one already fits.
        await desk.lease(10)
        assert (desk.cache.book.leases, desk.cache.book.leased_tokens) == (1, 10)
        nursery.cancel_scope.cancel()


async def test_a_lease_that_nobody_waits_for_is_taken_back(autojump_clock: Clock) -> None:
    desk = Desk()
    async with trio.open_nursery() as nursery:
        nursery.start_soon(desk.cache.run)
        desk.reserve(7).close()
        await trio.testing.wait_all_tasks_blocked()
        assert (desk.cache.book.leases, desk.cache.book.leased_tokens) == (0, 0)
        nursery.cancel_scope.cancel()


async def test_leases_grow_shrink_and_come_back(autojump_clock: Clock) -> None:
    desk = Desk(budget=20, quantum=4)
    async with trio.open_nursery() as nursery:
        nursery.start_soon(desk.cache.run)
        first = await desk.lease(16)
        second = await desk.lease(15, (1, 2, 3))
        assert (first.tokens, second.tokens) == (5, 7)
        assert await desk.grow(first, 6) == CacheGrown(tokens=9)
        assert await desk.grow(second, 14) == CacheRefused(free_tokens=4)
        assert await ask(desk.reserve(1)) == CacheRefused(free_tokens=4)
        desk.tx.send_nowait(ShrinkCache(request_id="r", lease_id=first.lease_id))
        assert await desk.grow(second, 14) == CacheGrown(tokens=15)
        assert await desk.grow(first, 6) == CacheRefused(free_tokens=5)
        desk.tx.send_nowait(ReleaseCache(request_id="r", lease_id=second.lease_id))
        assert await desk.grow(first, 6) == CacheGrown(tokens=8)
        nursery.cancel_scope.cancel()


async def test_a_released_sequence_serves_the_next_prompt(autojump_clock: Clock) -> None:
    desk = Desk(budget=100, mode="blocks")
    async with trio.open_nursery() as nursery:
        nursery.start_soon(desk.cache.run)
        first = await desk.lease(12, tuple(range(6)), ROOT)
        assert first.prefix is None
        released = await desk.release(first, tuple(range(11)))
        assert [(one.handle, one.start, one.end) for one in released.keep] == [(1, 0, 4), (2, 4, 8)]
        second = await desk.lease(30, tuple(range(20)), ROOT, "s")
        assert second.prefix == KeptPrefix(handles=(1, 2), tokens=8)
        assert (await desk.lease(30, tuple(range(20)), b"other", "t")).prefix is None
        assert (await desk.lease(30, tuple(range(20)), None, "u")).prefix is None
        stats = desk.cache.prefixes.stats()
        assert (stats.lookups, stats.hits, stats.inserts) == (3, 1, 1)
        assert (stats.entries, stats.unique_block_hashes, stats.bytes) == (1, 2, 80)
        nursery.cancel_scope.cancel()


async def test_kept_prefixes_make_room_for_requests_but_not_those_in_use(
    autojump_clock: Clock,
) -> None:
    desk = Desk(budget=24, mode="blocks")
    async with trio.open_nursery() as nursery:
        nursery.start_soon(desk.cache.run)
        await desk.release(await desk.lease(10, tuple(range(8)), ROOT), tuple(range(8)))
        user = await desk.lease(10, tuple(range(9)), ROOT, "s")
        assert user.prefix is not None
        assert await ask(desk.reserve(7)) == CacheRefused(free_tokens=6)
        desk.tx.send_nowait(ReleaseCache(request_id="s", lease_id=user.lease_id))
        assert (await desk.lease(20)).forget == (2, 1)
        nursery.cancel_scope.cancel()


async def test_a_prefix_that_takes_the_room_of_its_own_request_is_given_up(
    autojump_clock: Clock,
) -> None:
    desk = Desk(budget=14, mode="blocks")
    async with trio.open_nursery() as nursery:
        nursery.start_soon(desk.cache.run)
        await desk.release(await desk.lease(10, tuple(range(8)), ROOT), tuple(range(8)))
        lease = await desk.lease(12, tuple(range(9)), ROOT, "s")
        assert lease.prefix is None
        assert sorted(lease.forget) == [1, 2]
        nursery.cancel_scope.cancel()


async def test_the_only_sequence_can_always_grow(autojump_clock: Clock) -> None:
    desk = Desk(budget=24, quantum=2, mode="blocks")
    async with trio.open_nursery() as nursery:
        nursery.start_soon(desk.cache.run)
        await desk.release(await desk.lease(10, tuple(range(8)), ROOT), tuple(range(8)))
        lease = await desk.lease(24, tuple(range(9)), ROOT, "s")
        assert lease.prefix is not None
        grown = await desk.grow(lease, 24)
        assert isinstance(grown, CacheGrown)
        assert (grown.tokens, sorted(grown.forget)) == (24, [1, 2])
        nursery.cancel_scope.cancel()


async def test_a_refused_request_counts_one_lookup(autojump_clock: Clock) -> None:
    desk = Desk(budget=10, mode="blocks")
    async with trio.open_nursery() as nursery:
        nursery.start_soon(desk.cache.run)
        holder = await desk.lease(8)
        for _ in range(3):
            assert isinstance(await ask(desk.reserve(9, tuple(range(8)), ROOT, "s")), CacheRefused)
        desk.tx.send_nowait(ReleaseCache(request_id="r", lease_id=holder.lease_id))
        await desk.lease(9, tuple(range(8)), ROOT, "s")
        assert desk.cache.prefixes.stats().lookups == 1
        nursery.cancel_scope.cancel()


async def test_clearing_wakes_whoever_tells_the_engine(autojump_clock: Clock) -> None:
    desk = Desk(budget=100, mode="blocks")
    async with trio.open_nursery() as nursery:
        nursery.start_soon(desk.cache.run)
        await desk.release(await desk.lease(12, tuple(range(8)), ROOT), tuple(range(8)))
        assert await desk.clear() == CacheCleared(freed_bytes=80, freed_entries=1)
        assert desk.woken == 1
        assert sorted(desk.cache.take_forget()) == [1, 2]
        assert desk.cache.take_forget() == ()
        assert await desk.clear() == CacheCleared(freed_bytes=0, freed_entries=0)
        nursery.cancel_scope.cancel()


async def test_snapshots_serve_prompts_that_go_on_from_them(autojump_clock: Clock) -> None:
    desk = Desk(budget=200, mode="snapshots", state_bytes=7)
    async with trio.open_nursery() as nursery:
        nursery.start_soon(desk.cache.run)
        first = await desk.lease(12, tuple(range(6)), ROOT)
        assert first.snapshot == 1
        # While it is not released, nobody knows whether the snapshot was taken.
        second = await desk.lease(12, tuple(range(6)), ROOT, "s")
        assert (second.prefix, second.snapshot) == (None, 2)
        assert (await desk.release(first, tuple(range(9)))).keep == ()
        assert (await desk.release(second, tuple(range(9)))).forget == (2,)  # kept twice
        again = await desk.lease(12, tuple(range(6)), ROOT, "t")
        assert (again.prefix, again.snapshot) == (KeptPrefix(handles=(1,), tokens=5), None)
        assert desk.cache.prefixes.stats().snapshot_bytes == 57
        nursery.cancel_scope.cancel()


async def test_a_crash_ends_the_reply_in_hand_and_those_behind_it(autojump_clock: Clock) -> None:
    desk = Desk()
    desk.faults.arm("cache.reserve")
    replies = [desk.reserve(1), desk.reserve(1)]
    with pytest.raises(ExceptionGroup) as caught:
        await desk.cache.run()
    assert caught.group_contains(Crash)
    for reply_rx in replies:
        with pytest.raises(PeerGone):
            await ask(reply_rx)
