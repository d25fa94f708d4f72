"""Decoding each row by itself: the same numbers as if it were alone, whoever else decodes.

A matrix product of n rows may round differently from n products of one row, and so may sums over
columns that are padded to the longest row.  Here no row ever shares an operation with another one.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from typing import Any

import mlx.core as mx

from models.mlx.batching import Caches, Row


class SoloBatch:
    """The interface of DecodeBatch over the rows' own caches."""

    def __init__(self) -> None:
        self.ids: list[int] = []
        self.lengths: list[int] = []
        self._rows: list[Caches] = []

    def __len__(self) -> int:
        return len(self.ids)

    @property
    def caches(self) -> Caches:
        """Those of all rows, one after the other."""
        return [cache for row in self._rows for cache in row]

    def forward(self, model: Any, tokens: mx.array) -> mx.array:
        """[B] tokens -> [B, V] logits."""
        rows = [
            model(tokens[row : row + 1, None], cache=caches)[:, -1, :]
            for row, caches in enumerate(self._rows)
        ]
        return rows[0] if len(rows) == 1 else mx.concatenate(rows)

    def caches_of(self, sequence_id: int) -> tuple[Caches, int]:
        row = self.ids.index(sequence_id)
        return self._rows[row], self.lengths[row]

    def advance(self) -> None:
        """The model has been run with one token per row."""
        self.lengths = [length + 1 for length in self.lengths]

    def take_out(self, ids: Collection[int]) -> list[Row]:
        """These rows.  They stay in the batch until :meth:`change`."""
        return [
            Row(sequence_id=one, caches=caches, length=length)
            for one, caches, length in zip(self.ids, self._rows, self.lengths, strict=True)
            if one in ids
        ]

    def change(
        self, *, leave: Collection[int] = (), join: Sequence[Row] = (), poisoned: bool = False
    ) -> None:
        """Remove the rows ``leave`` and add ``join``.  Nobody shares anything to be poisoned."""
        keep = [row for row, sequence_id in enumerate(self.ids) if sequence_id not in leave]
        self._rows = [self._rows[row] for row in keep] + [row.caches for row in join]
        self.lengths = [self.lengths[row] for row in keep] + [row.length for row in join]
        self.ids = [self.ids[row] for row in keep] + [row.sequence_id for row in join]
