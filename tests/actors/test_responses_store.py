from __future__ import annotations

import trio

from actors.limits import Limits
from actors.messages import DeleteResponse, GetResponse, PutResponse
from tests.actors.harness import World, open_world

Clock = trio.testing.MockClock
LIMITS = Limits(store_ttl_s=100.0, store_max_entries=2)


async def put(world: World, rid: str, body: bytes, owner: str = "o") -> bool:
    tx, rx = trio.open_memory_channel[bool](1)
    await world.ports.store.send(PutResponse(response_id=rid, owner=owner, body=body, reply_tx=tx))
    return await rx.receive()


async def get(world: World, rid: str, owner: str = "o") -> bytes | None:
    tx, rx = trio.open_memory_channel[bytes | None](1)
    await world.ports.store.send(GetResponse(response_id=rid, owner=owner, reply_tx=tx))
    return await rx.receive()


async def test_put_get_delete(autojump_clock: Clock) -> None:
    async with open_world(limits=LIMITS) as world:
        assert await put(world, "a", b"1")
        assert await get(world, "a") == b"1"
        assert await get(world, "a", owner="other") is None
        tx, rx = trio.open_memory_channel[bool](1)
        await world.ports.store.send(DeleteResponse(response_id="a", owner="o", reply_tx=tx))
        assert await rx.receive()
        assert await get(world, "a") is None


async def test_the_memory_is_freed_at_the_end_of_the_time_to_live(autojump_clock: Clock) -> None:
    async with open_world(limits=LIMITS) as world:
        await put(world, "a", b"1")
        assert world.store.entries == 1
        await trio.sleep(LIMITS.store_ttl_s + 1)
        assert (world.store.entries, world.store.size_bytes) == (0, 0)


async def test_it_stays_within_its_bound(autojump_clock: Clock) -> None:
    async with open_world(limits=LIMITS) as world:
        for rid in ("a", "b", "c"):
            await put(world, rid, b"1")
        assert world.store.entries == 2
        assert await get(world, "a") is None


async def test_a_crash_ends_the_request_in_hand_and_the_next_one_is_served(
    autojump_clock: Clock,
) -> None:
    async with open_world(limits=LIMITS) as world:
        world.faults.arm("store.request")
        results: list[str] = []

        async def asks(rid: str) -> None:
            try:
                await get(world, rid)
                results.append("served")
            except trio.EndOfChannel:
                results.append("lost")

        async with trio.open_nursery() as nursery:
            nursery.start_soon(asks, "a")
            nursery.start_soon(asks, "b")
        assert sorted(results) == ["lost", "served"]
        assert world.supervisor.restarts["store"] == 1


async def test_a_client_that_left_harms_nobody(autojump_clock: Clock) -> None:
    async with open_world(limits=LIMITS) as world:
        tx, rx = trio.open_memory_channel[bytes | None](1)
        rx.close()
        await world.ports.store.send(GetResponse(response_id="a", owner="o", reply_tx=tx))
        assert await get(world, "a") is None
        assert world.supervisor.restarts["store"] == 0
