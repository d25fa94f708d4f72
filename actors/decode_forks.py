"""How a sequence begins: on its own, from the prompt cache, or from another choice's snapshot."""

from __future__ import annotations

from actors.core.forks import ForkBook
from actors.core.sequence import SequencePhase
from actors.decode_row import DecodeCounters, Row, Slots
from actors.kit.journal import Journal
from models.engine import KeptPrefix

NAME = "decode"


class Beginnings:
    """Decides it for each row, and tells the rows that wait when their snapshot is there."""

    def __init__(self, slots: Slots, counters: DecodeCounters, journal: Journal) -> None:
        self._slots = slots
        self._counters = counters
        self._journal = journal
        self.book = ForkBook()

    def enter(self, row: Row) -> None:
        """``row`` has not been in any plan yet."""
        seq, fork = row.seq, row.fork
        before_last = len(seq.prompt_ids) - 1
        known = 0 if row.prefix is None else row.prefix.tokens
        seq.keep_as = row.lease.snapshot if 0 < before_last != known else None
        if fork is None or known == before_last:
            if fork is not None:
                self.book.opened(fork.fork_id, seq.request_id)
            self._open(row, row.prefix, known)
        elif not self.book.knows(fork.fork_id):
            owned = seq.keep_as is None
            if owned:
                seq.keep_as = self._counters.new_fork_handle()
            assert seq.keep_as is not None
            self.book.lead(
                fork.fork_id,
                seq.sequence_id,
                handle=seq.keep_as,
                owned=owned,
                over={one.request_id: one.is_finished for one in fork.senders},
                cached_tokens=known,
            )
            self.book.opened(fork.fork_id, seq.request_id)
            self._open(row, row.prefix, known)
        else:
            seq.keep_as = None
            row.cached_tokens = self.book.cached_tokens(fork.fork_id)
            handle = self.book.handle(fork.fork_id)
            if handle is not None:
                self._open_fork(row, handle)
                return
            seq.phase = SequencePhase.FORKED
            self.book.wait(fork.fork_id, seq.sequence_id)
            self._journal.record(NAME, "fork_wait", seq.request_id)

    def _open(self, row: Row, prefix: KeptPrefix | None, cached_tokens: int) -> None:
        row.seq.phase = SequencePhase.PREFILL
        row.seq.open_from(prefix)
        row.cached_tokens = cached_tokens
        if prefix is not None:
            self._journal.record(NAME, "prefix", row.seq.request_id, prefix.tokens)

    def _open_fork(self, row: Row, handle: int) -> None:
        """All but the last token of the prompt come from the other choice."""
        prefix = KeptPrefix(handles=(handle,), tokens=len(row.seq.prompt_ids) - 1)
        self._open(row, prefix, row.cached_tokens)

    def evaluated(self, row: Row, snapshot: bool) -> None:
        """A chunk of ``row`` was evaluated, and perhaps a snapshot taken after it."""
        seq, fork = row.seq, row.fork
        if snapshot:
            row.snapshot_kept = seq.keep_as == row.lease.snapshot
        if fork is None:
            return
        if snapshot and self.book.knows(fork.fork_id):
            assert seq.keep_as is not None
            for sid in self.book.taken(fork.fork_id, seq.sequence_id):
                self._open_fork(self._slots.by_id[sid], seq.keep_as)
        elif not snapshot:
            self.book.opened(fork.fork_id, seq.request_id)

    def leave(self, row: Row) -> None:
        """``row`` is over or loses its cache; if others waited for it, the next one leads."""
        fork = row.fork
        if fork is None:
            return
        self.book.opened(fork.fork_id, row.seq.request_id)
        followers = self.book.leave(fork.fork_id, row.seq.sequence_id)
        if followers:
            self._journal.record(NAME, "fork_lost", row.seq.request_id)
        for sid in followers:
            self.enter(self._slots.by_id[sid])
