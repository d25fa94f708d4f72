"""Faster attention and SwiGLU for float32 on MLX's CPU backend.

MLX's CPU exponential is scalar code and takes about four times as long as its power function, which
makes the softmax and the SiLU the dearest elementwise work of a step.  Both are written here with
2**x, since exp(x) = 2**(x * log2 e); the factor goes into the attention scale, where it costs
nothing.  The values agree with MLX's to a few units in the last place.

The functions stand in for those that mlx-lm's model modules imported by name.  Whatever they do not
cover (quantised caches, attention sinks, other dtypes) goes to the original.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from typing import Any

import mlx.core as mx
import mlx.nn as nn
from mlx_lm.models import activations, base

LOG2E = 1.4426950408889634
#: Queries of a causal prompt that are computed together; of 32 to 256 this took the least time.
BLOCK = 64

Attention = Callable[..., mx.array]

_original_attention: Attention = base.scaled_dot_product_attention
_original_swiglu: Callable[[mx.array, mx.array], mx.array] = activations.swiglu


def attention(
    queries: mx.array,
    keys: mx.array | tuple[mx.array, ...],
    values: mx.array | tuple[mx.array, ...],
    cache: Any,
    scale: float,
    mask: mx.array | str | None,
    sinks: mx.array | None = None,
) -> mx.array:
    """Scaled dot-product attention; the signature is mlx-lm's.

    queries [B, H, N, D], keys [B, K, L, D], values [B, K, L, E] with H a multiple of K; result
    [B, H, N, E].  The query heads that share a key head go through one matrix product.
    """
    if isinstance(keys, tuple) and isinstance(values, tuple) and queries.shape[2] > 1:
        # The quantised product is computed row by row here; for many rows this is faster.
        keys, values = _dequantized(keys, cache), _dequantized(values, cache)
        if sinks is None and queries.dtype == mx.float32:
            return attention(queries, keys, values, None, scale, mask)
        cache = None
    if sinks is not None or hasattr(cache, "bits") or queries.dtype != mx.float32:
        return _original_attention(
            queries, keys, values, cache=cache, scale=scale, mask=mask, sinks=sinks
        )
    assert isinstance(keys, mx.array)
    assert isinstance(values, mx.array)
    count, length = queries.shape[2], keys.shape[2]
    if isinstance(mask, str) and count > BLOCK:
        # The columns that a block of queries cannot see are never computed, and what is stays in
        # the processor's cache.
        past = length - count
        blocks = [
            _attention(
                queries[:, :, start : start + BLOCK],
                keys[:, :, : past + start + BLOCK],
                values[:, :, : past + start + BLOCK],
                scale,
                mask,
            )
            for start in range(0, count, BLOCK)
        ]
        return mx.concatenate(blocks, axis=2)
    return _attention(queries, keys, values, scale, mask)


def _dequantized(side: tuple[mx.array, ...], cache: Any) -> mx.array:
    packed, scales, biases = side
    plain: mx.array = mx.dequantize(
        packed, scales, biases, group_size=cache.group_size, bits=cache.bits
    )
    return plain


def _attention(
    queries: mx.array, keys: mx.array, values: mx.array, scale: float, mask: mx.array | str | None
) -> mx.array:
    batch, heads, count, width = queries.shape
    groups, length = keys.shape[1], keys.shape[2]
    repeats = heads // groups
    packed = (queries * (scale * LOG2E)).reshape(batch, groups, repeats * count, width)
    scores = packed @ keys.swapaxes(-1, -2)
    if mask is not None:
        grid = scores.reshape(batch, groups, repeats, count, length)
        scores = _masked(grid, mask).reshape(batch, groups, repeats * count, length)
    weights = mx.power(2.0, scores - mx.max(scores, axis=-1, keepdims=True))
    mixed = (weights @ values) / mx.sum(weights, axis=-1, keepdims=True)
    return mixed.reshape(batch, heads, count, values.shape[-1])


def _masked(grid: mx.array, mask: mx.array | str) -> mx.array:
    """``grid`` [B, K, R, N, L] with masked scores at the least finite number (never NaN)."""
    if isinstance(mask, str):
        count, length = grid.shape[-2:]
        allowed: mx.array = base.create_causal_mask(count, length - count)
    else:
        allowed = mask
    if allowed.ndim == 4 and allowed.shape[1] > 1:
        allowed = allowed.reshape(allowed.shape[0], *grid.shape[1:3], *allowed.shape[2:])
    elif allowed.ndim == 4:
        allowed = allowed[:, :, None]
    if allowed.dtype == mx.bool_:
        return mx.where(allowed, grid, mx.finfo(mx.float32).min)
    return grid + allowed * LOG2E


def swiglu(gate: mx.array, x: mx.array) -> mx.array:
    """silu(gate) * x, elementwise."""
    if gate.dtype != mx.float32:
        return _original_swiglu(gate, x)
    return gate * x / (1.0 + mx.power(2.0, gate * -LOG2E))


def install(model: nn.Module) -> None:
    """Use both in the modules that define ``model``'s layers.  Idempotent."""
    _exchange(model, _original_attention, attention)
    _exchange(model, _original_swiglu, swiglu)


def uninstall(model: nn.Module) -> None:
    """Use the originals again, for comparisons."""
    _exchange(model, attention, _original_attention)
    _exchange(model, swiglu, _original_swiglu)


def _exchange(model: nn.Module, old: Callable[..., mx.array], new: Callable[..., mx.array]) -> None:
    for name in {type(module).__module__ for module in model.modules()}:
        namespace = vars(sys.modules[name])
        for key, value in list(namespace.items()):
            if value is old:
                namespace[key] = new
