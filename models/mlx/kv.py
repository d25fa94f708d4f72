"""Combining and splitting mlx-lm caches: single-sequence caches to a batch and back.

A batch of one keeps its single-sequence caches as they are (no padding, no mask).  For the plain KV
cache the rows of a new batch are copied once into buffers with room to grow, right-aligned, with as
little left padding as the longest row allows; row lengths are known on the host, so nothing is
evaluated for it.  The other cache classes use their own merge, extend, filter and extract.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import mlx.core as mx
from mlx_lm.models.cache import BatchKVCache, KVCache

Caches = list[Any]  # one cache object per layer

#: Buffers grow in steps of this many tokens, like mlx-lm's own.
STEP = BatchKVCache.step


def can_batch(caches: Caches) -> bool:
    """Whether every layer's cache can join and leave a batch."""
    return all(_batchable(cache) for cache in caches)


def _batchable(cache: Any) -> bool:
    if hasattr(cache, "caches"):  # CacheList
        return all(_batchable(inner) for inner in cache.caches)
    return callable(getattr(type(cache), "merge", None))


def bytes_per_token(caches: Caches) -> int:
    """Bytes that one more token costs, from caches that hold a few tokens already."""
    total = 0
    for cache in caches:
        inner = getattr(cache, "caches", None)
        if inner is not None:
            total += bytes_per_token(list(inner))
        elif isinstance(getattr(cache, "keys", None), mx.array) and cache.keys.ndim == 4:
            total += cache.nbytes // cache.keys.shape[2]
    return total


def state_arrays(caches: Caches) -> list[Any]:
    """What has to be evaluated for the caches to be up to date."""
    return [cache.state for cache in caches if not cache.empty()]


def merge_single(parts: Sequence[Caches], lengths: Sequence[int]) -> Caches:
    """Batch caches of single-sequence ones, in the order of ``parts``; copies of their data."""
    layers = zip(*parts, strict=True)
    return [
        _join_kv(None, [], 0, list(layer), lengths)
        if all(type(cache) is KVCache for cache in layer)
        else type(layer[0]).merge(list(layer))
        for layer in layers
    ]


def regroup(
    caches: Caches,
    keep: Sequence[int],
    kept_lengths: Sequence[int],
    joining: Sequence[Caches],
    joining_lengths: Sequence[int],
) -> Caches:
    """The batch with only the rows ``keep`` (in that order), then the ``joining`` sequences.

    ``caches`` is a batch of at least two rows and is used up.
    """
    layers = list(zip(*joining, strict=True)) if joining else [()] * len(caches)
    lengths = [*kept_lengths, *joining_lengths]
    result = []
    for cache, new in zip(caches, layers, strict=True):
        if type(cache) is BatchKVCache and all(type(one) is KVCache for one in new):
            longest = max(kept_lengths, default=0)
            result.append(_join_kv(cache, keep, longest, list(new), lengths))
            continue
        if len(keep) < _rows(cache):
            cache.filter(mx.array(list(keep), mx.int32))
        if new:
            cache.extend(type(new[0]).merge(list(new)))
        result.append(cache)
    return result


def _rows(cache: Any) -> int:
    """Batch size of a batch cache."""
    inner = getattr(cache, "caches", None)
    if inner is not None:
        return _rows(inner[0])
    if hasattr(cache, "batch_size"):
        return int(cache.batch_size)
    return int(cache.offset.shape[0])


def extract(caches: Caches, row: int, length: int) -> Caches:
    """One row as single-sequence caches; the batch itself is left as it is."""
    return [
        _extract_kv(cache, row, length) if type(cache) is BatchKVCache else cache.extract(row)
        for cache in caches
    ]


def _extract_kv(cache: Any, row: int, length: int) -> Any:
    single = KVCache()
    start = cache._idx - length
    single.keys = mx.contiguous(cache.keys[row : row + 1, :, start : cache._idx])
    single.values = mx.contiguous(cache.values[row : row + 1, :, start : cache._idx])
    single.offset = length
    return single


def _join_kv(
    old: Any | None,
    keep: Sequence[int],
    longest_kept: int,
    new: Sequence[Any],
    lengths: Sequence[int],
) -> Any:
    """Rows ``keep`` of ``old`` and the single caches ``new`` in one fresh BatchKVCache."""
    end = max(lengths)
    sample = new[0] if new else old
    batch = BatchKVCache([end - length for length in lengths])
    batch.offset = mx.array(list(lengths), mx.int32)
    batch._idx = end
    capacity = (end // STEP + 1) * STEP  # room for at least one more token
    for name in ("keys", "values"):
        like = getattr(sample, name)
        buffer = mx.zeros((len(lengths), like.shape[1], capacity, like.shape[3]), like.dtype)
        if keep:
            assert old is not None
            rows = getattr(old, name)[:, :, old._idx - longest_kept : old._idx]
            if list(keep) != list(range(rows.shape[0])):
                rows = rows[mx.array(list(keep), mx.int32)]
            buffer[: len(keep), :, end - longest_kept : end] = rows
        for row, cache in enumerate(new, start=len(keep)):
            size = lengths[row]
            buffer[row : row + 1, :, end - size : end] = getattr(cache, name)[:, :, :size]
        setattr(batch, name, buffer)
    return batch
