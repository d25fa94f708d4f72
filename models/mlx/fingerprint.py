"""A name for the weights and the layout of the caches they fill."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from dataclasses import asdict
from typing import TYPE_CHECKING, Any, Final

import mlx.core as mx
import numpy as np
from mlx.utils import tree_flatten

if TYPE_CHECKING:
    from models.mlx.load import EngineOptions

#: Changes when kept caches are laid out in another way.
LAYOUT: Final = 1
#: Values that are read of each parameter; reading all of them would double the time of a start.
SAMPLES: Final = 64


def fingerprint(model: Any, config: Mapping[str, Any], options: EngineOptions) -> str:
    """Hexadecimal; different for other weights, another dtype or another kind of cache.

    Of each parameter it covers name, shape, dtype and evenly spread values.  Two models that differ
    in nothing else than the values in between (a few edited weights) are taken for the same one.
    """
    digest = hashlib.sha256()
    settings = {key: value for key, value in asdict(options).items() if key != "deterministic"}
    head = {"layout": LAYOUT, "config": dict(config), "options": settings}
    digest.update(json.dumps(head, sort_keys=True, default=str).encode())
    parameters = sorted(tree_flatten(model.parameters()))
    samples = [_sample(array) for _, array in parameters]
    mx.eval(samples)
    for (name, array), sample in zip(parameters, samples, strict=True):
        digest.update(f"{name}{array.shape}{array.dtype}".encode())
        digest.update(np.array(sample).tobytes())
    return digest.hexdigest()


def _sample(array: mx.array) -> mx.array:
    flat = array.reshape(-1)
    chosen = flat[:: max(1, flat.size // SAMPLES)][:SAMPLES]
    if mx.issubdtype(chosen.dtype, mx.floating):
        return chosen.astype(mx.float32)
    return chosen
