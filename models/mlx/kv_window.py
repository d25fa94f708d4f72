"""KV caches of limited size: the first tokens of a sequence and a window of its last ones.

A cache of ``max_size`` columns holds the first ``keep`` tokens and the last W = max_size - keep.
The token at position p is cached in column p while p < max_size, then in column
keep + (p - keep) mod W, over the token that falls out of the window.  A query at position q sees
the keys at positions k <= q with k < keep or k > q - W, whatever the prompt's chunks were.

This is what mlx-lm's RotatingKVCache(max_size, keep) does while it decodes.  It is not used because
its batch form forgets ``keep``, and because in chunks that reach over the end of the window it
hides the first tokens, so that the result depends on the sizes of the chunks.

In a batch every row has its own column to write next, so rows join and leave at any point of the
rotation without being moved.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Final

import mlx.core as mx

from models.mlx.lm import mlx_lm_utils
from models.mlx.sides import assign, blank, columns_of, copied, cut, with_room

mlx_lm_utils()

from mlx_lm.models.cache import create_attention_mask  # noqa: E402

#: Attention leans on the first few tokens; without them a model degenerates (arXiv 2309.17453).
KEEP: Final = 4
STEP: Final = 256


class WindowKVCache:
    """One sequence.  ``offset`` tokens have been cached, min(offset, max_size) are still there."""

    def __init__(self, max_size: int, keep: int = KEEP) -> None:
        if not 0 <= keep < max_size:
            raise ValueError(f"a KV cache of {max_size} tokens cannot keep the first {keep}")
        self.max_size = max_size
        self.keep = keep
        self.keys: Any = None
        self.values: Any = None
        self.offset = 0

    def update_and_fetch(self, keys: mx.array, values: mx.array) -> tuple[mx.array, mx.array]:
        """keys [1, H, N, D], values [1, H, N, E]; the columns that :meth:`make_mask` is for.

        A chunk that overwrites columns is appended to them instead: its first tokens see what its
        last ones replace.
        """
        start, count = self.offset, keys.shape[2]
        used, needed = self.size(), min(start + count, self.max_size)
        self.keys = _grown(self.keys, keys, used, needed, self.max_size)
        self.values = _grown(self.values, values, used, needed, self.max_size)
        self.offset += count
        if count > 1 and self.offset > self.max_size:
            seen = tuple(
                mx.concatenate([cut(old, slice(None), slice(0, used)), new], axis=2)
                for old, new in ((self.keys, keys), (self.values, values))
            )
            self._store(start, keys, values)
            return seen[0], seen[1]
        self._store(start, keys, values)
        return self.keys_and_values()

    def _store(self, start: int, keys: mx.array, values: mx.array) -> None:
        for first, last in _ranges(start, self.offset, self.max_size, self.keep):
            column = _column(first, self.max_size, self.keep)
            columns, new = slice(column, column + last - first), slice(first - start, last - start)
            assign(self.keys, slice(None), columns, keys[:, :, new])
            assign(self.values, slice(None), columns, values[:, :, new])

    def keys_and_values(self) -> tuple[mx.array, mx.array]:
        """What is still there, in the order of the columns."""
        used = slice(0, self.size())
        return cut(self.keys, slice(None), used), cut(self.values, slice(None), used)

    def make_mask(
        self, N: int, window_size: int | None = None, return_array: bool = False
    ) -> mx.array | str | None:
        """For the next ``N`` tokens; ``window_size`` narrows what they see beyond the window."""
        end = self.offset + N
        if end <= self.max_size:
            mask: mx.array | str | None = create_attention_mask(
                N, self.offset, return_array, window_size
            )
            return mask
        if N > 1:
            new = mx.arange(self.offset, end)
            old = self._positions(self.offset)
            return self._visible(mx.concatenate([old, new]), new[:, None], window_size)
        if window_size is None:
            return None
        return self._visible(self._positions(end), mx.array([[self.offset]]), window_size)

    def _positions(self, end: int) -> mx.array:
        """Which token each column holds after ``end`` tokens."""
        return positions(min(end, self.max_size), end, self.max_size, self.keep)

    def _visible(self, keys: mx.array, queries: mx.array, window_size: int | None) -> mx.array:
        return visible(keys, queries, self.max_size - self.keep, self.keep, window_size)

    def size(self) -> int:
        return min(self.offset, self.max_size)

    def empty(self) -> bool:
        return self.keys is None

    def is_trimmable(self) -> bool:
        """Only while nothing has been overwritten."""
        return self.offset <= self.max_size

    def trim(self, n: int) -> int:
        n = min(self.offset, n)
        self.offset -= n
        return n

    @property
    def nbytes(self) -> int:
        return 0 if self.keys is None else int(self.keys.nbytes + self.values.nbytes)

    @property
    def state(self) -> Any:
        return self.keys, self.values, self.offset, self.max_size, self.keep

    @state.setter
    def state(self, state: Any) -> None:
        self.keys, self.values, self.offset, self.max_size, self.keep = state

    @classmethod
    def merge(cls, caches: Sequence[WindowKVCache]) -> BatchWindowKVCache:
        return BatchWindowKVCache.merge(caches)


class BatchWindowKVCache:
    """Several sequences; each row is laid out as it would be alone.

    ``offset`` (tokens that have been cached) is an array [B].  ``_longest`` is at least the largest
    of them; with ``max_size`` it bounds the used columns.  Decoding only: one token per row at a
    time.
    """

    def __init__(self, max_size: int, keep: int) -> None:
        self.max_size = max_size
        self.keep = keep
        self.keys: Any = None
        self.values: Any = None
        self.offset: mx.array = mx.array([])
        self._longest = 0

    def update_and_fetch(self, keys: mx.array, values: mx.array) -> tuple[mx.array, mx.array]:
        """keys [B, H, 1, D], values [B, H, 1, E]; the columns that :meth:`make_mask` is for."""
        assert keys.shape[2] == 1, "rows of a window cache decode one token at a time"
        used = self.size()
        self._longest += 1
        window = self.max_size - self.keep
        turned = self.keep + (self.offset - self.keep) % window
        columns = mx.where(self.offset < self.max_size, self.offset, turned).reshape(-1, 1, 1, 1)
        self.keys = _grown(self.keys, keys, used, self.size(), self.max_size)
        self.values = _grown(self.values, values, used, self.size(), self.max_size)
        self.keys = mx.put_along_axis(self.keys, columns, keys, axis=2)
        self.values = mx.put_along_axis(self.values, columns, values, axis=2)
        self.offset = self.offset + 1
        return self.keys_and_values()

    def keys_and_values(self) -> tuple[mx.array, mx.array]:
        used = slice(0, self.size())
        return cut(self.keys, slice(None), used), cut(self.values, slice(None), used)

    def make_mask(
        self, N: int, window_size: int | None = None, return_array: bool = False
    ) -> mx.array:
        """[B, 1, 1, L] for the next token of each row."""
        assert N == 1, "rows of a window cache decode one token at a time"
        queries = self.offset.reshape(-1, 1, 1, 1)
        columns = min(self._longest + 1, self.max_size)
        if window_size is None:
            return mx.arange(columns) <= queries
        keys = positions(columns, queries + 1, self.max_size, self.keep)
        return visible(keys, queries, self.max_size - self.keep, self.keep, window_size)

    def size(self) -> int:
        """Used columns."""
        return min(self._longest, self.max_size)

    def empty(self) -> bool:
        return self.keys is None

    def is_trimmable(self) -> bool:
        return False

    @property
    def nbytes(self) -> int:
        return 0 if self.keys is None else int(self.keys.nbytes + self.values.nbytes)

    @classmethod
    def merge(cls, caches: Sequence[WindowKVCache]) -> BatchWindowKVCache:
        """Used caches of single sequences with the same limits."""
        if len({(cache.max_size, cache.keep) for cache in caches}) > 1:
            raise ValueError("caches of different sizes cannot be joined")
        batch = cls(caches[0].max_size, caches[0].keep)
        batch._allocate(caches[0], [cache.offset for cache in caches])
        for row, cache in enumerate(caches):
            batch.put(row, cache)
        return batch

    def regrouped(
        self, rows: Sequence[int], lengths: Sequence[int], join: Sequence[WindowKVCache]
    ) -> BatchWindowKVCache:
        """The rows ``rows``, which hold ``lengths`` tokens, and the newcomers, in a new cache."""
        batch = BatchWindowKVCache(self.max_size, self.keep)
        batch._allocate(self, [*lengths, *(cache.offset for cache in join)])
        if rows:
            places, columns = slice(0, len(rows)), slice(0, min(max(lengths), self.max_size))
            kept = mx.array(list(rows))
            assign(batch.keys, places, columns, cut(self.keys, kept, columns))
            assign(batch.values, places, columns, cut(self.values, kept, columns))
        for row, cache in enumerate(join, len(rows)):
            batch.put(row, cache)
        return batch

    def _allocate(self, like: Any, lengths: list[int]) -> None:
        self.set_lengths(lengths, mx.array(lengths))
        columns = _room(self.size() + 1, self.max_size)
        self.keys = blank(like.keys, len(lengths), columns)
        self.values = blank(like.values, len(lengths), columns)

    def has_room(self, longest: int) -> bool:
        """Whether every row may hold this many tokens without another allocation."""
        return bool(min(longest, self.max_size) <= columns_of(self.keys))

    def set_lengths(self, lengths: Sequence[int], offset: mx.array) -> None:
        """``lengths`` of all rows, and the same as an array."""
        self._longest, self.offset = max(lengths), offset

    def put(self, row: int, single: WindowKVCache) -> None:
        """Let ``single`` take over the columns of a row; :meth:`set_lengths` has to follow."""
        keys, values = single.keys_and_values()
        place, columns = slice(row, row + 1), slice(0, columns_of(keys))
        assign(self.keys, place, columns, keys)
        assign(self.values, place, columns, values)

    def filter(self, batch_indices: Any) -> None:
        """Keep these rows only."""
        rows = mx.array(batch_indices)
        self.keys, self.values = self.keys[rows], self.values[rows]
        self.offset = self.offset[rows]

    def extend(self, other: BatchWindowKVCache) -> None:
        """Add the rows of ``other``, a used cache of the same size."""
        self._longest = max(self._longest, other._longest)
        for name in ("keys", "values"):
            mine, theirs = getattr(self, name), getattr(other, name)
            columns = max(columns_of(mine), columns_of(theirs))
            sides = [_widened(mine, columns), _widened(theirs, columns)]
            setattr(self, name, mx.concatenate(sides))
        self.offset = mx.concatenate([self.offset, other.offset])

    def extract(self, idx: int) -> WindowKVCache:
        """A copy of one row.  Waits for the offsets."""
        length: Any = self.offset[idx].item()
        return self.row(idx, length)

    def row(self, idx: int, length: int) -> WindowKVCache:
        """A copy of one row, which has cached ``length`` tokens."""
        single = WindowKVCache(self.max_size, self.keep)
        rows, columns = slice(idx, idx + 1), slice(0, min(length, self.max_size))
        single.keys = copied(self.keys, rows, columns)
        single.values = copied(self.values, rows, columns)
        single.offset = length
        return single


def positions(columns: int, end: Any, max_size: int, keep: int) -> mx.array:
    """The position of the token in each of the first ``columns``, after ``end`` tokens.

    ``end`` may be an array that broadcasts against [columns].  Columns that were never written get
    a position behind ``end``, or one that they would have if they had been.
    """
    column = mx.arange(columns)
    last = end - 1
    turned = last - (last - column) % (max_size - keep)
    return mx.where((column < keep) | (last < max_size), column, turned)


def visible(
    keys: mx.array, queries: mx.array, window: int, keep: int, narrower: int | None
) -> mx.array:
    """Whether a query at one position sees a key at another; the two broadcast."""
    seen = (keys <= queries) & ((keys < keep) | (keys > queries - window))
    return seen if narrower is None else seen & (keys > queries - narrower)


def _ranges(start: int, end: int, max_size: int, keep: int) -> list[tuple[int, int]]:
    """The tokens of [start, end) that are to be cached, in runs that fill adjacent columns."""
    if end <= max_size:
        return [(start, end)]
    window = max_size - keep
    cuts = [(start, min(end, keep))]
    first = max(start, end - window)  # not before ``keep``, since end > max_size
    while first < end:
        turn = first + window - (first - keep) % window
        cuts.append((first, min(end, turn)))
        first = min(end, turn)
    return [(low, high) for low, high in cuts if low < high]


def _column(position: int, max_size: int, keep: int) -> int:
    if position < max_size:
        return position
    return keep + (position - keep) % (max_size - keep)


def _room(needed: int, max_size: int) -> int:
    """Columns to allocate."""
    return min(max_size, -(-needed // STEP) * STEP)


def _grown(side: Any, like: mx.array, used: int, needed: int, max_size: int) -> Any:
    return with_room(side, like, used, needed, _room(needed, max_size))


def _widened(side: mx.array, columns: int) -> mx.array:
    return mx.pad(side, [(0, 0), (0, 0), (0, columns - columns_of(side)), (0, 0)])
