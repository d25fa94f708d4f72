"""Caches of limited size: which column holds what, which mask a model gets, and joining."""

from __future__ import annotations

from typing import Any

import mlx.core as mx
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from mlx_lm.models.cache import RotatingKVCache

from models.mlx.kv_window import (
    KEEP,
    STEP,
    BatchWindowKVCache,
    WindowKVCache,
    _column,
    _ranges,
    positions,
)
from tests.engine.families import FAMILIES, VOCAB_SIZE, build
from tests.engine.tiny import prompt_of

pytestmark = pytest.mark.mlx


def marked(start: int, count: int, rows: int = 1) -> mx.array:
    """Keys whose numbers are 1 + their position."""
    places = mx.arange(start, start + count, dtype=mx.float32) + 1
    return mx.broadcast_to(places[None, None, :, None], (rows, 2, count, 4))


def filled(max_size: int, keep: int, length: int) -> WindowKVCache:
    cache = WindowKVCache(max_size, keep)
    for place in range(length):
        cache.update_and_fetch(marked(place, 1), marked(place, 1))
    return cache


def held(cache: Any, row: int = 0) -> list[int]:
    found: Any = (cache.keys_and_values()[0][row, 0, :, 0] - 1).astype(mx.int32).tolist()
    return [place for place in found if place >= 0]


SIZES = st.tuples(st.integers(1, 9), st.integers(0, 8)).filter(lambda pair: pair[1] < pair[0])


@given(sizes=SIZES, chunks=st.lists(st.integers(1, 12), max_size=6))
@settings(deadline=None, derandomize=True)
def test_columns_hold_the_first_and_the_last_tokens(
    sizes: tuple[int, int], chunks: list[int]
) -> None:
    """The ranges and columns of every chunk against a token-by-token simulation."""
    max_size, keep = sizes
    simulated: dict[int, int] = {}
    stored: dict[int, int] = {}
    start = 0
    for count in chunks:
        end = start + count
        for place in range(start, end):
            simulated[_column(place, max_size, keep)] = place
        for first, last in _ranges(start, end, max_size, keep):
            column = _column(first, max_size, keep)
            stored.update({column + step: first + step for step in range(last - first)})
        start = end
        assert stored == simulated
        lasting = [place for place in range(end) if place < keep or place >= end - max_size + keep]
        assert sorted(stored.values()) == lasting
        told: Any = positions(min(end, max_size), end, max_size, keep).tolist()
        assert told == [stored[column] for column in range(len(told))]


@given(
    sizes=SIZES,
    chunks=st.lists(st.integers(1, 12), min_size=1, max_size=4),
    narrower=st.none() | st.integers(1, 9),
    return_array=st.booleans(),
)
@settings(max_examples=60, deadline=None, derandomize=True)
def test_masks_let_each_query_see_its_window(
    sizes: tuple[int, int], chunks: list[int], narrower: int | None, return_array: bool
) -> None:
    cache = WindowKVCache(*sizes)
    for count in chunks:
        start = cache.offset
        mask = cache.make_mask(count, narrower, return_array)
        keys, values = cache.update_and_fetch(marked(start, count), marked(start, count) * 3)
        assert bool(mx.array_equal(keys * 3, values).item())
        told: Any = (keys[0, 0, :, 0] - 1).astype(mx.int32).tolist()
        if isinstance(mask, str):
            assert not return_array
            assert told == list(range(start + count))
            continue
        assert mask is not None or count == 1
        grid: Any = (mx.ones((1, len(told)), mx.bool_) if mask is None else mask).tolist()
        for query, line in enumerate(grid, start):
            seen = {place for place, is_open in zip(told, line, strict=True) if is_open}
            assert seen == _window(query, *sizes, narrower)


def _window(query: int, max_size: int, keep: int, narrower: int | None) -> set[int]:
    return {
        place
        for place in range(query + 1)
        if (place < keep or place > query - max_size + keep)
        and (narrower is None or place > query - narrower)
    }


@given(lengths=st.lists(st.integers(1, 25), min_size=2, max_size=4), narrower=st.integers(1, 9))
@settings(max_examples=30, deadline=None, derandomize=True)
def test_masks_of_a_batch_let_each_row_see_its_window(lengths: list[int], narrower: int) -> None:
    batch = BatchWindowKVCache.merge([filled(9, 3, length) for length in lengths])
    for limit in (None, narrower, None, narrower):
        mask: Any = batch.make_mask(1, limit)
        new = mx.concatenate([marked(length, 1) for length in lengths])
        keys, _ = batch.update_and_fetch(new, new)
        told: Any = (keys[:, 0, :, 0] - 1).astype(mx.int32).tolist()
        grid: Any = mx.broadcast_to(mask, (len(lengths), 1, 1, keys.shape[2]))[:, 0, 0].tolist()
        for row, query in enumerate(lengths):
            seen = {place for place, is_open in zip(told[row], grid[row], strict=True) if is_open}
            assert seen == _window(query, 9, 3, limit)
        lengths = [length + 1 for length in lengths]


def test_large_caches_grow_in_steps_up_to_their_limit() -> None:
    cache = WindowKVCache(2 * STEP + 10)
    sizes = []
    for start in range(0, 3 * STEP, 64):
        cache.update_and_fetch(marked(start, 64), marked(start, 64))
        sizes.append(cache.keys.shape[2])
    assert sizes == [STEP] * 4 + [2 * STEP] * 4 + [2 * STEP + 10] * 4
    assert held(cache)[:KEEP] == [0, 1, 2, 3]
    assert sorted(held(cache))[KEEP:] == list(range(3 * STEP - 2 * STEP - 10 + KEEP, 3 * STEP))


@pytest.mark.parametrize("length", [3, 15])
def test_tokens_are_those_of_mlx_lms_rotating_cache(length: int) -> None:
    """For prompts within the limit; over longer ones mlx-lm forgets the first tokens."""
    model = build(FAMILIES[0])
    prompt = [token % VOCAB_SIZE for token in prompt_of(7, length)]

    def run(caches: list[Any]) -> list[int]:
        inputs, tokens = list(prompt), []
        for _ in range(40):
            value: Any = mx.argmax(model(mx.array([inputs]), cache=caches)[0, -1]).item()
            tokens.append(int(value))
            inputs = tokens[-1:]
        return tokens

    limited = run([WindowKVCache(16, KEEP) for _ in model.layers])
    assert limited == run([RotatingKVCache(16, keep=KEEP) for _ in model.layers])
    assert limited != run([RotatingKVCache(16, keep=0) for _ in model.layers])


def test_rows_can_be_taken_out_filtered_and_added() -> None:
    batch = BatchWindowKVCache.merge([filled(9, 3, length) for length in (4, 30)])
    batch.extend(BatchWindowKVCache.merge([filled(9, 3, length) for length in (12, 2)]))
    assert batch.offset.tolist() == [4, 30, 12, 2]
    batch.filter([0, 2, 3])
    assert batch.offset.tolist() == [4, 12, 2]
    for row, length in enumerate((4, 12, 2)):
        single = batch.extract(row)
        assert single.offset == length
        assert held(single) == held(filled(9, 3, length))


def test_trimming_stops_at_what_was_overwritten() -> None:
    cache = filled(9, 3, 9)
    assert cache.is_trimmable()
    assert cache.trim(4) == 4
    assert held(cache) == [0, 1, 2, 3, 4]
    assert not filled(9, 3, 10).is_trimmable()
    assert not BatchWindowKVCache.merge([cache, cache]).is_trimmable()


def test_caches_of_different_sizes_cannot_be_joined() -> None:
    with pytest.raises(ValueError, match="different sizes"):
        BatchWindowKVCache.merge([filled(9, 3, 2), filled(10, 3, 2)])


def test_a_limit_that_keeps_everything_is_refused() -> None:
    with pytest.raises(ValueError, match="cannot keep the first 4"):
        WindowKVCache(4)


def test_state_can_be_taken_and_set() -> None:
    cache = filled(9, 3, 14)
    other = WindowKVCache(5, 0)
    other.state = cache.state
    assert held(other) == held(cache)
    assert other.nbytes == cache.nbytes > 0
