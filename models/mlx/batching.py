"""The decode batch: rows that join and leave the KV caches of mlx-lm at any step.

A sequence outside the batch has caches of its own (prefill, parked).  A batch of one row is just
that sequence's own caches; with more rows mlx-lm's batch caches hold them, right-justified.
Lengths are known on the host, so changing a batch needs no value from the device.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any, Final, Literal

import mlx.core as mx

from models.mlx.lm import mlx_lm_utils

mlx_lm_utils()

from mlx_lm.models.cache import BatchKVCache, CacheList, KVCache, make_prompt_cache  # noqa: E402

# One per layer.  The classes are mlx-lm's, and differ from model to model.
Caches = list[Any]

# A reused row may leave this many columns of padding in every row before the batch is rebuilt.
SLACK_COLUMNS: Final = 256


def new_caches(
    model: Any,
    *,
    max_kv_size: int | None = None,
    kv_bits: int | None = None,
    kv_group_size: int = 64,
) -> Caches:
    return list(make_prompt_cache(model))


def prefix_mode(caches: Caches) -> Literal["blocks", "snapshots", "none"]:
    return "blocks" if all(type(cache) is KVCache for cache in caches) else "snapshots"


def can_batch(caches: Caches) -> bool:
    """Whether mlx-lm can join several of these caches into one.  They must have been used."""
    return all(_can_batch(cache) for cache in caches)


def _can_batch(cache: Any) -> bool:
    if isinstance(cache, CacheList):
        return all(_can_batch(part) for part in cache.caches)
    return hasattr(type(cache), "merge") and hasattr(cache.merge([cache, cache]), "extract")


def arrays_of(caches: Caches) -> list[mx.array]:
    """Everything that must be evaluated for the caches to be complete."""
    found: list[mx.array] = []
    for cache in _leaves(caches):
        for value in vars(cache).values():
            found += [
                item
                for item in (value if isinstance(value, (list, tuple)) else (value,))
                if isinstance(item, mx.array)
            ]
    return found


def share_offsets(caches: Caches) -> None:
    """Let all layers use one array of offsets, after a step in which each made its own.

    They hold the same numbers; with one array each step adds to it once, and whatever is derived
    from it is derived once.
    """
    first = caches[0]
    if type(first) is BatchKVCache:
        for cache in caches[1:]:
            if type(cache) is BatchKVCache:
                cache.offset = first.offset


def remember(caches: Caches) -> Callable[[], None]:
    """A function that puts the caches back to what they are now.

    It takes no copies of their data, but while it exists they cannot be updated in place: drop it
    before evaluating what was built on them since.
    """
    states = [
        (cache, {name: _handle(value) for name, value in vars(cache).items()})
        for cache in _leaves(caches)
    ]

    def restore() -> None:
        for cache, state in states:
            cache.__dict__.update(state)

    return restore


def _handle(value: Any) -> Any:
    """The same values, unaffected by what is assigned to parts of ``value`` later."""
    if isinstance(value, mx.array):
        return copy.copy(value)
    if isinstance(value, list):
        return [_handle(item) for item in value]
    return value


def _leaves(caches: Sequence[Any]) -> Caches:
    """The caches with those inside lists of caches in place of the lists."""
    found: Caches = []
    for cache in caches:
        found += _leaves(cache.caches) if isinstance(cache, CacheList) else [cache]
    return found


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
        if not all(type(cache) is BatchKVCache for cache in self.caches):
            return False
        stay = [length for row, length in enumerate(self.lengths) if row not in gone]
        longest = max([*stay, *(row.length for row in join)])
        width = self.caches[0]._idx
        return bool(width - SLACK_COLUMNS <= longest <= width)

    def _replace(self, gone: list[int], join: Sequence[Row]) -> None:
        for place, row in zip(gone, join, strict=True):
            self.ids[place] = row.sequence_id
            self.lengths[place] = row.length
        width = self.caches[0]._idx
        padding, offset = _paddings(self.lengths, width), mx.array(self.lengths)
        for layer, cache in enumerate(self.caches):
            for place, row in zip(gone, join, strict=True):
                _put(cache, place, row.caches[layer], row.length, width)
            cache.left_padding, cache.offset = padding, offset

    def _rebuild(self, keep: list[int], join: Sequence[Row], lengths: list[int]) -> Caches:
        solo = bool(keep) and len(self.ids) == 1
        layers = range(len(self.caches) if keep else len(join[0].caches))
        shared = _paddings(lengths, max(lengths)), mx.array(lengths)
        rebuilt: Caches = []
        for layer in layers:
            newcomers = [row.caches[layer] for row in join]
            if solo:
                rebuilt.append(_merge([self.caches[layer], *newcomers], lengths, shared))
            elif not keep:
                rebuilt.append(_merge(newcomers, lengths, shared))
            elif type(self.caches[layer]) is BatchKVCache:
                rebuilt.append(_regroup(self.caches[layer], keep, newcomers, lengths, shared))
            else:
                old = self.caches[layer]
                kept = [_extract(old, row, self.lengths[row]) for row in keep]
                rebuilt.append(_merge(kept + newcomers, lengths, shared))
        return rebuilt


Shared = tuple[mx.array, mx.array]


def _paddings(lengths: list[int], width: int) -> mx.array:
    return mx.array([width - length for length in lengths])


def _extract(cache: Any, row: int, length: int) -> Any:
    """One row as a cache of its own."""
    if type(cache) is not BatchKVCache:
        return cache.extract(row)
    single = KVCache()
    columns = slice(cache._idx - length, cache._idx)
    single.keys = mx.contiguous(cache.keys[row : row + 1, :, columns])
    single.values = mx.contiguous(cache.values[row : row + 1, :, columns])
    single.offset = length
    return single


def _merge(singles: Caches, lengths: list[int], shared: Shared) -> Any:
    if not all(type(single) is KVCache for single in singles):
        return singles[0].merge(singles)
    batch = _allocate(singles[0], lengths, shared)
    for place, (single, length) in enumerate(zip(singles, lengths, strict=True)):
        _put(batch, place, single, length, batch._idx)
    return batch


def _regroup(
    old: Any, keep: list[int], newcomers: Caches, lengths: list[int], shared: Shared
) -> Any:
    """The rows ``keep`` of a batch cache and the newcomers, with no more padding than needed."""
    batch = _allocate(old, lengths, shared)
    new_end, old_end = batch._idx, old._idx
    width = max(lengths[: len(keep)])
    for place, first, count in _runs(keep):
        _assign(
            batch,
            slice(place, place + count),
            slice(new_end - width, new_end),
            old.keys[first : first + count, :, old_end - width : old_end],
            old.values[first : first + count, :, old_end - width : old_end],
        )
    for place, single in enumerate(newcomers, len(keep)):
        _put(batch, place, single, lengths[place], new_end)
    return batch


def _runs(rows: list[int]) -> list[tuple[int, int, int]]:
    """Rising row numbers as runs: (place of the first in the list, first row, count)."""
    starts = [
        place for place in range(len(rows)) if not place or rows[place] != rows[place - 1] + 1
    ]
    return [(a, rows[a], b - a) for a, b in pairwise([*starts, len(rows)])]


def _allocate(like: Any, lengths: list[int], shared: Shared) -> Any:
    """Zeros: what padding holds is multiplied by zero weights, so it must be finite.

    There is room for growth, so that the next step need not copy everything again.
    """
    batch = BatchKVCache([])
    width = max(lengths)
    columns = (width // BatchKVCache.step + 1) * BatchKVCache.step
    rows = len(lengths)
    batch.keys = mx.zeros((rows, like.keys.shape[1], columns, like.keys.shape[3]), like.keys.dtype)
    batch.values = mx.zeros(
        (rows, like.values.shape[1], columns, like.values.shape[3]), like.values.dtype
    )
    batch.left_padding, batch.offset = shared
    batch._idx = width
    return batch


def _put(batch: Any, place: int, single: Any, length: int, end: int) -> None:
    assert single.offset == length, "the cache does not hold the tokens of its sequence"
    _assign(
        batch,
        slice(place, place + 1),
        slice(end - length, end),
        single.keys[:, :, :length],
        single.values[:, :, :length],
    )


def _assign(batch: Any, rows: slice, columns: slice, keys: mx.array, values: mx.array) -> None:
    batch.keys[rows, :, columns] = keys
    batch.values[rows, :, columns] = values
