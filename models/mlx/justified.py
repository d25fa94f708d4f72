"""Rows of right-justified batch caches: plain ones (mlx-lm's BatchKVCache) and quantised ones.

All rows end in the same column; shorter ones have padding before them.  The functions take the
lengths of rows from the host, so that no value from the device is needed.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise
from typing import Any, Final

import mlx.core as mx

from models.mlx.kv_quant import BatchQuantizedKVCache, SoloQuantizedKVCache
from models.mlx.lm import mlx_lm_utils
from models.mlx.sides import assign, blank, copied, cut

mlx_lm_utils()

from mlx_lm.models.cache import BatchKVCache, KVCache  # noqa: E402

# A reused row may leave this many columns of padding in every row before the batch is rebuilt.
SLACK_COLUMNS: Final = 256
SINGLE: Final = (KVCache, SoloQuantizedKVCache)
JUSTIFIED: Final = (BatchKVCache, BatchQuantizedKVCache)

# Paddings and offsets [B], used by all layers.
Shared = tuple[mx.array, mx.array]


def shared_arrays(lengths: Sequence[int], width: int) -> Shared:
    return mx.array([width - length for length in lengths]), mx.array(list(lengths))


def has_room(batch: Any, longest: int) -> bool:
    """Whether rows of up to ``longest`` tokens fit, and do not leave too much padding."""
    return bool(batch._idx - SLACK_COLUMNS <= longest <= batch._idx)


def single_of(batch: Any, row: int, length: int) -> Any:
    """A copy of one row as a cache of its own."""
    if type(batch) is BatchQuantizedKVCache:
        return batch.row(row, length)
    single = KVCache()
    rows, columns = slice(row, row + 1), slice(batch._idx - length, batch._idx)
    single.keys = copied(batch.keys, rows, columns)
    single.values = copied(batch.values, rows, columns)
    single.offset = length
    return single


def merged(singles: Sequence[Any], lengths: Sequence[int], shared: Shared) -> Any:
    """Caches of single sequences, all of one kind, as a batch."""
    batch = _allocate(singles[0], lengths, shared)
    for place, (single, length) in enumerate(zip(singles, lengths, strict=True)):
        put(batch, place, single, length)
    return batch


def regrouped(
    old: Any, keep: list[int], newcomers: Sequence[Any], lengths: list[int], shared: Shared
) -> Any:
    """The rows ``keep`` of a batch and the newcomers, with no more padding than needed."""
    batch = _allocate(old, lengths, shared)
    new_end, old_end = batch._idx, old._idx
    width = max(lengths[: len(keep)])
    old_columns, new_columns = slice(old_end - width, old_end), slice(new_end - width, new_end)
    for place, first, count in _runs(keep):
        old_rows, new_rows = slice(first, first + count), slice(place, place + count)
        assign(batch.keys, new_rows, new_columns, cut(old.keys, old_rows, old_columns))
        assign(batch.values, new_rows, new_columns, cut(old.values, old_rows, old_columns))
    for place, single in enumerate(newcomers, len(keep)):
        put(batch, place, single, lengths[place])
    return batch


def put(batch: Any, row: int, single: Any, length: int) -> None:
    """Let a sequence of ``length`` tokens take over the columns of a row."""
    assert single.offset == length, "the cache does not hold the tokens of its sequence"
    rows, columns = slice(row, row + 1), slice(batch._idx - length, batch._idx)
    used = slice(0, length)
    assign(batch.keys, rows, columns, cut(single.keys, slice(None), used))
    assign(batch.values, rows, columns, cut(single.values, slice(None), used))


def _runs(rows: list[int]) -> list[tuple[int, int, int]]:
    """Rising row numbers as runs: (place of the first in the list, first row, count)."""
    starts = [
        place for place in range(len(rows)) if not place or rows[place] != rows[place - 1] + 1
    ]
    return [(a, rows[a], b - a) for a, b in pairwise([*starts, len(rows)])]


def _allocate(like: Any, lengths: Sequence[int], shared: Shared) -> Any:
    """Zeros, with room for growth, so that the next step need not copy everything again."""
    batch: Any
    if isinstance(like, (SoloQuantizedKVCache, BatchQuantizedKVCache)):
        batch = BatchQuantizedKVCache([], group_size=like.group_size, bits=like.bits)
    else:
        batch = BatchKVCache([])
    batch._idx = max(lengths)
    columns = (batch._idx // BatchKVCache.step + 1) * BatchKVCache.step
    batch.keys = blank(like.keys, len(lengths), columns)
    batch.values = blank(like.values, len(lengths), columns)
    batch.left_padding, batch.offset = shared
    return batch
