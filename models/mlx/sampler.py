"""Drawing the next token of every row of a batch in one graph.

Filters look at the untempered distribution in the order top_k, top_p, min_p; top_p works on the
distribution renormalised after top_k.  Temperature scales only the draw.  A draw is the inverse
of the cumulated weights at one uniform number, which is a pure function of (seed, position), so a
row never depends on its neighbours: rows are grouped by what their own settings need, and every
group has a shape that their own settings decide.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Final

import mlx.core as mx
import numpy as np
import numpy.typing as npt

from models.sampling import SamplingParams

# Rows with a top_k up to these are cut to that many candidates, and only those are sorted.
CANDIDATES: Final = (64, 256)
# Below this a temperature is as good as greedy, and its reciprocal would overflow float32.
MIN_TEMPERATURE: Final = 1e-6
# exp(x) = 2**(x * LOG2E); MLX's exponential takes about four times as long on the CPU.
LOG2E: Final = math.log2(math.e)
# Columns per block in the search for candidates.
BLOCK: Final = 64

_GOLDEN: Final = 0x9E3779B97F4A7C15
_MIX_1: Final = np.uint64(0xBF58476D1CE4E5B9)
_MIX_2: Final = np.uint64(0x94D049BB133111EB)

Words = npt.NDArray[np.uint64]


def check_params(params: SamplingParams, vocab_size: int = 0) -> str | None:
    """Why these settings cannot be used, or None."""
    for name in ("temperature", "top_p", "min_p"):
        value = getattr(params, name)
        if not math.isfinite(value) or value < 0:
            return f"{name} is {value}, which is not a number of at least 0"
    if params.top_k < 0:
        return f"top_k is {params.top_k}, which is negative"
    if not 0 <= params.seed < 1 << 64:
        return f"the seed {params.seed} does not fit into 64 bits"
    return None


def uniforms(seeds: Words, positions: Words) -> npt.NDArray[np.float32]:
    """One number in [0, 1) per (seed, position), on a grid of 2**-23.

    The grid is coarse enough that the product with any float32 total stays below that total.
    """
    with np.errstate(over="ignore"):
        words = _mix(_mix(seeds) + (positions + np.uint64(1)) * np.uint64(_GOLDEN))
    return (words >> np.uint64(41)).astype(np.float32) * np.float32(2.0**-23)


def _mix(words: Words) -> Words:
    """A bijection of 64-bit words in which every input bit moves about half of the output bits."""
    words = (words ^ (words >> np.uint64(30))) * _MIX_1
    words = (words ^ (words >> np.uint64(27))) * _MIX_2
    return words ^ (words >> np.uint64(31))


def _column(values: Sequence[float]) -> Any:
    return mx.array(np.asarray(values, dtype=np.float32)[:, None])


class _Group:
    """Rows that are drawn the same way.  ``rows`` None: all rows of the batch, in order."""

    def __init__(self, rows: list[int], params: list[SamplingParams], batch: int) -> None:
        self.rows = None if len(rows) == batch else mx.array(rows, dtype=mx.uint32)
        self.index = np.asarray(rows)
        self.params = params

    def select(self, logits: mx.array) -> mx.array:
        chosen = logits if self.rows is None else logits[self.rows]
        return chosen if chosen.dtype == mx.float32 else chosen.astype(mx.float32)

    def draw(self, logits: mx.array, uniform: mx.array | None) -> mx.array:
        raise NotImplementedError


class _Greedy(_Group):
    def draw(self, logits: mx.array, uniform: mx.array | None) -> mx.array:
        chosen = logits if self.rows is None else logits[self.rows]
        return mx.argmax(chosen, axis=-1)


class _Sampled(_Group):
    """``weights`` gives unnormalised weights, 0 for what the filters drop, and their token ids."""

    def __init__(self, rows: list[int], params: list[SamplingParams], batch: int) -> None:
        super().__init__(rows, params, batch)
        self.exponent = _column([LOG2E / max(item.temperature, MIN_TEMPERATURE) for item in params])
        # A minimum of 1 keeps the best tokens only; log(0) = -inf keeps everything.
        self.log_min_p = _column(
            [math.log(min(item.min_p, 1.0)) if item.min_p > 0 else -math.inf for item in params]
        )

    def weights(self, logits: mx.array) -> tuple[mx.array, mx.array | None]:
        """[G, V] logits -> [G, n] weights and [G, n] token ids (None: column = id)."""
        raise NotImplementedError

    def draw(self, logits: mx.array, uniform: mx.array | None) -> mx.array:
        weights, ids = self.weights(self.select(logits))
        cumulated = mx.cumsum(weights, axis=-1)
        point = (uniform if self.rows is None else uniform[self.rows])[:, None]  # type: ignore[index]
        column = mx.sum(cumulated <= point * cumulated[:, -1:], axis=-1, keepdims=True)
        if ids is not None:
            column = mx.take_along_axis(ids, column, axis=-1)
        return column[:, 0].astype(mx.uint32)

    def _tempered(self, above: mx.array, keep: mx.array) -> mx.array:
        """Weights of tokens whose logits lie ``above`` (<= 0) relative to the best one."""
        return mx.where(keep, mx.power(2.0, above * self.exponent), 0.0)


class _Dense(_Sampled):
    """No top_k, no top_p: a threshold needs no order."""

    def weights(self, logits: mx.array) -> tuple[mx.array, mx.array | None]:
        above = logits - mx.max(logits, axis=-1, keepdims=True)
        return self._tempered(above, above >= self.log_min_p), None


class _Ranked(_Sampled):
    """Candidates in falling order, so that every filter keeps a prefix of at least one.

    ``candidates`` is how many columns are sorted: all of them, or a bound of the rows' top_k.
    """

    def __init__(
        self, rows: list[int], params: list[SamplingParams], batch: int, candidates: int
    ) -> None:
        super().__init__(rows, params, batch)
        self.candidates = candidates
        self.rank = mx.arange(candidates)[None]
        self.top_k = mx.array([item.top_k or candidates for item in params])[:, None]
        # The rounded sum of all probabilities may pass 1, so "off" must be out of its reach.
        self.top_p = _column([item.top_p if item.top_p < 1 else 2.0 for item in params])
        self.has_top_p = any(item.top_p < 1 for item in params)

    def weights(self, logits: mx.array) -> tuple[mx.array, mx.array | None]:
        ids = _top(logits, self.candidates)
        values = mx.take_along_axis(logits, ids, axis=-1)
        order = mx.argsort(-values, axis=-1)
        ids = mx.take_along_axis(ids, order, axis=-1)
        values = mx.take_along_axis(values, order, axis=-1)
        above = values - values[:, :1]
        keep = (self.rank < self.top_k) & (above >= self.log_min_p)
        if self.has_top_p:
            mass = mx.where(self.rank < self.top_k, mx.power(2.0, above * LOG2E), 0.0)
            before = mx.cumsum(mass, axis=-1, inclusive=False)
            total = mx.sum(mass, axis=-1, keepdims=True)
            keep = keep & ((before < self.top_p * total) | (self.rank == 0))
        return self._tempered(above, keep), ids


def _top(logits: mx.array, count: int) -> mx.array:
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


@dataclass(slots=True)
class Draw:
    tokens: mx.array
    logprobs: Any = None


class BatchSampler:
    """Draws for one composition of a batch; the arrays of its settings are made once."""

    def __init__(
        self,
        params: Sequence[SamplingParams],
        vocab_size: int,
        *,
        histories: Any = None,
        generated: Any = None,
    ) -> None:
        self._seeds = np.array([item.seed for item in params], dtype=np.uint64)
        members: dict[tuple[str, int], list[int]] = {}
        for row, item in enumerate(params):
            members.setdefault(_need(item, vocab_size), []).append(row)
        self.groups = [
            _group(need, rows, [params[row] for row in rows], len(params))
            for need, rows in members.items()
        ]
        self._random = any(isinstance(group, _Sampled) for group in self.groups)
        order = np.argsort(np.concatenate([group.index for group in self.groups]))
        self._order = None if len(self.groups) == 1 else mx.array(order.astype(np.uint32))

    def draw(self, logits: mx.array, positions: Sequence[int]) -> Draw:
        """[B, V] logits -> [B] token ids (uint32), not evaluated.

        ``positions`` are the indices of the drawn tokens in their sequences.
        """
        uniform = None
        if self._random:
            uniform = mx.array(uniforms(self._seeds, np.array(positions, dtype=np.uint64)))
        drawn = [group.draw(logits, uniform) for group in self.groups]
        return Draw(drawn[0] if self._order is None else mx.concatenate(drawn)[self._order])


def _need(params: SamplingParams, vocab_size: int) -> tuple[str, int]:
    if params.greedy:
        return "greedy", 0
    top_k = params.top_k if params.top_k < vocab_size else 0  # as many as there are: off
    for bound in CANDIDATES:
        if 0 < top_k <= bound:
            return "ranked", min(bound, vocab_size)
    if top_k or params.top_p < 1:
        return "ranked", vocab_size
    return "dense", 0


def _group(
    need: tuple[str, int], rows: list[int], params: list[SamplingParams], batch: int
) -> _Group:
    kind, candidates = need
    if kind == "greedy":
        return _Greedy(rows, params, batch)
    if kind == "dense":
        return _Dense(rows, params, batch)
    return _Ranked(rows, params, batch, candidates)
