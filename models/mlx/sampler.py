"""Drawing one token per row of a batch, in one graph.

Each draw is a pure function of the row's own logits, its parameters and (seed, position): rows are
grouped by what they need, and within a group every operation works along a row, so neighbours never
change a row's result.  The filters look at the untempered distribution, in the order top_k, top_p
(of the mass that top_k kept), min_p; the temperature scales only the draw.  The likeliest token
always survives.

No compiled functions and no global random state are used: compilation would call a C++ compiler on
the CPU backend, and a global state would make a row depend on its neighbours.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import mlx.core as mx

from models.sampling import SamplingParams

_MASK64 = 2**64 - 1
_UNIFORM_BITS = 23  # so that u * total stays below total in float32

#: Widths to which a row's top_k is rounded up.  A row's width depends on its own k alone.
TOP_K_WIDTHS = (64, 256, 1024)
#: Below this a temperature acts as the limit does; float32 would otherwise divide by zero.
MIN_TEMPERATURE = 1e-6


def uniform(seed: int, position: int) -> float:
    """A number in [0, 1) with 23 bits, from the counter-based generator SplitMix64.

    Source of the constants: Steele, Lea, Flood, "Fast splittable pseudorandom number generators"
    (2014).  The seed is mixed once by itself, so that seeds n and n + 1 share no sequence.
    """
    return (_mix(_mix(seed) + position) >> (64 - _UNIFORM_BITS)) * 2.0**-_UNIFORM_BITS


def _mix(value: int) -> int:
    x = (value + 0x9E3779B97F4A7C15) & _MASK64
    x = ((x ^ (x >> 30)) * 0xBF58476D1CE4E5B9) & _MASK64
    x = ((x ^ (x >> 27)) * 0x94D049BB133111EB) & _MASK64
    return x ^ (x >> 31)


@dataclass(slots=True)
class _Group:
    """Rows that are drawn together.  ``width`` 0: without sorting; V: full sort; None: greedy."""

    width: int | None
    rows: list[int]
    index: mx.array | None  # None when the group is the whole batch
    inv_temperature: mx.array  # this and the following: [n, 1]
    top_k: mx.array
    top_p: mx.array
    min_p: mx.array


class BatchSampler:
    """Built once per composition of a batch; the parameter arrays are reused in every step."""

    def __init__(self, params: Sequence[SamplingParams], vocab_size: int) -> None:
        self._params = tuple(params)
        self._vocab = vocab_size
        groups: dict[int | None, list[int]] = {}
        for row, one in enumerate(self._params):
            groups.setdefault(_width(one, vocab_size), []).append(row)
        self._groups = [self._group(width, rows) for width, rows in groups.items()]
        order = [row for group in self._groups for row in group.rows]
        self._restore = None
        if order != sorted(order):
            inverse = sorted(range(len(order)), key=order.__getitem__)
            self._restore = mx.array(inverse, mx.int32)

    def _group(self, width: int | None, rows: list[int]) -> _Group:
        own = [self._params[row] for row in rows]
        limit = self._vocab
        return _Group(
            width=width,
            rows=rows,
            index=None if len(rows) == len(self._params) else mx.array(rows, mx.int32),
            inv_temperature=_column(1.0 / max(p.temperature, MIN_TEMPERATURE) for p in own),
            top_k=mx.array([[p.top_k if 0 < p.top_k < limit else limit] for p in own], mx.int32),
            top_p=_column(p.top_p for p in own),
            min_p=_column(p.min_p for p in own),
        )

    def draw(self, logits: mx.array, positions: Sequence[int]) -> mx.array:
        """Token ids, int32 [B], for ``logits`` [B, V]; -1 where a row holds a NaN.

        ``positions`` [B] count the tokens that each row has drawn before.  Lazy: nothing is
        evaluated here.
        """
        parts = [self._draw_group(group, logits, positions) for group in self._groups]
        tokens = parts[0] if len(parts) == 1 else mx.concatenate(parts)
        if self._restore is not None:
            tokens = tokens[self._restore]
        broken = mx.isnan(mx.sum(logits, axis=-1))
        return mx.where(broken, -1, tokens)

    def _draw_group(self, group: _Group, logits: mx.array, positions: Sequence[int]) -> mx.array:
        if group.index is not None:
            logits = logits[group.index]
        if group.width is None:
            return mx.argmax(logits, axis=-1).astype(mx.int32)
        logits = logits.astype(mx.float32)
        draws = _column(uniform(self._params[row].seed, positions[row]) for row in group.rows)
        if group.width == 0:
            return _draw_unsorted(group, logits, draws)
        return _draw_sorted(group, logits, draws)


def _width(params: SamplingParams, vocab_size: int) -> int | None:
    if params.greedy:
        return None
    if 0 < params.top_k < vocab_size:
        for width in TOP_K_WIDTHS:
            if params.top_k <= width < vocab_size:
                return width
        return vocab_size
    return 0 if params.top_p >= 1.0 else vocab_size


def _column(values: Iterable[float]) -> mx.array:
    """float32 [n, 1]"""
    return mx.array([[value] for value in values], mx.float32)


def _draw_unsorted(group: _Group, logits: mx.array, draws: mx.array) -> mx.array:
    """No top_k and no top_p: weights in vocabulary order, inverse of their running sum."""
    gap = logits - mx.max(logits, axis=-1, keepdims=True)
    weights = mx.exp(gap * group.inv_temperature)
    weights = mx.where(mx.exp(gap) >= group.min_p, weights, 0.0)
    return _inverse(weights, draws)


def _draw_sorted(group: _Group, logits: mx.array, draws: mx.array) -> mx.array:
    """The ``width`` likeliest tokens in falling order; every filter keeps a prefix of them."""
    width = group.width
    assert width
    if width < logits.shape[-1]:
        # Ascending ids first, so that equal logits are ordered by id whatever the partition did.
        ids = mx.sort(mx.argpartition(-logits, width - 1, axis=-1)[:, :width], axis=-1)
        values = mx.take_along_axis(logits, ids, axis=-1)
        order = mx.argsort(-values, axis=-1)
        ids = mx.take_along_axis(ids, order, axis=-1)
    else:
        ids = mx.argsort(-logits, axis=-1)
    values = mx.take_along_axis(logits, ids, axis=-1)
    gap = values - values[:, :1]
    rank = mx.arange(width)[None]
    mass = mx.where(rank < group.top_k, mx.exp(gap), 0.0)
    running = mx.cumsum(mass, axis=-1)
    kept = (running - mass < group.top_p * running[:, -1:]) & (mass >= group.min_p) & (mass > 0)
    kept = kept | (rank == 0)
    weights = mx.where(kept, mx.exp(gap * group.inv_temperature), 0.0)
    chosen = _inverse(weights, draws)
    return mx.take_along_axis(ids, chosen[:, None], axis=-1)[:, 0].astype(mx.int32)


def _inverse(weights: mx.array, draws: mx.array) -> mx.array:
    """Index of the first running sum above ``draw * total``: never one of weight 0.

    The running sum is taken along the row in order, so what lies behind the last weight changes
    nothing.
    """
    running = mx.cumsum(weights, axis=-1)
    below = running <= draws * running[:, -1:]
    last = weights.shape[-1] - 1
    return mx.minimum(mx.sum(below.astype(mx.int32), axis=-1), last).astype(mx.int32)
