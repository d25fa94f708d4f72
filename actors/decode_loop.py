"""DecodeLoop: decides who runs in each step; the only client of the engine.

Owns the slots.  Receives ``StartSequence``; sends tokens and the terminal event to the requesters,
then ``ReleaseCache`` and ``SlotGrant``, in this order.  The loop is pipelined: once a step's result
is here, only the cheap bookkeeping is done before the next step is handed over, and the tokens are
delivered while that one runs.  So a stop string, which is found during delivery, wastes at most the
one row of the step in flight; end tokens and lengths waste nothing.

A row is planned only if its channel has room for what is undelivered, for the token of the new step
and for the terminal event; otherwise it is parked, and the others go on.

Ends by cancellation or by an error; either way every sequence it holds gets its terminal event.
"""

from __future__ import annotations

from collections.abc import Iterator

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
from actors.core.step_planner import PrefillNeed, StepShape, plan_step
from actors.decode_row import DecodeCounters, Row, Slots
from actors.delivery import Drawn, chances_of
from actors.events import Failed, FinishReason, Started
from actors.kit.channels import hand_over
from actors.kit.faults import NO_FAULTS, Faults
from actors.kit.journal import Journal
from actors.limits import Limits
from actors.messages import CacheMessage, ReleaseCache, SlotGrant, StartSequence
from actors.phase import PhaseCell
from models.engine import Engine, EngineDead, EngineError, StepPlan, StepResult, TokenLogprobs
from models.text_model import TextModel

NAME = "decode"
ROOM_TO_DRAW = 2  # places that a planned row needs: its token's and the terminal event's


class DecodeLoop:
    """``counters``, ``cost`` and ``rate`` outlive it; the channels belong to its incarnation."""

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
    ) -> None:
        self._engine = engine
        self._text = text
        self._starts_rx = starts
        self._grants_tx = grants
        self._cache_tx = cache
        self._limits = limits
        self._phase = phase
        self._counters = counters
        self.cost = cost
        self._rate = rate
        self._journal = journal
        self._faults = faults
        self._drops: list[int] = []  # what the next plan is to free
        self._outbox: list[tuple[Row, Drawn]] = []  # drawn, not yet delivered; one per row at most
        self.slots = Slots(limits.max_slots)
        self.running = True

    @property
    def starting(self) -> int:
        """Sequences that have been sent here but not been seated yet."""
        return self._starts_rx.statistics().current_buffer_used

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
            self._reap()
            plan, shape = self._plan()
            if plan is not None:
                self._faults.hit("decode.before_step")
                self._engine.start_step(plan)
                self._deliver()  # of the step before, while this one runs
                self._account(plan, shape, await self._wait(plan))
            elif self._outbox:
                self._deliver()
            else:
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
        """Nothing can run: wait for a newcomer, or, if all are parked, look again soon."""
        wait_s = self._limits.poll_s if self.slots.active else float("inf")
        with trio.move_on_after(wait_s):
            self._seat(await self._starts_rx.receive())

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
        row.sender.send(Started())  # if nobody reads it, the reaper will notice
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
        where = "prefill" if row.seq.phase is SequencePhase.PREFILL else "decode"
        self._journal.record(NAME, "cancel_seen", row.seq.request_id, where)
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
        self._drop(row)
        seq.phase = SequencePhase.GONE
        self.slots.free(row)
        self._rate.note(trio.current_time() - seq.started_s)
        hand_over(
            self._cache_tx,
            ReleaseCache(request_id=seq.request_id, lease_id=row.lease.lease_id),
        )
        self._journal.record(NAME, "slot_freed", seq.slot, seq.request_id)
        self._grant(seq.slot)

    def _drop(self, row: Row) -> None:
        """The engine frees its cache in the next step, before anything else."""
        if row.seq.in_engine:
            row.seq.in_engine = False
            self._drops.append(row.seq.sequence_id)

    # Stepping ------------------------------------------------------------------------------------

    def _plan(self) -> tuple[StepPlan | None, StepShape]:
        shape = plan_step(
            decode=[row.seq.sequence_id for row in self._ready_rows()],
            prefill=[
                PrefillNeed(
                    sequence_id=row.seq.sequence_id, remaining_tokens=row.seq.remaining_prompt
                )
                for row in self.slots.rows()
                if row.seq.phase is SequencePhase.PREFILL
            ],
            limits=self._limits,
            cost=self.cost,
        )
        if not (shape.decode or shape.prefill or self._drops):
            return None, shape
        plan = StepPlan(
            step=self._counters.next_step,
            drop=tuple(self._drops),
            decode=shape.decode,
            prefill=tuple(self.slots.by_id[sid].seq.chunk(count) for sid, count in shape.prefill),
            force=self._forced(shape),
        )
        self._counters.next_step += 1
        self._drops.clear()
        for sid, _ in shape.prefill:
            self.slots.by_id[sid].seq.in_engine = True
        if self._journal.enabled:
            self._note_plan(plan, shape)
        return plan, shape

    def _forced(self, shape: StepShape) -> dict[int, int]:
        """The tokens that end reasoning blocks which have become too long."""
        drawing = list(shape.decode)
        drawing += [
            sid for sid, count in shape.prefill if self.slots.by_id[sid].seq.ends_with(count)
        ]
        forced: dict[int, int] = {}
        for sid in drawing:
            thinking = self.slots.by_id[sid].seq.thinking
            if thinking is not None and thinking.forced is not None:
                forced[sid] = thinking.forced
        return forced

    def _ready_rows(self) -> Iterator[Row]:
        """Rows that decode and have room; the others are parked."""
        undelivered = {row.seq.sequence_id for row, _ in self._outbox}
        for row in self.slots.rows():
            seq = row.seq
            if seq.phase is not SequencePhase.DECODE:
                continue
            if row.room >= (seq.sequence_id in undelivered) + ROOM_TO_DRAW:
                if seq.resume():
                    self._journal.record(NAME, "resumed", seq.request_id)
                yield row
            elif seq.park(trio.current_time()):
                self._journal.record(NAME, "parked", seq.request_id)

    def _note_plan(self, plan: StepPlan, shape: StepShape) -> None:
        rid = {sid: row.seq.request_id for sid, row in self.slots.by_id.items()}
        self._journal.record(
            NAME,
            "planned",
            plan.step,
            tuple(rid[sid] for sid in shape.decode),
            tuple((rid[sid], count) for sid, count in shape.prefill),
            shape.tokens,
        )

    async def _wait(self, plan: StepPlan) -> StepResult:
        """A step cannot be interrupted, so neither can the wait for it.  Raises EngineError."""
        try:
            with trio.CancelScope(shield=True) as scope:
                scope.deadline = trio.current_time() + self._limits.step_timeout_s
                result = await self._wait_while_wanted(plan)
        except EngineError:
            self._journal.record(NAME, "engine_fault", plan.step)
            raise
        if scope.cancelled_caught:
            self._journal.record(NAME, "engine_fault", plan.step)
            raise EngineDead(f"step {plan.step} took over {self._limits.step_timeout_s} s")
        assert result.step == plan.step, (result.step, plan.step)
        self._journal.record(NAME, "stepped", plan.step)
        await trio.lowlevel.checkpoint_if_cancelled()
        return result

    async def _wait_while_wanted(self, plan: StepPlan) -> StepResult:
        """If everyone in a long step leaves, the engine may give it up half-way."""
        while True:
            with trio.move_on_after(self._limits.poll_s):
                return await self._engine.wait_step()
            if self._nobody_wants(plan):
                self._engine.abandon_step()
                return await self._engine.wait_step()

    def _nobody_wants(self, plan: StepPlan) -> bool:
        ids = [*plan.decode, *(chunk.sequence_id for chunk in plan.prefill)]
        rows = [self.slots.by_id[sid] for sid in ids if sid in self.slots.by_id]
        return bool(rows) and all(row.sender.abandoned for row in rows)

    def _account(self, plan: StepPlan, shape: StepShape, result: StepResult) -> None:
        """The bookkeeping that the next plan depends on; nothing is sent but failures."""
        self._faults.hit("decode.after_step")
        if result.abandoned:
            return  # everyone in it is gone, which the next reaping will see
        self._counters.note_step(plan, result)
        if plan.decode:
            self.cost.note_decode(result.decode_s)
        self.cost.note_prefill(shape.tokens - len(shape.decode), result.prefill_s)
        for sid, count in shape.prefill:
            row = self.slots.by_id.get(sid)
            if row is not None:
                row.seq.evaluated(count)
        for sid, reason in result.failed.items():
            self._row_failed(sid, reason)
        for sid in shape.decode:
            row = self.slots.by_id.get(sid)
            if row is not None and sid in result.tokens:
                row.seq.decoded()
        for sid, token_id in result.tokens.items():
            row = self.slots.by_id.get(sid)
            if row is not None:  # otherwise a stop string ended it while this step ran
                self._draw(row, token_id, result.logprobs.get(sid))

    def _draw(self, row: Row, token_id: int, logprobs: TokenLogprobs | None) -> None:
        reason = row.seq.draw(token_id)
        shown = None if reason is FinishReason.STOP else token_id
        self._outbox.append((row, Drawn(shown, reason, logprobs)))
        if reason is not None:
            self._drop(row)

    def _row_failed(self, sequence_id: int, reason: str) -> None:
        """The engine lost this row alone, and has already freed its cache."""
        row = self.slots.by_id.get(sequence_id)
        if row is None:
            self._drops.remove(sequence_id)  # it was ended during the step; nothing left to free
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
