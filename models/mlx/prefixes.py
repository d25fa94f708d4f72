"""Parts of KV caches that outlive their sequences: blocks of tokens, and whole snapshots.

A block holds the keys and values of a range of tokens, stacked over all layers whose arrays have
the same shape: one array per shape, whatever the number of layers.  A snapshot shares the arrays
of the caches it was taken from.

Nothing is ever written into a kept array.  MLX updates an array in place only while nobody else
holds it, so a sequence that was opened from kept parts copies before its first write, and two
sequences over one prefix cannot disturb each other.
"""

from __future__ import annotations

import copy
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final

import mlx.core as mx
import numpy as np

from models.engine import KeepBlock, KeptPrefix, PrefixData
from models.mlx.batching import Caches, DecodeBatch
from models.mlx.block_copies import TOKENS, BlockCopies, Planes, block_copies

# Names of exported arrays; bfloat16 has no NumPy type and travels as its bits.
PLANE: Final = "plane{}"
BITS: Final = "_bfloat16"


@dataclass(frozen=True, slots=True)
class _Block:
    """``stacks``: one [layers of this shape, H, tokens, D] array per shape."""

    stacks: tuple[mx.array, ...]


@dataclass(frozen=True, slots=True)
class _Snapshot:
    caches: Caches
    tokens: int


class PrefixStore:
    """What is kept, by handle.  ``template``: used caches of one sequence, for the layout."""

    def __init__(self, template: Caches, copies: BlockCopies | None = None) -> None:
        self._copies = block_copies() if copies is None else copies
        shapes: dict[tuple[Any, ...], list[int]] = {}
        for place, plane in enumerate(planes_of(template)):
            shapes.setdefault(_kind(plane), []).append(place)
        self._groups = [tuple(places) for places in shapes.values()]
        self._kept: dict[int, _Block | _Snapshot] = {}

    def __len__(self) -> int:
        return len(self._kept)

    def clear(self) -> None:
        self._kept.clear()

    def forget(self, handles: Iterable[int]) -> None:
        """An unknown handle is a bug: KeyError."""
        for handle in handles:
            del self._kept[handle]

    def keep_blocks(self, planes: Planes, keeps: Sequence[KeepBlock], held: int) -> list[mx.array]:
        """Keep ranges of one sequence; ``planes`` hold its first ``held`` tokens.

        Returns what has to be evaluated.
        """
        assert max(one.end for one in keeps) <= held, "a block reaches behind its sequence's end"
        assert not any(one.handle in self._kept for one in keeps), "the handle is in use"
        ranges = [(one.start, one.end) for one in keeps]
        by_shape = [
            self._copies.cut([planes[place] for place in group], ranges) for group in self._groups
        ]
        for one, *stacks in zip(keeps, *by_shape, strict=True):
            self._kept[one.handle] = _Block(tuple(stacks))
        return [stack for one in keeps for stack in self._block(one.handle).stacks]

    def keep_snapshot(self, handle: int, caches: Caches, tokens: int) -> None:
        """``caches`` must be nobody else's; their arrays may be shared."""
        assert handle not in self._kept, "the handle is in use"
        self._kept[handle] = _Snapshot(caches, tokens)

    def open(self, prefix: KeptPrefix, fresh: Caches) -> Caches:
        """Caches that hold the first ``prefix.tokens`` tokens; ``fresh`` are new, empty ones."""
        first = self._kept[prefix.handles[0]]
        if isinstance(first, _Snapshot):
            assert len(prefix.handles) == 1, "a snapshot goes alone"
            assert first.tokens == prefix.tokens, "a snapshot cannot be cut"
            return copy_state(first.caches)
        blocks = [self._block(handle) for handle in prefix.handles]
        planes: list[Any] = [None] * sum(len(group) for group in self._groups)
        for number, group in enumerate(self._groups):
            parts = [block.stacks[number] for block in blocks]
            held = sum(part.shape[TOKENS] for part in parts)
            assert held >= prefix.tokens, "the blocks are too short"
            joined = self._copies.join(parts, prefix.tokens)
            for place, plane in zip(group, joined, strict=True):
                planes[place] = plane
        return _filled(fresh, planes, prefix.tokens)

    def export(self, handle: int) -> PrefixData:
        """An evaluated block as NumPy arrays, copied."""
        arrays: dict[str, Any] = {}
        for number, stack in enumerate(self._block(handle).stacks):
            name = PLANE.format(number)
            if stack.dtype == mx.bfloat16:
                arrays[name + BITS] = np.array(stack.view(mx.uint16))
            else:
                arrays[name] = np.array(stack)
        return PrefixData(handle=handle, arrays=arrays)

    def load(self, data: PrefixData) -> None:
        """Take in what ``export`` gave, perhaps in another process."""
        assert data.handle not in self._kept, "the handle is in use"
        self._kept[data.handle] = _Block(
            tuple(_plane(data.arrays, number) for number in range(len(self._groups)))
        )

    def _block(self, handle: int) -> _Block:
        kept = self._kept[handle]
        assert isinstance(kept, _Block), "not a block"
        return kept


def _plane(arrays: Mapping[str, Any], number: int) -> mx.array:
    name = PLANE.format(number)
    if name in arrays:
        return mx.array(arrays[name])
    return mx.array(arrays[name + BITS]).view(mx.bfloat16)


def _kind(plane: mx.array) -> tuple[Any, ...]:
    return plane.shape[1], plane.shape[3], plane.dtype


def planes_of(caches: Caches) -> Planes:
    """Keys and values of all layers in a fixed order, [1, H, tokens, D] each; quantised ones as
    their three parts each."""
    return [part for cache in caches for side in _sides(cache) for part in _parts(side)]


def planes_of_row(batch: DecodeBatch, sequence_id: int) -> tuple[Planes, int]:
    """Keys and values of one row's tokens, and how many tokens these are."""
    row = batch.ids.index(sequence_id)
    length = batch.lengths[row]
    if len(batch) == 1:
        return planes_of(batch.caches), length
    planes: Planes = []
    for cache in batch.caches:
        columns = slice(cache._idx - length, cache._idx)
        for side in _sides(cache):
            planes += [part[row : row + 1, :, columns] for part in _parts(side)]
    return planes, length


def _filled(fresh: Caches, planes: Planes, tokens: int) -> Caches:
    """``fresh`` caches with these keys and values, ``tokens`` of each."""
    rest = iter(planes)
    for cache in fresh:
        if hasattr(cache, "bits"):
            cache.keys = tuple(next(rest) for _ in range(3))
            cache.values = tuple(next(rest) for _ in range(3))
            packed, scales, _ = cache.keys
            cache.group_size = packed.shape[3] * 32 // cache.bits // scales.shape[3]
        else:
            cache.keys, cache.values = next(rest), next(rest)
        cache.offset = tokens
    return fresh


def _sides(cache: Any) -> tuple[Any, Any]:
    return cache.keys, cache.values


def _parts(side: Any) -> Sequence[mx.array]:
    return side if isinstance(side, tuple | list) else (side,)


def copy_state(caches: Caches) -> Caches:
    """Other cache objects over the same arrays."""
    return [_copied(cache) for cache in caches]


def _copied(value: Any) -> Any:
    if isinstance(value, list | tuple):
        return type(value)(_copied(item) for item in value)
    if isinstance(value, mx.array) or not hasattr(value, "__dict__"):
        return copy.copy(value)
    other = copy.copy(value)
    other.__dict__.update({name: _copied(item) for name, item in vars(value).items()})
    return other
