"""The running decode batch: rows join and leave at any step, parked rows keep their caches."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import cast

import mlx.core as mx

from models.mlx.kv import Caches, extract, merge_single, regroup
from models.mlx.sampler import BatchSampler
from models.sampling import SamplingParams

#: token ids [B, n] and caches -> logits [B, n, V]
Forward = Callable[[mx.array, Caches], mx.array]


@dataclass(slots=True, kw_only=True)
class Row:
    """A sequence that decodes.

    ``length`` tokens are in its cache; ``last_token`` is drawn but not yet in it; ``drawn`` counts
    the draws.  ``caches`` is None while the row is part of the batch.
    """

    sequence_id: int
    sampling: SamplingParams
    caches: Caches | None
    length: int
    last_token: int
    drawn: int


class DecodeBatch:
    """Rows in batch order, and one set of caches for all of them."""

    def __init__(self, forward: Forward, vocab_size: int) -> None:
        self._forward = forward
        self._vocab = vocab_size
        self._rows: list[Row] = []
        self._caches: Caches = []
        self._sampler = BatchSampler([], vocab_size)

    def forget(self, sequence_ids: set[int]) -> None:
        """Rows that are gone for good: their part of the caches is freed with the next step."""
        self._leaving(lambda row: row.sequence_id in sequence_ids, keep_caches=False)

    def step(self, rows: Sequence[Row]) -> list[int]:
        """Decode one token for each of ``rows``, which become the batch.

        Rows of the batch that are not among them are parked: their caches move into the row.
        Returns the drawn ids in the order of ``rows``, -1 for a row whose logits hold a NaN (its
        state is then unusable).
        """
        self._compose(rows)
        batch = self._rows
        tokens = mx.array([[row.last_token] for row in batch], mx.int32)
        logits = self._forward(tokens, self._caches)[:, -1, :]
        drawn = self._sampler.draw(logits, [row.drawn for row in batch])
        mx.eval(drawn)
        values = cast(list[int], drawn.tolist())
        for row, token in zip(batch, values, strict=True):
            row.length += 1
            row.drawn += 1
            row.last_token = token
        return [row.last_token for row in rows]

    def clear(self) -> None:
        self._rows = []
        self._caches = []

    # Composition ---------------------------------------------------------------------------------

    def _compose(self, rows: Sequence[Row]) -> None:
        wanted = {row.sequence_id for row in rows}
        if any(row.sequence_id not in wanted for row in self._rows):
            self._leaving(lambda row: row.sequence_id not in wanted, keep_caches=True)
        joining = [row for row in rows if row.caches is not None]
        if joining:
            self._joining(joining)

    def _leaving(self, leaves: Callable[[Row], bool], *, keep_caches: bool) -> None:
        staying = [index for index, row in enumerate(self._rows) if not leaves(row)]
        if len(staying) == len(self._rows):
            return
        if keep_caches:
            for index, row in enumerate(self._rows):
                if index not in staying:
                    row.caches = self._single(index)
        rows = [self._rows[index] for index in staying]
        if not rows:
            self._caches = []
        elif len(rows) == 1:
            self._caches = self._single(staying[0])
        else:
            self._caches = regroup(self._caches, staying, [r.length for r in rows], [], [])
        self._recomposed(rows)

    def _single(self, index: int) -> Caches:
        if len(self._rows) == 1:
            return self._caches
        return extract(self._caches, index, self._rows[index].length)

    def _joining(self, joining: list[Row]) -> None:
        parts = [row.caches for row in joining if row.caches is not None]
        lengths = [row.length for row in joining]
        rows = [*self._rows, *joining]
        if len(self._rows) > 1:
            kept = [row.length for row in self._rows]
            self._caches = regroup(self._caches, range(len(kept)), kept, parts, lengths)
        else:
            if self._rows:
                parts, lengths = [self._caches, *parts], [self._rows[0].length, *lengths]
            self._caches = parts[0] if len(parts) == 1 else merge_single(parts, lengths)
        for row in joining:
            row.caches = None
        self._recomposed(rows)

    def _recomposed(self, rows: list[Row]) -> None:
        self._rows = rows
        self._sampler = BatchSampler([row.sampling for row in rows], self._vocab)
