"""How much memory KV caches may take, once the weights are loaded."""

from __future__ import annotations

from typing import Any, Final

import mlx.core as mx

from models.mlx.weights import available_memory

# The rest is left to activations, the runtime and everything else on the machine.
CACHE_SHARE: Final = 0.8


def kv_budget() -> int | None:
    """Bytes, or None where the machine does not tell.  Call it after loading the weights."""
    free = available_memory() if _on_cpu() else _available_on_device()
    return None if free is None else max(0, int(free * CACHE_SHARE))


def kv_bytes_per_token(caches: list[Any]) -> int:
    """Size of one token's keys and values in used single-sequence caches, over all layers.

    Layers whose state does not grow count as nothing, sliding windows as if they always grew.
    """
    return sum(_per_token(cache) for cache in caches)


def state_bytes(caches: list[Any]) -> int:
    """Size of what used single-sequence caches hold whatever their length (recurrent state)."""
    total = 0
    for cache in caches:
        parts = getattr(cache, "caches", None)
        if parts is not None:
            total += state_bytes(parts)
        elif _per_token(cache) == 0:
            state = getattr(cache, "cache", None)
            held = state if isinstance(state, list | tuple) else ()
            total += sum(int(item.nbytes) for item in held if isinstance(item, mx.array))
    return total


def _per_token(cache: Any) -> int:
    parts = getattr(cache, "caches", None)
    if parts is not None:
        return sum(_per_token(part) for part in parts)
    total = 0
    for side in (getattr(cache, "keys", None), getattr(cache, "values", None)):
        for array in side if isinstance(side, (list, tuple)) else (side,):
            if array is not None:
                total += int(array.nbytes) // int(array.shape[2])
    return total


def _on_cpu() -> bool:
    return bool(mx.default_device() == mx.Device(mx.cpu))


def _available_on_device() -> int | None:
    size = mx.device_info().get("max_recommended_working_set_size")
    if size is None:
        size = mx.device_info().get("memory_size")
    return None if size is None else int(size) - int(mx.get_active_memory())
