"""Log-probabilities of drawn tokens and of the likeliest ones, for the rows that ask for them.

They are those of the model's own distribution: log softmax of the raw logits, before bias,
penalties, filters and temperature.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Final

import mlx.core as mx

from models.engine import TokenLogprobs
from models.mlx.sampler_filters import top_columns, weights_of

LOWEST: Final = -9999.0  # stands for minus infinity, which JSON cannot say


class LogprobArrays:
    """Not evaluated until the caller does so with ``arrays``."""

    def __init__(
        self, logits: mx.array, drawn: mx.array, rows: Sequence[int], counts: Sequence[int]
    ) -> None:
        """``logits`` [B, V] raw, ``drawn`` [B]; ``counts``: how many likeliest tokens per row."""
        self._rows = list(rows)
        self._counts = list(counts)
        places = mx.array(self._rows, dtype=mx.uint32)
        chosen = logits if len(self._rows) == logits.shape[0] else logits[places]
        chosen = chosen.astype(mx.float32)
        best = mx.max(chosen, axis=-1, keepdims=True)
        total = best + mx.log(mx.sum(weights_of(chosen - best), axis=-1, keepdims=True))
        own = mx.take_along_axis(chosen, drawn[places][:, None], axis=-1) - total
        self.arrays = [own[:, 0]]
        most = min(max(self._counts), chosen.shape[-1])
        if most:
            ids = top_columns(chosen, most)
            values = mx.take_along_axis(chosen, ids, axis=-1)
            order = mx.argsort(-values, axis=-1)
            self.arrays.append(mx.take_along_axis(ids, order, axis=-1))
            self.arrays.append(mx.take_along_axis(values, order, axis=-1) - total)

    def values(self) -> dict[int, TokenLogprobs]:
        """By row of the batch.  Waits for the arrays."""
        own, *top = [_host(array) for array in self.arrays]
        found = {}
        for place, (row, count) in enumerate(zip(self._rows, self._counts, strict=True)):
            pairs: tuple[tuple[int, float], ...] = ()
            if count and top:
                ids, values = top[0][place], top[1][place]
                pairs = tuple(
                    (int(one), _finite(value))
                    for one, value in zip(ids[:count], values[:count], strict=True)
                )
            found[row] = TokenLogprobs(logprob=_finite(own[place]), top=pairs)
        return found


def _host(array: mx.array) -> Any:
    return array.tolist()


def _finite(value: float) -> float:
    # Rounding may put a certainty a hair above 0.
    return min(max(float(value), LOWEST), 0.0)
