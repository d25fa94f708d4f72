"""The next step of the DecodeLoop as a plan for the engine."""

from __future__ import annotations

from collections.abc import Iterator, Set

import trio

from actors.core.cost_model import CostModel
from actors.core.sequence import SequencePhase
from actors.core.step_planner import PrefillNeed, StepPlanner, StepShape
from actors.decode_cache import CacheLink
from actors.decode_growth import Growth
from actors.decode_row import DecodeCounters, Row, Slots
from actors.kit.journal import Journal
from actors.limits import Limits
from models.engine import StepPlan

NAME = "decode"
ROOM_TO_DRAW = 2  # places that a planned row needs: its token's and the terminal event's


class PlanMaker:
    def __init__(
        self,
        *,
        slots: Slots,
        cache: CacheLink,
        growth: Growth,
        limits: Limits,
        counters: DecodeCounters,
        cost: CostModel,
        journal: Journal,
    ) -> None:
        self._slots = slots
        self._cache = cache
        self._growth = growth
        self._counters = counters
        self._cost = cost
        self._journal = journal
        self._planner = StepPlanner(limits)

    def make(self, undelivered: Set[int]) -> tuple[StepPlan | None, StepShape]:
        """None if there is nothing to do.  ``undelivered``: whose last token is still here."""
        shape = self._planner.plan(
            decode=[row.seq.sequence_id for row in self._ready_rows(undelivered)],
            prefill=[
                PrefillNeed(sequence_id=row.seq.sequence_id, remaining_tokens=row.seq.next_chunk)
                for row in self._prefilling_rows(undelivered)
            ],
            cost=self._cost,
        )
        work = self._cache.take_work()
        if not (shape.decode or shape.prefill or work):
            return None, shape
        by_id = self._slots.by_id
        plan = StepPlan(
            step=self._counters.next_step,
            forget=work.forget,
            load=work.load,
            keep=work.keep,
            drop=work.drop,
            decode=shape.decode,
            prefill=tuple(by_id[sid].seq.chunk(count) for sid, count in shape.prefill),
            force=self._forced(shape),
        )
        self._counters.next_step += 1
        for sid, _ in shape.prefill:
            by_id[sid].seq.in_engine = True
        if self._journal.enabled:
            self._note_plan(plan, shape)
        return plan, shape

    def _ready_rows(self, undelivered: Set[int]) -> Iterator[Row]:
        """Rows that decode, have room and cache."""
        for row in self._slots.rows():
            if row.seq.phase is not SequencePhase.DECODE:
                continue
            if not self._has_room(row, undelivered):
                row.starved = False
            elif self._growth.covers_next(row):
                yield row

    def _prefilling_rows(self, undelivered: Set[int]) -> Iterator[Row]:
        """Rows with a prompt to be evaluated.  One that was preempted may have a full channel."""
        for row in self._slots.rows():
            if row.seq.phase is not SequencePhase.PREFILL:
                continue
            if not row.seq.generated or self._has_room(row, undelivered):
                yield row

    def _has_room(self, row: Row, undelivered: Set[int]) -> bool:
        """Whether one more token can be sent; otherwise the row is parked."""
        seq = row.seq
        if row.room >= (seq.sequence_id in undelivered) + ROOM_TO_DRAW:
            if seq.resume():
                self._journal.record(NAME, "resumed", seq.request_id)
            return True
        if seq.park(trio.current_time()):
            self._journal.record(NAME, "parked", seq.request_id)
        return False

    def _forced(self, shape: StepShape) -> dict[int, int]:
        """The tokens that end reasoning blocks which have become too long."""
        forced: dict[int, int] = {}
        ending = [sid for sid, n in shape.prefill if self._slots.by_id[sid].seq.ends_with(n)]
        for sid in (*shape.decode, *ending):
            thinking = self._slots.by_id[sid].seq.thinking
            if thinking is not None and thinking.forced is not None:
                forced[sid] = thinking.forced
        return forced

    def _note_plan(self, plan: StepPlan, shape: StepShape) -> None:
        rid = {sid: row.seq.request_id for sid, row in self._slots.by_id.items()}
        self._journal.record(
            NAME,
            "planned",
            plan.step,
            tuple(rid[sid] for sid in shape.decode),
            tuple((rid[sid], count) for sid, count in shape.prefill),
            shape.tokens,
        )
