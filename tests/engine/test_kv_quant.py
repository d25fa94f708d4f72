"""Quantised caches: settings, contents, attention, and rows in a batch."""

from __future__ import annotations

from typing import Any

import mlx.core as mx
import pytest
from mlx_lm.models.base import create_causal_mask, scaled_dot_product_attention
from mlx_lm.models.cache import BatchKVCache, KVCache, QuantizedKVCache

from models.mlx import cpu_math
from models.mlx.batching import arrays_of, new_caches, remember
from models.mlx.kv_quant import (
    BatchQuantizedKVCache,
    SoloQuantizedKVCache,
    UnsupportedCaches,
    fitting_group_size,
)
from models.mlx.memory import kv_bytes_per_token
from models.mlx.sides import cut, parts
from tests.engine.families import FAMILIES, VOCAB_SIZE, WithCaches, build
from tests.engine.tiny import decode, make_backend, prefill, prompt_of

pytestmark = pytest.mark.mlx

WIDTH = 64
SETTINGS = [(64, 4), (64, 8), (32, 4), (32, 8)]


def drawn(rows: int, count: int, seed: int, heads: int = 2) -> tuple[mx.array, mx.array]:
    keys = mx.random.normal((rows, heads, count, WIDTH), key=mx.random.key(seed))
    values = mx.random.normal((rows, heads, count, WIDTH), key=mx.random.key(seed + 1))
    return keys, values


def filled(length: int, seed: int, group_size: int = 64, bits: int = 8) -> SoloQuantizedKVCache:
    cache = SoloQuantizedKVCache(group_size, bits)
    cache.update_and_fetch(*drawn(1, length, seed))
    return cache


def assert_same(got: Any, want: Any) -> None:
    for left, right in zip(parts(got), parts(want), strict=True):
        assert left.shape == right.shape
        assert bool(mx.array_equal(left, right).item())


@pytest.mark.parametrize(
    ("wanted", "widths", "fits"),
    [
        (64, (64, 64), 64),
        (64, (128, 128), 64),
        (128, (128, 128), 128),
        (128, (192, 128), 64),
        (64, (96, 96), 32),
        (32, (64, 64), 32),
        (64, (64, 32), 32),
    ],
)
def test_the_group_size_is_the_largest_that_fits(
    wanted: int, widths: tuple[int, int], fits: int
) -> None:
    assert fitting_group_size(wanted, *widths) == fits


@pytest.mark.parametrize("widths", [(16, 16), (80, 80), (64, 16)])
def test_heads_that_no_group_size_fits_are_a_clear_error(widths: tuple[int, int]) -> None:
    cache = SoloQuantizedKVCache(64, 8)
    keys, values = mx.zeros((1, 2, 3, widths[0])), mx.zeros((1, 2, 3, widths[1]))
    with pytest.raises(UnsupportedCaches, match=f"divides the head width .*{min(widths)}"):
        cache.update_and_fetch(keys, values)


@pytest.mark.parametrize(
    "bad",
    [
        {"kv_bits": 7},
        {"kv_bits": 16},
        {"kv_bits": 8, "kv_group_size": 48},
        {"kv_bits": 8, "max_kv_size": 64},
        {"max_kv_size": 4},
        {"max_kv_size": 0},
    ],
)
def test_impossible_settings_are_refused(bad: dict[str, int]) -> None:
    with pytest.raises(ValueError):
        new_caches(build(FAMILIES[0]), **bad)


def test_only_plain_caches_are_replaced() -> None:
    by_name = {family.name: family for family in FAMILIES}
    kinds = {
        name: [type(cache).__name__ for cache in new_caches(build(by_name[name]), kv_bits=4)]
        for name in ("llama", "gemma3_text", "falcon_h1", "mamba")
    }
    assert kinds == {
        "llama": ["SoloQuantizedKVCache"] * 2,
        "gemma3_text": ["RotatingKVCache", "SoloQuantizedKVCache"],
        "falcon_h1": ["CacheList"] * 2,
        "mamba": ["ArraysCache"] * 2,
    }


@pytest.mark.parametrize(("group_size", "bits"), SETTINGS)
def test_contents_are_those_of_mlx_lm_whatever_the_chunks(group_size: int, bits: int) -> None:
    keys, values = drawn(1, 300, seed=3)
    want = QuantizedKVCache(group_size, bits)
    want.update_and_fetch(keys, values)
    got = SoloQuantizedKVCache(group_size, bits)
    start = 0
    for count in (1, 7, 250, 1, 41):
        chunk = slice(start, start + count)
        got.update_and_fetch(keys[:, :, chunk], values[:, :, chunk])
        start += count
    assert got.size() == 300
    for side, wanted in zip(got.keys_and_values(), want.keys_and_values(), strict=True):
        assert_same(side, wanted)


@pytest.mark.parametrize(("group_size", "bits"), SETTINGS)
@pytest.mark.parametrize("heads", [2, 6])
@pytest.mark.parametrize("count", [1, 4])
def test_attention_over_padded_rows_equals_attention_over_each(
    group_size: int, bits: int, heads: int, count: int
) -> None:
    """``heads`` query heads on 2 key heads; the attention is mlx-lm's and ours on the CPU."""
    lengths = (5, 40, 1)
    singles = [filled(length, 10 * row, group_size, bits) for row, length in enumerate(lengths)]
    batch = BatchQuantizedKVCache.merge(singles)
    queries = mx.random.normal((3, heads, count, WIDTH), key=mx.random.key(9))
    keys, values = drawn(3, count, seed=90)
    together = _attend(batch, queries, keys, values, cpu_math.attention)
    for row, single in enumerate(singles):
        own = slice(row, row + 1)
        alone = _attend(single, queries[own], keys[own], values[own], scaled_dot_product_attention)
        assert bool(mx.allclose(together[own], alone, rtol=1e-5, atol=1e-5).item())
    assert not bool(mx.allclose(together[:1], together[1:2], rtol=1e-2, atol=1e-2).item())


def _attend(
    cache: Any, queries: mx.array, keys: mx.array, values: mx.array, attention: Any
) -> mx.array:
    mask = cache.make_mask(queries.shape[2], return_array=False, window_size=None)
    sides = cache.update_and_fetch(keys, values)
    result: mx.array = attention(queries * 1.0, *sides, cache=cache, scale=0.125, mask=mask)
    return result


def test_quantised_attention_is_close_to_exact_attention() -> None:
    queries = mx.random.normal((1, 6, 5, WIDTH), key=mx.random.key(9))
    keys, values = drawn(1, 20, seed=4)
    cache = filled(15, seed=2)
    old = [mx.dequantize(*side, group_size=64, bits=8) for side in cache.keys_and_values()]
    exact = mx.fast.scaled_dot_product_attention(
        queries,
        mx.concatenate([old[0], keys[:, :, :5]], axis=2),
        mx.concatenate([old[1], values[:, :, :5]], axis=2),
        scale=0.125,
        mask=create_causal_mask(5, 15),
    )
    got = _attend(cache, queries, keys[:, :, :5], values[:, :, :5], cpu_math.attention)
    assert float(mx.max(mx.abs(got - exact)).item()) < 0.02


def test_rows_can_be_taken_out_filtered_and_added() -> None:
    singles = [filled(length, 10 * length) for length in (5, 40, 1)]
    batch = BatchQuantizedKVCache.merge(singles)
    more = BatchQuantizedKVCache.merge([filled(60, 8), filled(3, 6)])
    batch.extend(more)
    batch.filter([0, 2, 4])
    assert batch.left_padding.tolist() == [0, 4, 2]
    assert batch.offset.tolist() == [5, 1, 3]
    for row, want in enumerate((singles[0], singles[2], filled(3, 6))):
        for side, wanted in zip(
            batch.extract(row).keys_and_values(), want.keys_and_values(), strict=True
        ):
            assert_same(side, wanted)


def test_right_padding_moves_to_the_left() -> None:
    """Prompts of 3 and 5 tokens read as one padded batch, as with mlx-lm's own batch cache."""
    keys, values = drawn(2, 5, seed=1)
    batch = BatchQuantizedKVCache([0, 0], group_size=64, bits=8)
    batch.prepare(right_padding=[2, 0], lengths=[3, 5])
    batch.update_and_fetch(keys, values)
    batch.finalize()
    assert batch.offset.tolist() == [3, 5]
    assert batch.left_padding.tolist() == [2, 0]
    want = SoloQuantizedKVCache(64, 8)
    want.update_and_fetch(keys[:1, :, :3], values[:1, :, :3])
    for side, wanted in zip(
        batch.extract(0).keys_and_values(), want.keys_and_values(), strict=True
    ):
        assert_same(side, wanted)


def test_state_can_be_taken_and_set() -> None:
    batch = BatchQuantizedKVCache.merge([filled(5, 1, 32, 4), filled(9, 2, 32, 4)])
    other = BatchQuantizedKVCache([0], group_size=64, bits=8)
    other.state = batch.state
    assert (other.group_size, other.bits, other.nbytes) == (32, 4, batch.nbytes)
    assert_same(other.row(0, 5).keys, batch.row(0, 5).keys)


def test_caches_of_different_quantisations_cannot_be_joined() -> None:
    with pytest.raises(ValueError, match="different quantisations"):
        BatchQuantizedKVCache.merge([filled(3, 1, 32, 4), filled(3, 1, 32, 8)])


def test_an_undone_step_leaves_the_contents_as_they_were() -> None:
    cache = filled(5, seed=1)
    before = [mx.array(part) for part in arrays_of([cache])]
    undo = remember([cache])
    cache.update_and_fetch(*drawn(1, 3, seed=7))
    mx.eval(arrays_of([cache]))
    undo()
    assert cache.offset == 5
    assert_same(tuple(arrays_of([cache])), tuple(before))


@pytest.mark.parametrize(
    ("group_size", "bits", "bytes_per_token"),
    # 2 sides, 2 heads of 64: packed values, then a float32 scale and bias for each group
    [(64, 8, 4 * (64 + 8)), (64, 4, 4 * (32 + 8)), (32, 8, 4 * (64 + 16)), (32, 4, 4 * (32 + 16))],
)
def test_memory_per_token(group_size: int, bits: int, bytes_per_token: int) -> None:
    assert kv_bytes_per_token([filled(9, 1, group_size, bits)]) == bytes_per_token
    plain = KVCache()
    plain.update_and_fetch(*drawn(1, 9, seed=1))
    assert kv_bytes_per_token([plain]) == 4 * 64 * 4


def test_the_batch_cache_is_laid_out_like_mlx_lms() -> None:
    lengths = (4, 9)
    plains = []
    for seed, length in enumerate(lengths):
        plain = KVCache()
        plain.update_and_fetch(*drawn(1, length, 10 * seed))
        plains.append(plain)
    want = BatchKVCache.merge(plains)
    got = BatchQuantizedKVCache.merge([filled(n, 10 * row) for row, n in enumerate(lengths)])
    want.update_and_fetch(*drawn(2, 1, 50))
    got.update_and_fetch(*drawn(2, 1, 50))
    assert got._idx == want._idx
    assert got.offset.tolist() == want.offset.tolist()
    assert_same(got.make_mask(1), want.make_mask(1))
    values = mx.dequantize(*got.keys_and_values()[1], group_size=64, bits=8)
    assert float(mx.max(mx.abs(values - want.keys_and_values()[1])).item()) < 0.05


def test_a_row_with_broken_numbers_fails_alone() -> None:
    model = build(FAMILIES[0])
    backend = make_backend(WithCaches(model, kv_bits=8), vocab_size=VOCAB_SIZE)
    prompts = {key: tuple(x % VOCAB_SIZE for x in prompt_of(key, 5 + 9 * key)) for key in (1, 2, 3)}
    alone = {}
    for key, prompt in prompts.items():
        alone[key] = [prefill(backend, key, prompt).tokens[key]]
        alone[key] += [decode(backend, key).tokens[key] for _ in range(8)]
        decode(backend, drop=(key,))
    tokens = {key: [prefill(backend, key, prompt).tokens[key]] for key, prompt in prompts.items()}
    for cache in backend._sequences[2].caches or ():
        packed, scales, biases = cache.values
        cache.values = packed, scales * float("nan"), biases
    result = decode(backend, 1, 2, 3)
    assert list(result.failed) == [2]
    for _ in range(8):
        for key, token in result.tokens.items():
            tokens[key].append(token)
        result = decode(backend, 1, 3)
    assert tokens[1] == alone[1]
    assert tokens[3] == alone[3]


def test_cut_takes_every_part() -> None:
    cache = filled(9, 1, 32, 4)
    block = cut(cache.keys, slice(None), slice(2, 5))
    assert [part.shape for part in block] == [(1, 2, 3, 8), (1, 2, 3, 2), (1, 2, 3, 2)]
