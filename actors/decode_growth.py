"""Leases grow while sequences run; who waits for that, and who has to make room.

A lease is asked to grow a little before it is used up.  A sequence whose lease is used up is
*starved*: it is left out of the plans until its lease has grown.  A refusal counts for one *round*;
a new round begins whenever cache was given back, and everybody may ask again: preempted sequences
first, oldest first, then the others.

While anybody is starved or preempted the DecodeLoop offers no slots, so no newcomer takes what they
wait for: what runs ends at some time, and each of them fits into the budget alone.
"""

from __future__ import annotations

from actors.core.preemption import Candidate, choose_victim
from actors.core.sequence import SequencePhase
from actors.decode_cache import CacheLink, Grown
from actors.decode_row import Row, Slots
from actors.kit.journal import Journal
from actors.limits import Limits
from actors.messages import CacheGrown

NAME = "decode"


class Growth:
    def __init__(self, *, slots: Slots, link: CacheLink, limits: Limits, journal: Journal) -> None:
        self._slots = slots
        self._link = link
        self._limits = limits
        self._journal = journal
        self._round = 0

    @property
    def wanted(self) -> bool:
        """Whether anybody waits for cache."""
        return any(
            row.starved or row.seq.phase is SequencePhase.PREEMPTED
            for row in self._slots.by_id.values()
        )

    def new_round(self) -> None:
        """Cache was given back, or may have been: refusals do not count any more."""
        self._round += 1

    def answered(self, row: Row, answer: Grown) -> None:
        if row.seq.phase is SequencePhase.GONE:
            return
        if not isinstance(answer, CacheGrown):
            return  # ``refused_in`` was set when it asked: a round may have begun since
        row.refused_in = -1
        row.lease_tokens = answer.tokens
        self._journal.record(NAME, "grew", row.seq.request_id, answer.tokens)
        if row.seq.phase is SequencePhase.PREEMPTED:
            row.seq.phase = SequencePhase.PREFILL
            row.spared_until = row.seq.drawn + self._limits.lease_quantum_tokens
            self._journal.record(NAME, "returned", row.seq.request_id)

    def ask_all(self) -> None:
        """Everybody who needs more cache soon asks for it, unless it was refused in this round."""
        rows = list(self._slots.rows())
        for row in rows:
            if row.seq.phase is SequencePhase.PREEMPTED:
                self.ask(row)
        margin = max(1, self._limits.lease_quantum_tokens // 4)
        for row in rows:
            if row.seq.phase is SequencePhase.DECODE:
                row.starved = row.starved and row.seq.tokens > row.lease_tokens
                if row.lease_tokens - row.seq.tokens < margin:
                    self.ask(row)

    def ask(self, row: Row) -> None:
        """Ask for a quantum more than it has, or than a preempted one needs to begin again."""
        if row.asked or row.refused_in == self._round or row.lease_tokens >= row.total_tokens:
            return
        row.refused_in = self._round  # unless the answer is yes
        wish = max(row.lease_tokens, row.seq.tokens) + self._limits.lease_quantum_tokens
        self._link.grow(row, min(row.total_tokens, wish))

    def covers_next(self, row: Row) -> bool:
        """Whether its lease covers one more decode step; otherwise the row is starved."""
        starved = row.seq.tokens > row.lease_tokens
        if starved and not row.starved:
            self._journal.record(NAME, "starved", row.seq.request_id)
        row.starved = starved
        return not starved

    def victim(self, *, stuck: bool) -> tuple[Row, Row] | None:
        """Who is to be preempted, and for whom.  ``stuck``: nobody at all can go on.

        Without ``enable_preemption`` the starved wait until others end; only if nobody can go on
        the newest of the lowest lane is preempted, as everybody would wait for ever.
        """
        rows = [row for row in self._slots.rows() if row.seq.phase is not SequencePhase.GONE]
        starved = [row for row in rows if row.starved]
        if not starved or any(row.asked for row in rows):
            return None
        if not (self._limits.enable_preemption or stuck):
            return None
        policy = self._limits.preemption_policy
        if not self._limits.enable_preemption:
            policy = "lowest-priority"
        chosen = choose_victim(
            [
                Candidate(
                    sequence_id=row.seq.sequence_id,
                    lane=int(row.lane),
                    tokens=row.seq.held,
                    spared=row.seq.drawn < row.spared_until,
                )
                for row in rows
                if row.seq.phase in (SequencePhase.PREFILL, SequencePhase.DECODE)
            ],
            policy,
        )
        return None if chosen is None else (self._slots.by_id[chosen], starved[0])

    def preempt(self, row: Row, needy: Row) -> None:
        """Take the cache of ``row``, which comes back by itself; ``needy`` is the first to ask."""
        seq = row.seq
        self._link.drop(row)
        held, row.starved = seq.held, False
        if seq.resume():
            self._journal.record(NAME, "resumed", seq.request_id)
        seq.preempt()
        self._journal.record(NAME, "preempted", seq.request_id, seq.tokens, held)
        self._link.shrink(row)
        self.new_round()
        if needy is not row:
            self.ask(needy)
