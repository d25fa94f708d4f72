"""The decode batch: rows that join and leave the KV caches of mlx-lm at any step.

A sequence outside the batch has caches of its own (prefill, parked).  A batch of one row is just
that sequence's own caches; with more rows mlx-lm's batch caches hold them, right-justified.
Lengths are known on the host, so changing a batch needs no value from the device.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass
from typing import Any

import mlx.core as mx

from models.mlx import masks
from models.mlx.justified import (
    JUSTIFIED,
    SINGLE,
    SLACK_COLUMNS,
    Shared,
    has_room,
    merged,
    put,
    regrouped,
    shared_arrays,
    single_of,
)
from models.mlx.kv_kinds import (
    Caches,
    arrays_of,
    can_batch,
    kinds_of,
    leaves,
    new_caches,
    prefix_mode,
)
from models.mlx.kv_quant import UnsupportedCaches
from models.mlx.kv_window import BatchWindowKVCache

__all__ = [
    "Caches",
    "DecodeBatch",
    "Row",
    "SLACK_COLUMNS",
    "UnsupportedCaches",
    "arrays_of",
    "can_batch",
    "kinds_of",
    "new_caches",
    "prefix_mode",
    "remember",
    "share_offsets",
]

masks.install()


def share_offsets(caches: Caches) -> None:
    """Let all layers use one array of offsets, after a step in which each made its own.

    They hold the same numbers; with one array each step adds to it once, and whatever is derived
    from it is derived once.
    """
    first = caches[0]
    if type(first) in (*JUSTIFIED, BatchWindowKVCache):
        for cache in caches[1:]:
            if type(cache) is type(first):
                cache.offset = first.offset


def remember(caches: Caches) -> Callable[[], None]:
    """A function that puts the caches back to what they are now.

    It takes no copies of their data, but while it exists they cannot be updated in place: drop it
    before evaluating what was built on them since.
    """
    states = [
        (cache, {name: _handle(value) for name, value in vars(cache).items()})
        for cache in leaves(caches)
    ]

    def restore() -> None:
        for cache, state in states:
            cache.__dict__.update(state)

    return restore


def _handle(value: Any) -> Any:
    """The same values, unaffected by what is assigned to parts of ``value`` later."""
    if isinstance(value, mx.array):
        return copy.copy(value)
    if isinstance(value, (list, tuple)):
        return type(value)(_handle(item) for item in value)
    return value


@dataclass(slots=True, kw_only=True)
class Row:
    """A sequence outside the batch: its caches and how many tokens they hold."""

    sequence_id: int
    caches: Caches
    length: int


class DecodeBatch:
    """``ids`` and ``lengths`` (cached tokens) by row.

    ``caches`` is what the model takes; it is [] while the batch is empty.
    """

    def __init__(self) -> None:
        self.ids: list[int] = []
        self.lengths: list[int] = []
        self.caches: Caches = []

    def __len__(self) -> int:
        return len(self.ids)

    def advance(self) -> None:
        """The model has been run with one token per row."""
        self.lengths = [length + 1 for length in self.lengths]

    def take_out(self, ids: Collection[int]) -> list[Row]:
        """Copies of these rows, evaluated.  They stay in the batch until :meth:`change`."""
        rows = [
            Row(sequence_id=self.ids[row], caches=self._extract(row), length=self.lengths[row])
            for row in range(len(self.ids))
            if self.ids[row] in ids
        ]
        # Unevaluated copies would keep the whole batch alive, and keep it from growing in place.
        mx.eval([arrays_of(row.caches) for row in rows])
        return rows

    def change(
        self, *, leave: Collection[int] = (), join: Sequence[Row] = (), poisoned: bool = False
    ) -> None:
        """Remove the rows ``leave`` and add ``join``, all at once.

        ``poisoned``: a leaving row holds values that are not finite.  They must not stay behind in
        the padding of another row, where a weight of zero would not silence them.
        """
        if not leave and not join:
            return
        gone = [row for row, sequence_id in enumerate(self.ids) if sequence_id in leave]
        keep = [row for row, sequence_id in enumerate(self.ids) if sequence_id not in leave]
        if self._fits(gone, join, poisoned):
            self._replace(gone, join)
            return
        lengths = [self.lengths[row] for row in keep] + [row.length for row in join]
        if not lengths:
            self.caches = []
        elif len(lengths) == 1:
            self.caches = join[0].caches if join else self._extract(keep[0])
        else:
            self.caches = self._rebuild(keep, join, lengths)
        self.ids = [self.ids[row] for row in keep] + [row.sequence_id for row in join]
        self.lengths = lengths

    def _extract(self, row: int) -> Caches:
        if len(self.ids) == 1:
            return self.caches
        return [_extract(cache, row, self.lengths[row]) for cache in self.caches]

    def _fits(self, gone: list[int], join: Sequence[Row], poisoned: bool) -> bool:
        """Whether the newcomers can take over the places of the leaving rows, one for one.

        That copies the newcomers only, where a rebuild copies every row of the batch.
        """
        if len(gone) != len(join) or len(self.ids) == 1 or poisoned:
            return False
        stay = [length for row, length in enumerate(self.lengths) if row not in gone]
        longest = max([*stay, *(row.length for row in join)])
        return all(_has_room(cache, longest) for cache in self.caches)

    def _replace(self, gone: list[int], join: Sequence[Row]) -> None:
        for place, row in zip(gone, join, strict=True):
            self.ids[place] = row.sequence_id
            self.lengths[place] = row.length
        shared: Shared | None = None
        for layer, cache in enumerate(self.caches):
            if isinstance(cache, BatchWindowKVCache):
                for place, row in zip(gone, join, strict=True):
                    cache.put(place, row.caches[layer])
                cache.set_lengths(self.lengths, mx.array(self.lengths))
                continue
            for place, row in zip(gone, join, strict=True):
                put(cache, place, row.caches[layer], row.length)
            # All layers that are right-justified are equally wide.
            shared = shared or shared_arrays(self.lengths, cache._idx)
            cache.left_padding, cache.offset = shared

    def _rebuild(self, keep: list[int], join: Sequence[Row], lengths: list[int]) -> Caches:
        shared = shared_arrays(lengths, max(lengths))
        layers = range(len(self.caches) if keep else len(join[0].caches))
        return [self._rebuilt_layer(layer, keep, join, lengths, shared) for layer in layers]

    def _rebuilt_layer(
        self, layer: int, keep: list[int], join: Sequence[Row], lengths: list[int], shared: Shared
    ) -> Any:
        newcomers = [row.caches[layer] for row in join]
        if not keep:
            return _merge(newcomers, lengths, shared)
        old = self.caches[layer]
        if len(self.ids) == 1:
            return _merge([old, *newcomers], lengths, shared)
        if type(old) in JUSTIFIED:
            return regrouped(old, keep, newcomers, lengths, shared)
        if isinstance(old, BatchWindowKVCache):
            return old.regrouped(keep, lengths[: len(keep)], newcomers)
        kept = [_extract(old, row, self.lengths[row]) for row in keep]
        return _merge(kept + newcomers, lengths, shared)


def _has_room(batch: Any, longest: int) -> bool:
    """Whether a row of up to ``longest`` tokens can take the place of another in this cache."""
    if isinstance(batch, BatchWindowKVCache):
        return batch.has_room(longest)
    return type(batch) in JUSTIFIED and has_room(batch, longest)


def _extract(batch: Any, row: int, length: int) -> Any:
    """One row as a cache of its own."""
    if type(batch) in JUSTIFIED:
        return single_of(batch, row, length)
    if isinstance(batch, BatchWindowKVCache):
        return batch.row(row, length)
    return batch.extract(row)


def _merge(singles: Caches, lengths: list[int], shared: Shared) -> Any:
    if type(singles[0]) in SINGLE:
        return merged(singles, lengths, shared)
    return singles[0].merge(singles)
