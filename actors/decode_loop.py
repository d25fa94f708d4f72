"""DecodeLoop: decides who runs in each step; the only client of the engine.

Owns the slots.  Receives ``StartSequence``; sends tokens and the terminal event to the requesters,
then ``ReleaseCache`` and ``SlotGrant``, in this order.  The loop is pipelined: once a step's result
is here, only the cheap bookkeeping is done before the next step is handed over, and the tokens are
delivered while that one runs.  So a stop string, which is found during delivery, wastes at most the
one row of the step in flight; end tokens and lengths waste nothing.

A row is planned only if its channel has room for what is undelivered, for the token of the new step
and for the terminal event; otherwise it is parked, and the others go on.  And it is planned only as
far as its lease goes (``decode_growth``).

Ends by cancellation or by an error; either way every sequence it holds gets its terminal event.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import trio

from actors.closing import (
    DEADLINE,
    ENGINE_ERROR,
    INTERNAL,
    SLOW_CLIENT,
    closing_failure,
)
from actors.core.cost_model import CostModel
from actors.core.sequence import SequencePhase
from actors.core.service_rate import ServiceRate
from actors.core.step_planner import StepShape
from actors.decode_cache import CacheLink
from actors.decode_forks import Beginnings
from actors.decode_growth import Growth
from actors.decode_plan import ROOM_TO_DRAW, PlanMaker
from actors.decode_row import DecodeCounters, Row, Slots, state_of
from actors.decode_wait import wait_step
from actors.delivery import Drawn, chances_of
from actors.events import Failed, FinishReason, Started
from actors.kit.channels import hand_over
from actors.kit.faults import NO_FAULTS, Faults
from actors.kit.journal import Journal
from actors.limits import Limits
from actors.messages import CacheMessage, SlotGrant, StartSequence
from actors.phase import PhaseCell
from models.engine import Engine, EngineDead, StepPlan, StepResult, TokenLogprobs
from models.text_model import TextModel

NAME = "decode"


def nothing_to_forget() -> tuple[int, ...]:
    return ()


class DecodeLoop:
    """``counters``, ``cost`` and ``rate`` outlive it; the channels belong to its incarnation.

    ``take_forget`` yields handles that the CacheManager wants forgotten on its own account; after
    such news ``wake`` makes an idle loop ask.
    """

    def __init__(
        self,
        *,
        engine: Engine,
        text: TextModel,
        starts: trio.MemoryReceiveChannel[StartSequence],
        grants: trio.MemorySendChannel[SlotGrant],
        cache: trio.MemorySendChannel[CacheMessage],
        limits: Limits,
        phase: PhaseCell,
        counters: DecodeCounters,
        cost: CostModel,
        rate: ServiceRate,
        journal: Journal,
        faults: Faults = NO_FAULTS,
        take_forget: Callable[[], tuple[int, ...]] = nothing_to_forget,
    ) -> None:
        self._engine = engine
        self._text = text
        self._starts_rx = starts
        self._grants_tx = grants
        self._limits = limits
        self._phase = phase
        self._counters = counters
        self.cost = cost
        self._rate = rate
        self._journal = journal
        self._faults = faults
        self._outbox: list[tuple[Row, Drawn]] = []  # drawn, not yet delivered; one per row at most
        self._withheld: list[int] = []  # free slots that are not offered: somebody waits for cache
        self._idling: trio.CancelScope | None = None
        self.slots = Slots(limits.max_slots)
        self._beginnings = Beginnings(self.slots, counters, journal)
        self._cache = CacheLink(cache=cache, forks=self._beginnings.book, take_forget=take_forget)
        self._growth = Growth(slots=self.slots, link=self._cache, limits=limits, journal=journal)
        self._plans = PlanMaker(
            slots=self.slots,
            cache=self._cache,
            growth=self._growth,
            limits=limits,
            counters=counters,
            cost=cost,
            journal=journal,
        )
        self.running = True

    @property
    def starting(self) -> int:
        """Sequences that have been sent here but not been seated yet."""
        return self._starts_rx.statistics().current_buffer_used

    def wake(self) -> None:
        """There may be something to forget: if the loop is idle, it has a look."""
        if self._idling is not None:
            self._idling.cancel()

    async def run(self) -> None:
        try:
            await self._loop()
        except BaseException as error:
            self.running = False
            if isinstance(error, EngineDead):
                self._phase.engine_dead = True
            failure = closing_failure(self._phase, ENGINE_ERROR)
            if isinstance(error, Exception) and not self._phase.engine_dead:
                failure = ENGINE_ERROR
            # ``starts`` is the pipeline's to drain: what waits there has not run.
            for row in self.slots.rows():
                self._end(row, failure)
            raise

    def _end(self, row: Row, failure: Failed) -> None:
        """Fail ``row`` when the whole loop ends: there is nobody left to give credit to."""
        row.seq.phase = SequencePhase.GONE
        self.slots.free(row)
        if not row.sender.finished:
            row.sender.finish(failure)
            self._counters.failed += 1
            self._journal.record(NAME, "terminal", row.seq.request_id, "failed", failure.code.value)

    async def _loop(self) -> None:
        for slot in range(self._limits.max_slots):
            self._grant(slot)
        while True:
            self._absorb()
            for row, answer in self._cache.poll():
                self._growth.answered(row, answer)
            self._reap()
            self._feed()
            plan, shape = self._plans.make({row.seq.sequence_id for row, _ in self._outbox})
            if plan is not None:
                self._faults.hit("decode.before_step")
                self._engine.start_step(plan)
                self._deliver()  # of the step before, while this one runs
                result = await wait_step(
                    self._engine,
                    plan,
                    unwanted=partial(self._nobody_wants, plan),
                    limits=self._limits,
                    journal=self._journal,
                )
                self._account(plan, shape, result)
            elif self._outbox:
                self._deliver()
            elif not self._make_way():
                await self._idle()

    # Joining -------------------------------------------------------------------------------------

    def _grant(self, slot: int) -> None:
        self._journal.record(NAME, "granted", slot)
        hand_over(self._grants_tx, SlotGrant(slot=slot))

    def _absorb(self) -> None:
        """Seat everyone who waits in ``starts``."""
        while True:
            try:
                start = self._starts_rx.receive_nowait()
            except trio.WouldBlock:
                return
            self._seat(start)

    async def _idle(self) -> None:
        """Nothing can run: wait for answers, for a newcomer, or look again soon."""
        if self._cache.waiting:
            await self._cache.settle()
            return
        # Parked rows may get room, and choices of a fork may end before they start.
        soon = self.slots.active or len(self._beginnings.book) or self._withheld
        with trio.move_on_after(self._limits.poll_s if soon else float("inf")) as scope:
            self._idling = scope
            try:
                start = await self._starts_rx.receive()
            finally:
                self._idling = None
            self._seat(start)
            return
        self._growth.new_round()

    def _seat(self, start: StartSequence) -> None:
        sequence_id = self._counters.next_sequence_id
        self._counters.next_sequence_id += 1
        try:
            row = Row.open(start, sequence_id, self._text, trio.current_time())
        except BaseException:
            start.queued.sender.finish(ENGINE_ERROR)
            raise
        self.slots.seat(row)
        self._counters.started += 1
        seq = row.seq
        self._journal.record(
            NAME, "started", seq.request_id, sequence_id, seq.slot, start.lease.lease_id
        )
        row.prefix = self._cache.take_over(start.lease)
        self._beginnings.enter(row)
        self._counters.cached_tokens += row.cached_tokens
        # If nobody reads it, the reaper will notice.
        row.sender.send(Started(cached_tokens=row.cached_tokens))
        self._faults.hit("decode.after_absorb")

    # Leaving -------------------------------------------------------------------------------------

    def _reap(self) -> None:
        """End every sequence that must not go on, and read each channel's room once."""
        now = trio.current_time()
        for row in self.slots.rows():
            row.room = row.sender.room()
            if row.room < 0:
                self._cancel(row)
            elif row.seq.phase is SequencePhase.ENDING:
                pass
            elif now >= row.deadline_s:
                self._fail(row, DEADLINE)
            elif self._stalled(row, now):
                self._fail(row, SLOW_CLIENT)

    def _stalled(self, row: Row, now: float) -> bool:
        """Parked for too long, and nothing was read since: a long step must not hide a read."""
        since_s = row.seq.parked_since_s
        if since_s is None or now - since_s < self._limits.stall_s:
            return False
        return row.room < ROOM_TO_DRAW

    def _cancel(self, row: Row) -> None:
        """The client is gone: there is no one to send a terminal event to."""
        self._journal.record(NAME, "cancel_seen", row.seq.request_id, state_of(row.seq))
        self._counters.cancelled += 1
        row.sender.finish(INTERNAL)
        self._release(row)

    def _fail(self, row: Row, failure: Failed) -> None:
        self._counters.failed += 1
        row.sender.finish(failure)
        self._journal.record(NAME, "terminal", row.seq.request_id, "failed", failure.code.value)
        self._release(row)

    def _release(self, row: Row) -> None:
        """After the terminal event: the lease, then the slot."""
        seq = row.seq
        seq.phase = SequencePhase.GONE
        self.slots.free(row)
        self._beginnings.leave(row)
        self._rate.note(trio.current_time() - seq.started_s)
        self._cache.release(row)
        self._growth.new_round()
        self._journal.record(NAME, "slot_freed", seq.slot, seq.request_id)
        if self._growth.wanted:
            self._journal.record(NAME, "withheld", seq.slot)
            self._withheld.append(seq.slot)
        else:
            self._grant(seq.slot)

    # Cache ---------------------------------------------------------------------------------------

    def _feed(self) -> None:
        """See that leases grow in time, and that those who wait for cache get it some time."""
        self._growth.ask_all()
        if self._limits.enable_preemption:
            self._preempt(stuck=False)
        if self._withheld and not self._growth.wanted:
            withheld, self._withheld = self._withheld, []
            for slot in withheld:
                self._grant(slot)

    def _make_way(self) -> bool:
        """No step can run.  If that is for want of cache alone, somebody has to go."""
        if any(row.seq.parked_since_s is not None for row in self.slots.by_id.values()):
            return False  # it will go on or be ended
        return self._preempt(stuck=True)

    def _preempt(self, *, stuck: bool) -> bool:
        chosen = self._growth.victim(stuck=stuck)
        if chosen is None:
            return False
        row, needy = chosen
        self._counters.preempted += 1
        self._beginnings.leave(row)
        self._growth.preempt(row, needy)
        return True

    # Stepping ------------------------------------------------------------------------------------

    def _nobody_wants(self, plan: StepPlan) -> bool:
        """Whether everyone in a long step has left."""
        ids = [*plan.decode, *(chunk.sequence_id for chunk in plan.prefill)]
        rows = [self.slots.by_id[sid] for sid in ids if sid in self.slots.by_id]
        return bool(rows) and all(row.sender.abandoned for row in rows)

    def _account(self, plan: StepPlan, shape: StepShape, result: StepResult) -> None:
        """The bookkeeping that the next plan depends on; nothing is sent but failures."""
        self._faults.hit("decode.after_step")
        self._cache.exported(result.exported)
        by_id = self.slots.by_id
        if result.abandoned:
            # Everyone in it is gone, which the next reaping will see.
            for sid in (*shape.decode, *(sid for sid, _ in shape.prefill)):
                if sid in by_id:
                    by_id[sid].donates = False
                self._cache.lost(sid, freed=False)
            return
        self._counters.note_step(plan, result)
        if plan.decode:
            self.cost.note_decode(result.decode_s)
        self.cost.note_prefill(shape.tokens - len(shape.decode), result.prefill_s)
        for sid, reason in result.failed.items():
            self._row_failed(sid, reason)
        for sid, count in shape.prefill:
            if sid in by_id:
                self._beginnings.evaluated(by_id[sid], by_id[sid].seq.evaluated(count))
        for sid in shape.decode:
            if sid in by_id and sid in result.tokens:
                by_id[sid].seq.decoded()
        for sid, token_id in result.tokens.items():
            if sid in by_id:  # otherwise a stop string ended it while this step ran
                self._draw(by_id[sid], token_id, result.logprobs.get(sid))

    def _draw(self, row: Row, token_id: int, logprobs: TokenLogprobs | None) -> None:
        reason = row.seq.draw(token_id)
        shown = None if reason is FinishReason.STOP else token_id
        self._outbox.append((row, Drawn(shown, reason, logprobs)))
        if reason is not None and not row.donates:
            self._cache.drop(row)

    def _row_failed(self, sequence_id: int, reason: str) -> None:
        """The engine lost this row alone, and has already freed its cache."""
        row = self.slots.by_id.get(sequence_id)
        if row is None:
            self._cache.lost(sequence_id, freed=True)
            return
        row.seq.in_engine = False
        row.note_engine_failure(reason)
        self._fail(row, ENGINE_ERROR)

    # Delivering ----------------------------------------------------------------------------------

    def _deliver(self) -> None:
        """Send what the last step drew."""
        if not self._outbox:
            return
        outbox, self._outbox = self._outbox, []
        self._faults.hit("decode.deliver")
        now = trio.current_time()
        for row, drawn in outbox:
            if row.seq.phase is not SequencePhase.GONE:
                self._deliver_row(row, drawn, now)

    def _deliver_row(self, row: Row, drawn: Drawn, now: float) -> None:
        row.note_token(now)
        script = row.transcript
        if drawn.token_id is not None:
            chances = None
            if drawn.logprobs is not None:
                chances = chances_of(drawn.token_id, drawn.logprobs, self._text.token_bytes)
            delta = script.add(drawn.token_id, chances)
            if not row.sender.send(delta):
                self._cancel(row)
                return
            if self._journal.enabled:
                self._journal.record(
                    NAME, "token", row.seq.request_id, delta.position, delta.token_id
                )
        if drawn.reason is None and script.stop_string is None:
            return
        if script.stop_string is None:
            script.end()
        finished = row.finished(drawn.reason, now)
        self._counters.completed += 1
        row.sender.finish(finished)
        self._journal.record(
            NAME, "terminal", row.seq.request_id, "finished", finished.reason.value
        )
        self._release(row)
