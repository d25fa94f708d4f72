"""What the DecodeLoop keeps per occupied slot, and its counters."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Literal

from actors.core.loop_detector import LoopDetector
from actors.core.sequence import Sequence, SequencePhase
from actors.core.thinking_budget import ThinkingBudget
from actors.delivery import Transcript
from actors.events import Finished, FinishReason, Timings
from actors.messages import CacheLease, Fork, Queued, StartSequence
from actors.ports import SlotStatus
from actors.requests import Priority
from actors.token_sender import TokenSender
from models.engine import KeptPrefix, StepPlan, StepResult
from models.text_model import TextModel

log = logging.getLogger("mlxcel.decode")


@dataclass(slots=True)
class DecodeCounters:
    """Lives as long as the server, across restarts.  Ids and step numbers are never used twice."""

    next_sequence_id: int = 1
    next_step: int = 1
    started: int = 0
    completed: int = 0
    cancelled: int = 0
    failed: int = 0
    prefill_tokens: int = 0  # evaluated
    decode_tokens: int = 0  # drawn
    decode_steps: int = 0
    prefill_chunks: int = 0
    cached_tokens: int = 0  # of prompts, not evaluated because they were kept
    preempted: int = 0
    next_fork_handle: int = -1

    def new_fork_handle(self) -> int:
        """Handles below 0 are the decode loop's own; the CacheManager's are not negative."""
        self.next_fork_handle -= 1
        return self.next_fork_handle + 1

    def note_step(self, plan: StepPlan, result: StepResult) -> None:
        self.prefill_tokens += sum(len(chunk.tokens) for chunk in plan.prefill)
        self.prefill_chunks += len(plan.prefill)
        self.decode_tokens += len(result.tokens)
        self.decode_steps += bool(plan.decode)


def thinking_budget(queued: Queued, text: TextModel) -> ThinkingBudget | None:
    """None when the request sets no bound or the model has no reasoning blocks."""
    budget, markers = queued.request.thinking_budget, text.thinking
    if budget is None or markers is None:
        return None
    return ThinkingBudget(
        open_ids=markers.open_ids,
        close_ids=markers.close_ids,
        budget=budget,
        starts_open=markers.opened_by(queued.prompt_ids),
    )


@dataclass(slots=True, kw_only=True)
class Row:
    """One occupied slot.  ``room`` is what its channel had room for at the last reaping.

    ``lease_tokens`` may be held now, ``total_tokens`` is the most that it can ever need.
    ``prefix`` is what it may begin with; ``cached_tokens`` of the prompt were not evaluated for it.
    """

    seq: Sequence
    lease: CacheLease
    lane: Priority
    lease_tokens: int
    total_tokens: int
    donates: bool
    fork: Fork | None
    prefix: KeptPrefix | None = None
    cached_tokens: int = 0
    snapshot_kept: bool = False  # the one that its lease asked for
    asked: bool = False  # the lease is to grow; the answer is on its way
    refused_in: int = -1  # the round (see decode_growth) in which the answer was no
    starved: bool = False  # it cannot go on before its lease grows
    spared_until: int = 0  # generated tokens before which others are preempted first
    sender: TokenSender
    transcript: Transcript
    arrived_s: float
    deadline_s: float
    first_token_s: float | None = None
    room: int = 0

    @classmethod
    def open(cls, start: StartSequence, sequence_id: int, text: TextModel, now: float) -> Row:
        queued = start.queued
        request = queued.request
        seq = Sequence(
            sequence_id=sequence_id,
            request_id=queued.sender.request_id,
            slot=start.slot,
            prompt_ids=queued.prompt_ids,
            max_tokens=queued.max_tokens,
            sampling=queued.sampling,
            eos_ids=frozenset() if request.ignore_eos else text.eos_ids,
            started_s=now,
            min_tokens=request.min_tokens,
            loop=None if request.loop is None else LoopDetector(request.loop),
            thinking=thinking_budget(queued, text),
        )
        return cls(
            seq=seq,
            lease=start.lease,
            lane=queued.lane,
            lease_tokens=start.lease.tokens,
            total_tokens=queued.total_tokens,
            donates=queued.cache_root is not None,
            fork=queued.fork,
            sender=queued.sender,
            transcript=Transcript(text.decoder(), request.stop),
            arrived_s=queued.arrived_s,
            deadline_s=queued.deadline_s,
        )

    def note_token(self, now: float) -> None:
        if self.first_token_s is None:
            self.first_token_s = now

    def note_engine_failure(self, reason: str) -> None:
        log.error("request %s lost by the engine: %s", self.seq.request_id, reason)

    def finished(self, reason: FinishReason | None, now: float) -> Finished:
        """``reason`` None: only a stop string ended it."""
        first_s = now if self.first_token_s is None else self.first_token_s
        timings = Timings(
            queued_s=self.seq.started_s - self.arrived_s,
            prefill_s=first_s - self.seq.started_s,
            decode_s=now - first_s,
        )
        return self.transcript.finished(
            reason or FinishReason.STOP_STRING,
            len(self.seq.prompt_ids),
            timings,
            self.cached_tokens,
        )


@dataclass(slots=True)
class Slots:
    """Who sits where.  Iteration is in start order, so that prompts are served first come first."""

    count: int
    by_id: dict[int, Row] = field(
        default_factory=dict
    )  # ids grow, so insertion order = start order

    @property
    def active(self) -> int:
        return len(self.by_id)

    def rows(self) -> Iterator[Row]:
        """A snapshot: rows may leave while the caller iterates."""
        return iter(tuple(self.by_id.values()))

    def seat(self, row: Row) -> None:
        assert len(self.by_id) < self.count, "more sequences than slots"
        assert all(other.seq.slot != row.seq.slot for other in self.by_id.values())
        self.by_id[row.seq.sequence_id] = row

    def free(self, row: Row) -> None:
        del self.by_id[row.seq.sequence_id]

    def status(self) -> tuple[SlotStatus, ...]:
        taken = {row.seq.slot: row.seq for row in self.by_id.values()}
        return tuple(_slot_status(slot, taken.get(slot)) for slot in range(self.count))


def _slot_status(slot: int, seq: Sequence | None) -> SlotStatus:
    if seq is None:
        return SlotStatus(slot=slot, request_id=None, state="idle")
    return SlotStatus(slot=slot, request_id=seq.request_id, state=state_of(seq))


def state_of(seq: Sequence) -> Literal["prefill", "decode"]:
    """Who waits for another's prefill counts as prefilling."""
    return "prefill" if seq.phase in (SequencePhase.PREFILL, SequencePhase.FORKED) else "decode"
