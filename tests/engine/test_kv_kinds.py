"""What is said of caches and models: for the log, for kept prefixes, for the width of the batch."""

from __future__ import annotations

from typing import Any

import mlx.core as mx
import pytest
from mlx_lm.models import gemma2
from mlx_lm.models.cache import ArraysCache, CacheList, KVCache

from models.mlx import kv_probe, masks
from models.mlx.batching import kinds_of, new_caches, prefix_mode
from models.mlx.kv_probe import UnsupportedCaches, check_caches, widest_batch
from tests.engine.families import FAMILIES, build

pytestmark = pytest.mark.mlx


def model_of(name: str) -> Any:
    return build(next(family for family in FAMILIES if family.name == name))


def used() -> KVCache:
    cache = KVCache()
    cache.update_and_fetch(mx.zeros((1, 2, 3, 8)), mx.zeros((1, 2, 3, 8)))
    return cache


def test_kinds_are_counted() -> None:
    caches = new_caches(model_of("gemma3_text"), kv_bits=8)
    assert kinds_of([*caches, caches[1]]) == "1 RotatingKVCache, 2 SoloQuantizedKVCache"


def test_one_layer_decides_how_prefixes_are_kept() -> None:
    state = ArraysCache(2)
    state[0] = mx.zeros((1, 3))
    assert prefix_mode([used(), used()]) == "blocks"
    assert prefix_mode([used(), state]) == "snapshots"
    assert prefix_mode([used(), CacheList(used(), used())]) == "snapshots"
    assert prefix_mode([used(), KVCache()]) == "snapshots"  # nothing is known of its layout


def test_state_of_an_unknown_kind_is_not_kept() -> None:
    class Remote:
        def __init__(self) -> None:
            self.handles = [object()]

    assert prefix_mode([used(), Remote()]) == "none"


def test_a_model_that_fails_in_a_batch_is_found_without_the_list(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(kv_probe, "SOLO_ONLY", {})
    assert widest_batch(model_of("gpt_bigcode")) == 1


def test_a_faulty_model_is_not_mistaken_for_unsupported_caches() -> None:
    class Broken:
        layers = (1,)

        def __call__(self, inputs: mx.array, cache: list[Any]) -> mx.array:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        check_caches(Broken(), kv_bits=8)


def test_the_reason_is_one_line_and_names_the_setting() -> None:
    with pytest.raises(UnsupportedCaches) as caught:
        check_caches(model_of("gemma2"), kv_bits=8)
    assert str(caught.value).startswith("this model cannot work with quantised KV caches: ")
    assert "\n" not in str(caught.value)
    with pytest.raises(UnsupportedCaches, match="cannot work with limited KV caches"):
        check_caches(model_of("afm7"), max_kv_size=50)


def test_the_correction_of_masks_is_applied_once() -> None:
    attention = gemma2.Attention.__call__
    masks.install()
    assert gemma2.Attention.__call__ is attention
