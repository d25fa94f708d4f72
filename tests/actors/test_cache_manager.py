from __future__ import annotations

import pytest
import trio

from actors.cache_manager import CacheManager
from actors.kit.channels import PeerGone, ask
from actors.kit.journal import RingJournal
from actors.messages import (
    CacheLease,
    CacheMessage,
    CacheRefused,
    CacheReply,
    ReleaseCache,
    ReserveCache,
)
from tests.actors.harness import ArmedFaults, Crash

Clock = trio.testing.MockClock


def manager(
    budget: int = 10,
) -> tuple[CacheManager, trio.MemorySendChannel[CacheMessage], ArmedFaults]:
    tx, rx = trio.open_memory_channel[CacheMessage](8)
    faults = ArmedFaults()
    journal = RingJournal(trio.current_time)
    return (
        CacheManager(inbox=rx, budget_tokens=budget, journal=journal, faults=faults),
        tx,
        faults,
    )


def reserve(
    tx: trio.MemorySendChannel[CacheMessage], tokens: int
) -> trio.MemoryReceiveChannel[CacheReply]:
    reply_tx, reply_rx = trio.open_memory_channel[CacheReply](1)
    tx.send_nowait(
        ReserveCache(
            request_id="r",
            prompt_ids=(1,),
            total_tokens=tokens,
            cache_root=None,
            reply_tx=reply_tx,
        )
    )
    return reply_rx


async def test_leases_until_the_budget_is_used_and_again_after_a_release(
    autojump_clock: Clock,
) -> None:
    cache, tx, _ = manager(budget=10)
    async with trio.open_nursery() as nursery:
        nursery.start_soon(cache.run)
        lease = await ask(reserve(tx, 7))
        assert isinstance(lease, CacheLease)
        assert await ask(reserve(tx, 4)) == CacheRefused(free_tokens=3)
        tx.send_nowait(ReleaseCache(request_id="r", lease_id=lease.lease_id))
        # Releases and reservations keep their order: the second one already fits.
        assert isinstance(await ask(reserve(tx, 10)), CacheLease)
        assert (cache.book.leases, cache.book.leased_tokens) == (1, 10)
        nursery.cancel_scope.cancel()


async def test_a_lease_that_nobody_waits_for_is_taken_back(autojump_clock: Clock) -> None:
    cache, tx, _ = manager()
    async with trio.open_nursery() as nursery:
        nursery.start_soon(cache.run)
        reserve(tx, 7).close()
        await trio.testing.wait_all_tasks_blocked()
        assert (cache.book.leases, cache.book.leased_tokens) == (0, 0)
        nursery.cancel_scope.cancel()


async def test_a_crash_ends_the_reply_in_hand_and_those_behind_it(autojump_clock: Clock) -> None:
    cache, tx, faults = manager()
    faults.arm("cache.reserve")
    replies = [reserve(tx, 1), reserve(tx, 1)]
    with pytest.raises(Crash):
        await cache.run()
    for reply_rx in replies:
        with pytest.raises(PeerGone):
            await ask(reply_rx)
