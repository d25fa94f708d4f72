"""What rows of a changing batch see, for every kind of cache, without a model.

Each cached key tells its sequence and its position, so that the columns that a mask lets through
can be compared with the positions that a query is to see.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import mlx.core as mx
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from mlx_lm.models.cache import KVCache, RotatingKVCache

from models.mlx.batching import DecodeBatch, Row, remember, share_offsets
from models.mlx.kv_quant import SoloQuantizedKVCache
from models.mlx.kv_window import WindowKVCache

pytestmark = pytest.mark.mlx

SIZE = 10
LAYERS = 2


@dataclass(frozen=True, slots=True, kw_only=True)
class Kind:
    """``window``: how many of the last positions a query sees, None for all; ``keep``: how many
    of the first as well."""

    make: Callable[[], Any]
    window: int | None = None
    keep: int = 0

    def seen_from(self, position: int) -> set[int]:
        everything = set(range(position + 1))
        if self.window is None:
            return everything
        return {k for k in everything if k < self.keep or k > position - self.window}


KINDS = {
    "plain": Kind(make=KVCache),
    "quantised to 8 bits": Kind(make=lambda: SoloQuantizedKVCache(64, 8)),
    "quantised to 4 bits": Kind(make=lambda: SoloQuantizedKVCache(32, 4)),
    "limited": Kind(make=lambda: WindowKVCache(SIZE, 4), window=SIZE - 4, keep=4),
    "limited, nothing kept": Kind(make=lambda: WindowKVCache(SIZE, 0), window=SIZE),
    "limited to the utmost": Kind(make=lambda: WindowKVCache(3, 2), window=1, keep=2),
    "sliding": Kind(make=lambda: RotatingKVCache(SIZE, keep=0), window=SIZE),
}


def tokens(rows: list[tuple[int, int]], count: int = 1) -> mx.array:
    """Keys [B, 2, count, 64] of rows (sequence, first position); the second head has -1 - them."""
    own = mx.array([[[seq, start + step] for step in range(count)] for seq, start in rows])
    wide = mx.repeat(own.astype(mx.float32), 32, axis=-1)[:, None]
    return mx.concatenate([wide, -1 - wide], axis=1)


def columns(side: Any, cache: Any) -> list[list[tuple[int, int]]]:
    """(sequence, position) of every column of each row, as told by both heads."""
    if isinstance(side, tuple):
        side = mx.dequantize(*side, group_size=cache.group_size, bits=cache.bits)
    told = mx.round(side[..., ::32]).astype(mx.int32)
    first: Any = told[:, 0].tolist()
    second: Any = (-1 - told[:, 1]).tolist()
    return [
        [
            (a[0], a[1]) if a == b else (-9, -9)  # blank columns are 0 in both heads
            for a, b in zip(left, right, strict=True)
        ]
        for left, right in zip(first, second, strict=True)
    ]


def let_through(mask: Any, rows: int, count: int, length: int) -> list[list[list[bool]]]:
    """The mask as booleans [B][count][length]."""
    if mask is None:
        mask = mx.ones((1, length), mx.bool_)
    elif isinstance(mask, str):
        assert mask == "causal"
        places = mx.arange(length)
        mask = places[-count:, None] >= places
    if mask.ndim == 4:
        mask = mask[:, 0]
    found: Any = mx.broadcast_to(mask, (rows, count, length)).tolist()
    return found


class Driver:
    """Applies random changes and checks what each step sees."""

    def __init__(self, kind: Kind) -> None:
        self.kind = kind
        self.batch = DecodeBatch()
        self.outside: dict[int, Row] = {}
        self.next_id = 0

    def check(self, caches: list[Any], rows: list[tuple[int, int]], count: int) -> None:
        """Run ``count`` tokens per row through the caches as a model would."""
        mask = caches[0].make_mask(count, return_array=False, window_size=None)
        for cache in caches:
            keys = tokens(rows, count)
            got, also = cache.update_and_fetch(keys, keys * 2)
            held = columns(got, cache)
            assert len(columns(also, cache)[0]) == len(held[0])
            open_to = let_through(mask, len(rows), count, len(held[0]))
            for (sequence, start), line, grid in zip(rows, held, open_to, strict=True):
                for step in range(count):
                    seen = [one for one, is_open in zip(line, grid[step], strict=True) if is_open]
                    wanted = self.kind.seen_from(start + step)
                    assert sorted(seen) == [(sequence, place) for place in sorted(wanted)]
        if len(rows) > 1:
            share_offsets(caches)

    def start(self, number: int) -> None:
        caches = [self.kind.make() for _ in range(LAYERS)]
        self.outside[self.next_id] = Row(sequence_id=self.next_id, caches=caches, length=0)
        self._read(self.next_id, 1 + 2 * number)
        self.next_id += 1

    def read(self, number: int) -> None:
        """Another chunk of a sequence outside the batch."""
        if self.outside:
            self._read(list(self.outside)[number % len(self.outside)], 1 + number)

    def _read(self, sequence: int, count: int) -> None:
        row = self.outside[sequence]
        self.check(row.caches, [(sequence, row.length)], count)
        row.length += count

    def change(self, number: int) -> None:
        """By the bits of ``number``: park the first row, drop the last, take in up to two."""
        ids = list(self.batch.ids)
        park = ids[:1] if number & 1 else []
        drop = [one for one in ids[-1:] if number & 2 and one not in park]
        join = list(self.outside.values())[: (number >> 2) + (not ids)]
        parked = self.batch.take_out(park)
        poisoned = number == 7
        self.batch.change(leave={*park, *drop}, join=join, poisoned=poisoned)
        for row in join:
            del self.outside[row.sequence_id]
        for row in parked:
            self.outside[row.sequence_id] = row

    def step(self, number: int) -> None:
        """Decode a few tokens, some of them taken back first."""
        for turn in range(1 + number % 3):
            if not len(self.batch):
                return
            rows = list(zip(self.batch.ids, self.batch.lengths, strict=True))
            if turn == number % 2:
                undo = remember(self.batch.caches)
                for cache in self.batch.caches:
                    other = tokens([(sequence + 50, 0) for sequence, _ in rows])
                    mx.eval(cache.update_and_fetch(other, other))
                undo()
            self.check(self.batch.caches, rows, 1)
            self.batch.advance()


OPERATIONS = st.lists(
    st.tuples(
        st.sampled_from(["start", "read", "change", "change", "step", "step"]), st.integers(0, 7)
    ),
    min_size=10,
    max_size=40,
)


@pytest.mark.parametrize("kind", KINDS.values(), ids=KINDS)
@given(operations=OPERATIONS)
@settings(max_examples=12, deadline=None, derandomize=True)
def test_every_row_sees_what_it_would_see_alone(
    kind: Kind, operations: list[tuple[str, int]]
) -> None:
    driver = Driver(kind)
    for number in (2, 0, 5):
        driver.start(number)
    driver.change(7)
    for name, number in operations:
        getattr(driver, name)(number)
    for row in driver.batch.take_out(driver.batch.ids):
        driver.check(row.caches, [(row.sequence_id, row.length)], 3)
