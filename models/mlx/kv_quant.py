"""KV caches that hold quantised keys and values, for one sequence and for a batch.

A side (keys or values) is a tuple (packed, scales, biases), each [B, H, L, x]: ``packed`` has
``bits`` bits per value in 32-bit words, ``scales`` and ``biases`` one number per group of
``group_size`` values.  Each token is quantised by itself when it is cached, so the contents do not
depend on how the prompt was cut into chunks.  Attention reads the tuples directly: mlx-lm's
``scaled_dot_product_attention`` takes its quantised path for caches that have ``bits``.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Final

import mlx.core as mx

from models.mlx.lm import mlx_lm_utils
from models.mlx.sides import Side, assign, blank, copied, cut, mapped, with_room

mlx_lm_utils()

from mlx_lm.models.cache import BatchKVCache, QuantizedKVCache, dynamic_roll  # noqa: E402

BITS: Final = (4, 8)
#: The group sizes of MLX's affine quantisation.
GROUP_SIZES: Final = (128, 64, 32)


class UnsupportedCaches(ValueError):
    """The model cannot work with the kind of KV cache that was asked for."""


def fitting_group_size(wanted: int, *widths: int) -> int:
    """The largest group size up to ``wanted`` that divides all head widths.

    Raises UnsupportedCaches.
    """
    for size in GROUP_SIZES:
        if size <= wanted and not any(width % size for width in widths):
            return size
    heads = " and ".join(str(width) for width in sorted(set(widths)))
    raise UnsupportedCaches(
        f"the KV cache cannot be quantised: no group size up to {wanted}"
        f" (there are {', '.join(str(size) for size in reversed(GROUP_SIZES))})"
        f" divides the head width {heads}"
    )


def quantized(side: mx.array, group_size: int, bits: int) -> Side:
    return tuple(mx.quantize(side, group_size=group_size, bits=bits))


class SoloQuantizedKVCache(QuantizedKVCache):  # type: ignore[misc]
    """mlx-lm's quantised cache, with a group size that fits the heads and with ``merge``.

    ``group_size`` is the largest one allowed until the first use tells how wide the heads are.
    """

    def __init__(self, group_size: int = 64, bits: int = 8) -> None:
        if bits not in BITS:
            raise UnsupportedCaches(f"KV cache bits must be one of {BITS}, not {bits}")
        if group_size not in GROUP_SIZES:
            raise UnsupportedCaches(
                f"the KV group size must be one of {GROUP_SIZES}, not {group_size}"
            )
        super().__init__(group_size=group_size, bits=bits)
        self.group_size: int

    def update_and_fetch(self, keys: mx.array, values: mx.array) -> tuple[Side, Side]:
        """keys [1, H, N, D], values [1, H, N, E]; all cached tokens.  Raises UnsupportedCaches."""
        if self.keys is None:
            self.group_size = fitting_group_size(self.group_size, keys.shape[3], values.shape[3])
        sides: tuple[Side, Side] = super().update_and_fetch(keys, values)
        return sides

    def size(self) -> int:
        return int(self.offset)

    @classmethod
    def merge(cls, caches: list[SoloQuantizedKVCache]) -> BatchQuantizedKVCache:
        return BatchQuantizedKVCache.merge(caches)


class BatchQuantizedKVCache(BatchKVCache):  # type: ignore[misc]
    """Several quantised sequences, right-justified in columns as in BatchKVCache.

    ``left_padding`` and ``offset`` (cached tokens) are arrays [B]; ``_idx`` is the end of the used
    columns.  Padding holds zeros: packed zeros with scale and bias zero are the number zero.
    """

    def __init__(self, left_padding: list[int], *, group_size: int, bits: int) -> None:
        super().__init__(left_padding)
        self.keys: Side
        self.values: Side
        self.offset: mx.array
        self.left_padding: mx.array
        self._idx: int
        self._right_padding: mx.array | None
        self.group_size = group_size
        self.bits = bits

    def update_and_fetch(self, keys: mx.array, values: mx.array) -> tuple[Side, Side]:
        """keys [B, H, N, D], values [B, H, N, E]; all used columns."""
        new_keys = quantized(keys, self.group_size, self.bits)
        new_values = quantized(values, self.group_size, self.bits)
        start, end = self._idx, self._idx + keys.shape[2]
        columns = -(-end // self.step) * self.step
        self.keys = with_room(self.keys, new_keys, start, end, columns)
        self.values = with_room(self.values, new_values, start, end, columns)
        assign(self.keys, slice(None), slice(start, end), new_keys)
        assign(self.values, slice(None), slice(start, end), new_values)
        self._idx = end
        self.offset = self.offset + keys.shape[2]
        return self.keys_and_values()

    def keys_and_values(self) -> tuple[Side, Side]:
        used = slice(0, self._idx)
        return cut(self.keys, slice(None), used), cut(self.values, slice(None), used)

    def finalize(self) -> None:
        """Move the right padding announced with ``prepare`` to the left."""
        padding = self._right_padding
        if padding is None:
            return
        self.keys, self.values = (
            mapped(lambda part: dynamic_roll(part, padding[:, None], axis=2), side)
            for side in self.keys_and_values()
        )
        self.offset = self.offset - padding
        self.left_padding = self.left_padding + padding
        self._right_padding = None

    @property
    def state(self) -> Any:
        settings = self.group_size, self.bits
        return self.keys, self.values, self.offset, self.left_padding, self._idx, *settings

    @state.setter
    def state(self, state: Any) -> None:
        self.keys, self.values, self.offset, self.left_padding, self._idx = state[:5]
        self.group_size, self.bits = state[5:]
        self._right_padding = None

    def filter(self, batch_indices: Any) -> None:
        """Keep these rows only, with no more padding than they need.  Waits for the paddings."""
        rows = mx.array(batch_indices)
        self.offset, self.left_padding = self.offset[rows], self.left_padding[rows]
        paddings: Any = self.left_padding.tolist()
        spare = max(0, min(paddings))
        self.left_padding = self.left_padding - spare
        self._idx -= spare
        if self.keys is not None:
            rest = slice(spare, None)
            self.keys, self.values = cut(self.keys, rows, rest), cut(self.values, rows, rest)

    def extend(self, other: BatchQuantizedKVCache) -> None:
        """Add the rows of ``other``.  Both must be quantised alike and have been used."""
        _assert_alike([self, other])
        end = max(self._idx, other._idx)
        pairs = ((self.keys, other.keys), (self.values, other.values))
        self.keys, self.values = (
            mapped(
                lambda mine, theirs: mx.concatenate([mine, theirs]),
                _moved(mine, self._idx, end),
                _moved(theirs, other._idx, end),
            )
            for mine, theirs in pairs
        )
        paddings = [cache.left_padding + (end - cache._idx) for cache in (self, other)]
        self.left_padding = mx.concatenate(paddings)
        self.offset = mx.concatenate([self.offset, other.offset])
        self._idx = end

    def extract(self, idx: int) -> SoloQuantizedKVCache:
        """A copy of one row.  Waits for the offsets."""
        length: Any = self.offset[idx].item()
        return self.row(idx, length)

    def row(self, idx: int, length: int) -> SoloQuantizedKVCache:
        """A copy of one row, which holds ``length`` tokens."""
        single = SoloQuantizedKVCache(self.group_size, self.bits)
        rows, columns = slice(idx, idx + 1), slice(self._idx - length, self._idx)
        single.keys = copied(self.keys, rows, columns)
        single.values = copied(self.values, rows, columns)
        single.offset = length
        return single

    @classmethod
    def merge(cls, caches: list[SoloQuantizedKVCache]) -> BatchQuantizedKVCache:
        """Used caches of single sequences, all quantised alike, as one batch."""
        _assert_alike(caches)
        lengths = [cache.size() for cache in caches]
        end = max(lengths)
        batch = cls(
            [end - length for length in lengths],
            group_size=caches[0].group_size,
            bits=caches[0].bits,
        )
        batch.keys = blank(caches[0].keys, len(caches), end)
        batch.values = blank(caches[0].values, len(caches), end)
        for row, cache in enumerate(caches):
            place, columns = slice(row, row + 1), slice(end - cache.offset, end)
            keys, values = cache.keys_and_values()
            assign(batch.keys, place, columns, keys)
            assign(batch.values, place, columns, values)
        batch.offset, batch._idx = mx.array(lengths), end
        return batch

    @property
    def nbytes(self) -> int:
        if self.keys is None:
            return 0
        return sum(int(part.nbytes) for part in (*self.keys, *self.values))


def _assert_alike(caches: Sequence[Any]) -> None:
    kinds = {(cache.group_size, cache.bits) for cache in caches}
    if len(kinds) > 1:
        raise ValueError(f"caches of different quantisations cannot be joined: {sorted(kinds)}")


def _moved(side: Side, old_end: int, new_end: int) -> Side:
    """The used columns, ending at ``new_end``, with zeros before them."""
    before = new_end - old_end
    return mapped(
        lambda part: mx.pad(part[:, :, :old_end], [(0, 0), (0, 0), (before, 0), (0, 0)]), side
    )
