"""Filters: which tokens may be drawn.  They look at the untempered distribution, p_less excepted.

All work on [g, n] logits relative to the best token of each row (``above`` <= 0) and give a mask.
MLX's CPU exponential takes about four times as long as its power function, so exp(x) is written as
2**(x * log2 e) throughout.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Final

import mlx.core as mx
import numpy as np

from models.sampling import SamplingParams

LOG2E: Final = math.log2(math.e)
OFF: Final = 1e30  # a factor or bound that nothing reaches
# Below this a temperature is as good as greedy, and its reciprocal would overflow float32.
MIN_TEMPERATURE: Final = 1e-6
# Columns per block in the search for candidates.
BLOCK: Final = 64


def column(values: Sequence[float]) -> mx.array:
    return mx.array(np.asarray(values, dtype=np.float32)[:, None])


def weights_of(above: mx.array) -> mx.array:
    """exp(above): probabilities up to a factor."""
    return mx.power(2.0, above * LOG2E)


class TopNSigma:
    """Keep z >= max - n * sigma, sigma the population deviation of the finite logits."""

    def __init__(self, params: Sequence[SamplingParams]) -> None:
        self._n = column([one.top_n_sigma for one in params])

    def keep(self, above: mx.array) -> mx.array:
        finite = above > -math.inf
        count = mx.sum(finite, axis=-1, keepdims=True)
        values = mx.where(finite, above, 0.0)
        mean = mx.sum(values, axis=-1, keepdims=True) / count
        spread = mx.where(finite, above - mean, 0.0)
        sigma = mx.sqrt(mx.sum(spread * spread, axis=-1, keepdims=True) / count)
        return above >= -self._n * sigma


class PLess:
    """Keep p >= sum of p**2 of the tempered distribution; the best one always."""

    def __init__(self, params: Sequence[SamplingParams]) -> None:
        self._exponent = column([LOG2E / max(one.temperature, MIN_TEMPERATURE) for one in params])

    def keep(self, above: mx.array) -> mx.array:
        weights = mx.power(2.0, above * self._exponent)
        total = mx.sum(weights, axis=-1, keepdims=True)
        # p >= sum p**2 with p = w / total, times total.
        squares = mx.sum(weights * weights, axis=-1, keepdims=True) / total
        return (weights >= squares) | (above == 0.0)


class Typical:
    """Keep the tokens whose surprise is nearest to the entropy, until their mass reaches tau."""

    def __init__(self, params: Sequence[SamplingParams]) -> None:
        self._tau = column([one.typical_p for one in params])

    def keep(self, above: mx.array) -> mx.array:
        weights = weights_of(above)
        total = mx.sum(weights, axis=-1, keepdims=True)
        masses = weights / total
        log_total = mx.log(total)
        # -ln p = log_total - above; a mass of 0 adds nothing to the entropy.
        surprise = mx.where(above > -math.inf, log_total - above, 0.0)
        entropy = mx.sum(masses * surprise, axis=-1, keepdims=True)
        distance = mx.where(above > -math.inf, mx.abs(surprise - entropy), math.inf)
        order = mx.argsort(distance, axis=-1)
        sorted_masses = mx.take_along_axis(masses, order, axis=-1)
        before = mx.cumsum(sorted_masses, axis=-1, inclusive=False)
        kept = mx.maximum(mx.sum(before < self._tau, axis=-1, keepdims=True), 1)
        last = mx.take_along_axis(order, kept - 1, axis=-1)
        # Tokens as far from the entropy as the last one are kept with it.
        return distance <= mx.take_along_axis(distance, last, axis=-1)


class Nucleus:
    """top_k, top_p and min_p over the whole vocabulary, by the value at the cut.

    Tokens that equal the last kept one are kept with it.
    """

    def __init__(self, params: Sequence[SamplingParams], width: int) -> None:
        self._top_k = mx.array([min(one.top_k or width, width) for one in params])[:, None]
        # The rounded sum of all probabilities may pass 1.
        self._top_p = column([one.top_p if one.top_p < 1 else OFF for one in params])

    def keep(self, above: mx.array) -> mx.array:
        falling = -mx.sort(-above, axis=-1)
        rank = mx.arange(above.shape[-1])[None]
        mass = weights_of(falling) * (rank < self._top_k)
        before = mx.cumsum(mass, axis=-1, inclusive=False)
        total = mx.sum(mass, axis=-1, keepdims=True)
        inside = (before < self._top_p * total) & (rank < self._top_k)
        kept = mx.maximum(mx.sum(inside, axis=-1, keepdims=True), 1)
        return above >= mx.take_along_axis(falling, kept - 1, axis=-1)


class Xtc:
    """Of the tokens with p >= threshold drop all but the least likely, when there are two or more.

    ``fires`` [g] tells for which rows the coin fell so in this step.  Of equally unlikely ones all
    stay.
    """

    def __init__(self, params: Sequence[SamplingParams]) -> None:
        self._threshold = column([one.xtc_threshold for one in params])
        most = max(len(one.xtc_protected) for one in params)
        ids = np.full((len(params), max(most, 1)), -1, dtype=np.int64)
        for row, one in enumerate(params):
            ids[row, : len(one.xtc_protected)] = one.xtc_protected
        self._protected = mx.array(ids)

    def keep(self, above: mx.array, kept: mx.array, ids: mx.array, fires: mx.array) -> mx.array:
        """``ids`` [g, n] or [1, n] are the token ids of the columns."""
        weights = weights_of(above) * kept
        chances = weights / mx.sum(weights, axis=-1, keepdims=True)
        likely = (chances >= self._threshold) & kept
        least = mx.min(mx.where(likely, chances, math.inf), axis=-1, keepdims=True)
        drop = likely & (chances > least) & fires[:, None]
        for place in range(self._protected.shape[1]):
            drop = drop & (ids != self._protected[:, place : place + 1])
        return kept & ~drop


def top_columns(logits: mx.array, count: int) -> mx.array:
    """Columns of the ``count`` largest values of each row, in any order.

    The largest values lie in the blocks with the largest maxima, so only those are searched: a
    pass for block maxima costs a tenth of a partition of the whole row.
    """
    rows, width = logits.shape
    if count >= width:
        return mx.broadcast_to(mx.arange(width, dtype=mx.uint32)[None], logits.shape)
    if width % BLOCK or width < 4 * count * BLOCK:
        return mx.argpartition(logits, width - count, axis=-1)[:, width - count :]
    blocks = width // BLOCK
    maxima = mx.max(logits.reshape(rows, blocks, BLOCK), axis=-1)
    best = mx.argpartition(maxima, blocks - count, axis=-1)[:, blocks - count :]
    columns = best[:, :, None] * BLOCK + mx.arange(BLOCK, dtype=mx.uint32)
    columns = columns.reshape(rows, count * BLOCK)
    values = mx.take_along_axis(logits, columns, axis=-1)
    inside = mx.argpartition(values, count * BLOCK - count, axis=-1)[:, count * BLOCK - count :]
    return mx.take_along_axis(columns, inside, axis=-1)
