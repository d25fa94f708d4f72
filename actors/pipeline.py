"""One incarnation after another of CacheManager, PrefillQueue and DecodeLoop: one for all.

The pipeline object lives as long as the server and keeps what survives a crash: the waiting room,
the counters, the measured costs.  ``run`` is one incarnation with fresh inner channels.  If one of
the three crashes, the other two end with it, running requests fail and waiting ones stay.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import trio

from actors.cache_manager import CacheManager
from actors.closing import closing_failure
from actors.core.cache_stats import CacheStats
from actors.core.cost_model import CostModel
from actors.core.prefix_cache import CacheMemory, cache_stats
from actors.core.service_rate import ServiceRate
from actors.decode_loop import DecodeLoop
from actors.decode_row import DecodeCounters
from actors.kit.channels import PeerGone, ask, drain, fail_pending
from actors.kit.faults import NO_FAULTS, Faults
from actors.kit.journal import Journal
from actors.kit.supervise import Supervisor
from actors.limits import LANES, Limits
from actors.messages import (
    CacheCleared,
    CacheControl,
    CacheMessage,
    ClearCache,
    Queued,
    SlotGrant,
    StartSequence,
)
from actors.phase import PhaseCell
from actors.ports import SlotStatus
from actors.prefill_queue import NAME as QUEUE_NAME
from actors.prefill_queue import PrefillQueue, Room, fail_room
from actors.requests import Priority
from models.engine import Engine, EngineDead
from models.text_model import TextModel

NAME = "pipeline"


@dataclass(frozen=True, slots=True, kw_only=True)
class PipelineStatus:
    """``alive`` is False while no step can run.  ``waiting`` counts those without a slot."""

    alive: bool
    slots: tuple[SlotStatus, ...]
    waiting: int
    leases: int
    leased_tokens: int


class Pipeline:
    """``lanes`` outlive every incarnation; each one receives through clones of them."""

    def __init__(
        self,
        *,
        engine: Engine,
        text: TextModel,
        limits: Limits,
        phase: PhaseCell,
        room: Room,
        lanes: Mapping[Priority, trio.MemoryReceiveChannel[Queued]],
        journal: Journal,
        rate: ServiceRate,
        faults: Faults = NO_FAULTS,
    ) -> None:
        widest = engine.info.max_batch
        batch = limits.max_batch or limits.max_slots
        assert widest is None or batch <= widest, "more rows in a step than the engine can batch"
        self._engine = engine
        self._text = text
        self._limits = limits
        self._phase = phase
        self._room = room
        self._lanes = lanes
        self._journal = journal
        self._rate = rate
        self._faults = faults
        self._actors: tuple[CacheManager, DecodeLoop] | None = None
        self.counters = DecodeCounters()
        self.cost = CostModel()
        self.cache_memory = CacheMemory()
        self._control_tx, self._control = trio.open_memory_channel[CacheControl](1)

    async def supervised(self, supervisor: Supervisor) -> None:
        """Run until cancelled.  Raises SupervisionFailed; nobody is left waiting either way."""
        try:
            await supervisor.run(NAME, self.run, fatal=(EngineDead,))
        finally:
            self.close()

    async def run(self) -> None:
        """One incarnation.  Starts from an empty engine; raises what crashed it."""
        await self._reset_engine()
        cache_tx, cache_rx = trio.open_memory_channel[CacheMessage](self._limits.cache_channel)
        grants_tx, grants_rx = trio.open_memory_channel[SlotGrant](self._limits.grants_channel)
        starts_tx, starts_rx = trio.open_memory_channel[StartSequence](self._limits.starts_channel)
        cache = CacheManager(
            inbox=cache_rx,
            control=self._control.clone(),
            limits=self._limits,
            mode=self._engine.info.prefix,
            state_bytes=self._engine.info.state_bytes,
            memory=self.cache_memory,
            on_forget=lambda: decode.wake(),
            journal=self._journal,
            faults=self._faults,
        )
        queue = PrefillQueue(
            room=self._room,
            lanes={lane: self._lanes[lane].clone() for lane in LANES},
            grants=grants_rx,
            starts=starts_tx,
            cache=cache_tx,
            limits=self._limits,
            journal=self._journal,
            faults=self._faults,
        )
        decode = DecodeLoop(
            engine=self._engine,
            text=self._text,
            starts=starts_rx,
            grants=grants_tx,
            cache=cache_tx,
            limits=self._limits,
            phase=self._phase,
            counters=self.counters,
            cost=self.cost,
            rate=self._rate,
            journal=self._journal,
            faults=self._faults,
            take_forget=cache.take_forget,
        )
        self._actors = (cache, decode)
        try:
            async with trio.open_nursery() as nursery:
                nursery.start_soon(cache.run)
                nursery.start_soon(queue.run)
                nursery.start_soon(decode.run)
        finally:
            self._actors = None
            self._pull_back(starts_rx, queue.crashed)

    async def _reset_engine(self) -> None:
        try:
            with trio.move_on_after(self._limits.step_timeout_s) as scope:
                await self._engine.reset()
            if scope.cancelled_caught:
                raise EngineDead("the engine does not answer")
        except EngineDead:
            self._phase.engine_dead = True
            raise

    def _pull_back(
        self, starts_rx: trio.MemoryReceiveChannel[StartSequence], room_is_lost: bool
    ) -> None:
        """Those who were about to start have not run: they go first again, unless the room fell."""
        queued = [start.queued for start in drain(starts_rx)]
        starts_rx.close()
        for lane in LANES:
            self._room.put_front(lane, [one for one in queued if one.lane is lane])
        for one in queued:
            rid = one.sender.request_id
            self._journal.record(QUEUE_NAME, "requeued", rid, one.lane.name)
        if room_is_lost:
            fail_room(self._room, closing_failure(self._phase), self._journal)

    def close(self) -> None:
        """Fail everyone who still waits, and close the lanes.  Idempotent."""
        failure = closing_failure(self._phase)
        fail_pending(self._control, failure)
        self._control_tx.close()
        fail_room(self._room, failure, self._journal)
        for lane in LANES:
            for queued in fail_pending(self._lanes[lane], failure):
                rid = queued.sender.request_id
                self._journal.record(QUEUE_NAME, "terminal", rid, "failed", failure.code.value)

    def cache_stats(self) -> CacheStats:
        """Of the prompt cache.  Never awaits."""
        cache = None if self._actors is None else self._actors[0].prefixes
        return cache_stats(self._limits.prompt_cache, self.cache_memory, cache)

    async def clear_cache(self) -> CacheCleared:
        """Forget every prefix that no running sequence uses."""
        if self._actors is None:
            return CacheCleared(freed_bytes=0, freed_entries=0)
        reply_tx, reply_rx = trio.open_memory_channel[CacheCleared](1)
        await self._control_tx.send(ClearCache(reply_tx=reply_tx))
        try:
            return await ask(reply_rx)
        except PeerGone:
            # The pipeline crashed meanwhile, and nothing is kept over a restart.
            return CacheCleared(freed_bytes=0, freed_entries=0)

    def status(self) -> PipelineStatus:
        """A consistent snapshot.  Never awaits."""
        if self._actors is None:
            idle = tuple(
                SlotStatus(slot=slot, request_id=None, state="idle")
                for slot in range(self._limits.max_slots)
            )
            return PipelineStatus(
                alive=False, slots=idle, waiting=len(self._room), leases=0, leased_tokens=0
            )
        cache, decode = self._actors
        return PipelineStatus(
            alive=decode.running and self._engine.alive,
            slots=decode.slots.status(),
            waiting=len(self._room) + decode.starting,
            leases=cache.book.leases,
            leased_tokens=cache.book.leased_tokens,
        )
