"""PrefillQueue: decides who starts next.

Drives the ``WaitingRoom`` (which outlives it).  Receives ``Queued`` per lane and ``SlotGrant``;
asks the CacheManager for a lease and sends ``StartSequence`` to the DecodeLoop.  One dispatch task
makes every decision; the others only bring news and beat the pulse.  Ends with its pipeline; when
it crashes itself it sets ``crashed``, and the pipeline fails everyone who waits, since the room may
have been left half changed.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping

import trio

from actors.closing import DEADLINE, INTERNAL
from actors.core.waiting_room import WaitingRoom
from actors.events import Failed
from actors.kit.channels import PeerGone, ask, fail_pending, hand_over
from actors.kit.faults import NO_FAULTS, Faults
from actors.kit.journal import Journal
from actors.kit.pulse import Pulse
from actors.limits import LANES, Limits
from actors.messages import (
    CacheLease,
    CacheMessage,
    CacheRefused,
    CacheReply,
    Queued,
    ReserveCache,
    SlotGrant,
    StartSequence,
)
from actors.requests import Priority

NAME = "prefill"
Room = WaitingRoom[Queued]


def open_room(limits: Limits) -> Room:
    """A waiting room with a lane per priority.  Everyone in it holds a place, hence the bound."""
    return WaitingRoom(lanes=len(LANES), bound=limits.places, max_skips=limits.priority_max_skips)


class PrefillQueue:
    """All channels, also the clones in ``lanes``, belong to this incarnation."""

    def __init__(
        self,
        *,
        room: Room,
        lanes: Mapping[Priority, trio.MemoryReceiveChannel[Queued]],
        grants: trio.MemoryReceiveChannel[SlotGrant],
        starts: trio.MemorySendChannel[StartSequence],
        cache: trio.MemorySendChannel[CacheMessage],
        limits: Limits,
        journal: Journal,
        faults: Faults = NO_FAULTS,
    ) -> None:
        self._room = room
        self._lanes = lanes
        self._grants_rx = grants
        self._starts_tx = starts
        self._cache_tx = cache
        self._limits = limits
        self._journal = journal
        self._faults = faults
        self._grants: deque[SlotGrant] = deque()
        self._pulse = Pulse()
        self.crashed = False  # by itself: whoever waits must be failed

    @property
    def free_grants(self) -> int:
        return len(self._grants)

    async def run(self) -> None:
        try:
            async with trio.open_nursery() as nursery:
                for lane in LANES:
                    nursery.start_soon(self._intake, lane)
                nursery.start_soon(self._credit)
                nursery.start_soon(self._sweeper)
                nursery.start_soon(self._dispatch)
        except* PeerGone:
            raise  # somebody else crashed: the room is sound and those in it go on waiting
        except* Exception:
            self.crashed = True
            raise
        finally:
            for rx in self._lanes.values():
                rx.close()  # a clone of an unbuffered channel: it holds nothing
            fail_pending(self._grants_rx, INTERNAL)

    async def _intake(self, lane: Priority) -> None:
        async for queued in self._lanes[lane]:
            self._room.put(lane, queued)
            self._journal.record(
                NAME, "queued", queued.sender.request_id, lane.name, queued.total_tokens
            )
            self._pulse.beat()

    async def _credit(self) -> None:
        async for grant in self._grants_rx:
            self._grants.append(grant)
            self._pulse.beat()

    async def _sweeper(self) -> None:
        while True:
            await trio.sleep(self._limits.sweep_s)
            if self._sweep():
                self._pulse.beat()

    def _sweep(self) -> bool:
        """End everyone who waits in vain.  True if anyone left."""
        now = trio.current_time()
        gone = self._room.sweep(lambda queued: _why_leave(queued, now))
        for queued, why in gone:
            rid = queued.sender.request_id
            self._journal.record(NAME, "swept", rid, why)
            queued.sender.finish(DEADLINE)
            if why == "cancelled":
                self._journal.record(NAME, "cancel_seen", rid, "queued")
            else:
                self._journal.record(NAME, "terminal", rid, "failed", DEADLINE.code.value)
        return bool(gone)

    async def _dispatch(self) -> None:
        while True:
            # Read before deciding: whatever changes while a reservation is under way counts as new.
            seen = self._pulse.version
            self._sweep()
            if self._grants and await self._start_next():
                continue
            await self._pulse.since(seen)

    async def _start_next(self) -> bool:
        """Start whoever is next; False if nobody waits or the cache has no room for them now."""
        picked = self._room.pick()
        if picked is None:
            return False
        queued = picked.item
        rid = queued.sender.request_id
        self._journal.record(NAME, "picked", rid, queued.lane.name, int(picked.by_skip))
        try:
            self._faults.hit("prefill.after_pick")
            answer = await self._reserve(queued)
            if isinstance(answer, CacheRefused):
                put_back(self._room, self._journal)
                return False
            self._faults.hit("prefill.after_reserve")
            self._send_start(queued, answer)
        except BaseException:
            # Cancelled because a neighbour crashed: it has not run, so it goes on waiting.
            put_back(self._room, self._journal)
            raise
        return True

    async def _reserve(self, queued: Queued) -> CacheReply:
        reply_tx, reply_rx = trio.open_memory_channel[CacheReply](1)
        request = ReserveCache(
            request_id=queued.sender.request_id,
            prompt_ids=queued.prompt_ids,
            total_tokens=queued.total_tokens,
            cache_root=queued.cache_root,
            reply_tx=reply_tx,
        )
        hand_over(self._cache_tx, request)
        return await ask(reply_rx)

    def _send_start(self, queued: Queued, lease: CacheLease) -> None:
        start = StartSequence(slot=self._grants[0].slot, queued=queued, lease=lease)
        hand_over(self._starts_tx, start)
        self._grants.popleft()
        self._room.commit()


def _why_leave(queued: Queued, now: float) -> str | None:
    if queued.sender.abandoned:
        return "cancelled"
    return "deadline" if now >= queued.deadline_s else None


def put_back(room: Room, journal: Journal) -> None:
    """The one in hand goes back to the front of its lane."""
    queued = room.put_back()
    journal.record(NAME, "requeued", queued.sender.request_id, queued.lane.name)


def fail_room(room: Room, failure: Failed, journal: Journal) -> None:
    """Everyone who waits fails."""
    for queued in room.clear():
        queued.sender.finish(failure)
        rid = queued.sender.request_id
        journal.record(NAME, "terminal", rid, "failed", failure.code.value)
