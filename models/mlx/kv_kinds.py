"""Which kinds of KV caches a model gets, and what can be done with them."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from typing import Any, Literal

import mlx.core as mx

from models.mlx.kv_quant import SoloQuantizedKVCache, UnsupportedCaches
from models.mlx.kv_window import KEEP, WindowKVCache
from models.mlx.lm import mlx_lm_utils
from models.mlx.sides import parts

mlx_lm_utils()

from mlx_lm.models.cache import CacheList, KVCache, make_prompt_cache  # noqa: E402

# One per layer.  The classes are mlx-lm's or ours, and differ from model to model.
Caches = list[Any]


def new_caches(
    model: Any,
    *,
    max_kv_size: int | None = None,
    kv_bits: int | None = None,
    kv_group_size: int = 64,
) -> Caches:
    """Empty caches for one sequence.

    ``max_kv_size`` limits them to the first 4 and the last tokens, ``kv_bits`` quantises them in
    groups of up to ``kv_group_size``.  Either applies to the layers whose cache is mlx-lm's plain
    KVCache; others (sliding windows, recurrent state, pairs of caches) keep theirs.  Raises
    ValueError (UnsupportedCaches) for settings that no model can have.
    """
    caches = list(make_prompt_cache(model))
    if max_kv_size is None and kv_bits is None:
        return caches
    if max_kv_size is not None and kv_bits is not None:
        raise UnsupportedCaches("a KV cache cannot be both quantised and limited in size")

    def changed(cache: Any) -> Any:
        if type(cache) is not KVCache:
            return cache
        if kv_bits is not None:
            return SoloQuantizedKVCache(kv_group_size, kv_bits)
        assert max_kv_size is not None
        return WindowKVCache(max_kv_size, KEEP)

    return [changed(cache) for cache in caches]


def kinds_of(caches: Sequence[Any]) -> str:
    """For the log: how many layers have which kind of cache."""
    counts = Counter(type(cache).__name__ for cache in caches)
    return ", ".join(f"{count} {name}" for name, count in counts.items())


def leaves(caches: Sequence[Any]) -> Caches:
    """The caches with those inside lists of caches in place of the lists."""
    found: Caches = []
    for cache in caches:
        found += leaves(cache.caches) if isinstance(cache, CacheList) else [cache]
    return found


def arrays_of(caches: Sequence[Any]) -> list[mx.array]:
    """Everything that must be evaluated for the caches to be complete."""
    found: list[mx.array] = []
    for cache in leaves(caches):
        for value in vars(cache).values():
            found += [
                item
                for item in (value if isinstance(value, (list, tuple)) else (value,))
                if isinstance(item, mx.array)
            ]
    return found


def can_batch(caches: Sequence[Any]) -> bool:
    """Whether several of these caches can be joined into one.  They must have been used."""
    return all(_can_batch(cache) for cache in caches)


def _can_batch(cache: Any) -> bool:
    if isinstance(cache, CacheList):
        return all(_can_batch(part) for part in cache.caches)
    return hasattr(type(cache), "merge") and hasattr(cache.merge([cache, cache]), "extract")


def prefix_mode(caches: Sequence[Any]) -> Literal["blocks", "snapshots", "none"]:
    """How parts of a sequence's caches can be kept for later sequences.  They must have been used.

    "blocks": by any range of tokens.  Every layer's keys and values are arrays [1, H, L, D], or
    tuples of them when quantised, with one column per token in order: cut and put back along
    axis 2.  "snapshots": only as a whole, at the length they have (windows, recurrent state,
    lists of caches); a copy of the objects is a snapshot.  "none": the state is of an unknown kind.
    """
    if all(_is_one_column_per_token(cache) for cache in caches):
        return "blocks"
    if all(_is_plain_state(value) for cache in leaves(caches) for value in vars(cache).values()):
        return "snapshots"
    return "none"


def _is_one_column_per_token(cache: Any) -> bool:
    if type(cache) not in (KVCache, SoloQuantizedKVCache) or cache.keys is None:
        return False
    arrays = (*parts(cache.keys), *parts(cache.values))
    return all(array.ndim == 4 and array.shape[0] == 1 for array in arrays)


def _is_plain_state(value: Any) -> bool:
    if isinstance(value, (list, tuple)):
        return all(_is_plain_state(item) for item in value)
    return value is None or isinstance(value, (bool, int, float, str, mx.array))
