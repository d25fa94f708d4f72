"""Drawing the next token of every row of a batch in one graph.

The stages and their order are in docs/sampling.md.  Bias, masks and penalties change the logits;
then the rows are grouped by what their own settings need, and each group filters and draws.  So a
stage that nobody uses is not in the graph, and a row never depends on its neighbours: every group
has a shape that its rows' own settings decide.

A draw is the inverse of the cumulated weights at one uniform number, which is a pure function of
(seed, position).
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final

import mlx.core as mx
import numpy as np

from models.mlx.sampler_filters import (
    LOG2E,
    MIN_TEMPERATURE,
    Nucleus,
    PLess,
    TopNSigma,
    Typical,
    Xtc,
    column,
    top_columns,
    weights_of,
)
from models.mlx.sampler_history import DryPenalty, Penalties
from models.mlx.sampler_logprobs import LogprobArrays
from models.mlx.sampler_random import DRAW, XTC, uniforms
from models.sampling import SamplingParams

# Rows with a top_k up to these are cut to that many candidates, and only those are sorted.
CANDIDATES: Final = (64, 256)
MAX_LOGPROBS: Final = 20

Masks = Mapping[int, "np.ndarray[Any, Any]"]


@dataclass(slots=True)
class Draw:
    """``tokens`` [B] uint32; nothing is evaluated."""

    tokens: mx.array
    logprobs: LogprobArrays | None = None


def check_params(params: SamplingParams, vocab_size: int) -> str | None:
    """Why these settings cannot be used, or None."""
    for name in ("temperature", "top_p", "min_p", "top_n_sigma", "repetition_penalty"):
        value = getattr(params, name)
        if not math.isfinite(value) or value < 0:
            return f"{name} is {value}, which is not a number of at least 0"
    for name in ("frequency_penalty", "presence_penalty", "dry_multiplier", "xtc_probability"):
        if not math.isfinite(getattr(params, name)):
            return f"{name} is not finite"
    if params.repetition_penalty == 0:
        return "repetition_penalty is 0"
    if not (math.isfinite(params.dry_base) and params.dry_base > 0):
        return f"dry_base is {params.dry_base}, which is not a positive number"
    if not 0 < params.typical_p <= 1:
        return f"typical_p is {params.typical_p}, which is not in (0, 1]"
    if params.top_k < 0:
        return f"top_k is {params.top_k}, which is negative"
    if not 0 <= params.seed < 1 << 64:
        return f"the seed {params.seed} does not fit into 64 bits"
    if params.logprobs is not None and not 0 <= params.logprobs <= MAX_LOGPROBS:
        return f"logprobs is {params.logprobs}, which is not in 0 to {MAX_LOGPROBS}"
    if any(math.isnan(bias) for _, bias in params.logit_bias):
        return "a logit_bias is not a number"
    banned = {one for one, bias in params.logit_bias if bias == -math.inf and 0 <= one < vocab_size}
    if len(banned | set(params.end_ids)) >= vocab_size:
        return "the logit_bias forbids every token"
    return None


@dataclass(frozen=True, slots=True)
class _Need:
    """What decides the group of a row.  ``candidates`` 0: every token is looked at."""

    greedy: bool = False
    sigma: bool = False
    p_less: bool = False
    typical: bool = False
    candidates: int = 0
    nucleus: bool = False
    xtc: bool = False


def _need(params: SamplingParams, vocab_size: int) -> _Need:
    if params.greedy:
        return _Need(greedy=True)
    top_k = params.top_k if params.top_k < vocab_size else 0  # as many as there are: off
    candidates = next((min(one, vocab_size) for one in CANDIDATES if 0 < top_k <= one), 0)
    return _Need(
        sigma=params.top_n_sigma > 0,
        p_less=params.p_less,
        typical=params.typical_p < 1,
        candidates=candidates,
        nucleus=not candidates and (top_k > 0 or params.top_p < 1),
        xtc=params.xtc_probability > 0 and params.xtc_threshold <= 0.5,
    )


class _Group:
    """Rows that are drawn the same way.  ``rows`` None: all rows of the batch, in order."""

    def __init__(
        self, need: _Need, rows: list[int], params: list[SamplingParams], batch: int, width: int
    ) -> None:
        self.need = need
        self.index = np.asarray(rows)
        self.rows = None if len(rows) == batch else mx.array(rows, dtype=mx.uint32)
        if need.greedy:
            return
        self._exponent = column([LOG2E / max(one.temperature, MIN_TEMPERATURE) for one in params])
        # A minimum of 1 keeps the best tokens only; log(0) = -inf keeps everything.
        self._has_min_p = any(one.min_p > 0 for one in params)
        self._log_min_p = column(
            [math.log(min(one.min_p, 1.0)) if one.min_p > 0 else -math.inf for one in params]
        )
        self._filters: list[TopNSigma | PLess | Typical] = []
        if need.sigma:
            self._filters.append(TopNSigma(params))
        if need.p_less:
            self._filters.append(PLess(params))
        if need.typical:
            self._filters.append(Typical(params))
        self._nucleus = Nucleus(params, width) if need.nucleus else None
        if need.candidates:
            self._top_k = mx.array([one.top_k for one in params])[:, None]
            self._top_p = column([one.top_p if one.top_p < 1 else 2.0 for one in params])
            self._has_top_p = any(one.top_p < 1 for one in params)
            self._rank = mx.arange(need.candidates)[None]
        self._xtc = Xtc(params) if need.xtc else None
        self.xtc_probability = np.asarray([one.xtc_probability for one in params], np.float32)

    def draw(self, logits: mx.array, uniform: mx.array | None, fires: mx.array | None) -> mx.array:
        """[B, V] edited logits, [B] uniform numbers, [g] XTC coins -> [g] token ids."""
        chosen = logits if self.rows is None else logits[self.rows]
        if self.need.greedy:
            return mx.argmax(chosen, axis=-1)
        assert uniform is not None
        weights, ids = self.weights(chosen, fires)
        cumulated = mx.cumsum(weights, axis=-1)
        point = (uniform if self.rows is None else uniform[self.rows])[:, None]
        place = mx.sum(cumulated <= point * cumulated[:, -1:], axis=-1, keepdims=True)
        if ids is not None:
            place = mx.take_along_axis(ids, place, axis=-1)
        return place[:, 0].astype(mx.uint32)

    def weights(
        self, logits: mx.array, fires: mx.array | None = None
    ) -> tuple[mx.array, mx.array | None]:
        """[g, V] logits -> [g, n] weights, 0 for what is dropped, and [g, n] ids (None: column)."""
        above = logits - mx.max(logits, axis=-1, keepdims=True)
        for one in self._filters:
            above = mx.where(one.keep(above), above, -math.inf)
        if self._filters:  # the best token may have gone
            above = above - mx.max(above, axis=-1, keepdims=True)
        if self.need.candidates:
            return self._ranked(above, fires)
        keep: mx.array | None = None
        if self._nucleus is not None:
            keep = self._nucleus.keep(above)
        if self._has_min_p:
            likely = above >= self._log_min_p
            keep = likely if keep is None else keep & likely
        if self._xtc is not None and fires is not None:
            kept = above > -math.inf if keep is None else keep
            ids = mx.arange(above.shape[-1])[None]
            keep = self._xtc.keep(above, kept, ids, fires)
        weights = mx.power(2.0, above * self._exponent)
        return (weights if keep is None else weights * keep), None

    def _ranked(self, above: mx.array, fires: mx.array | None) -> tuple[mx.array, mx.array]:
        """Candidates in falling order, so that every filter keeps a beginning of at least one."""
        ids = top_columns(above, self.need.candidates)
        values = mx.take_along_axis(above, ids, axis=-1)
        order = mx.argsort(-values, axis=-1)
        ids = mx.take_along_axis(ids, order, axis=-1)
        values = mx.take_along_axis(values, order, axis=-1)
        keep = self._rank < self._top_k
        if self._has_top_p:
            mass = weights_of(values) * keep
            before = mx.cumsum(mass, axis=-1, inclusive=False)
            total = mx.sum(mass, axis=-1, keepdims=True)
            keep = keep & ((before < self._top_p * total) | (self._rank == 0))
        if self._has_min_p:
            keep = keep & (values >= self._log_min_p)
        if self._xtc is not None and fires is not None:
            keep = self._xtc.keep(values, keep, ids.astype(mx.int64), fires)
        return mx.power(2.0, values * self._exponent) * keep, ids


class _Bias:
    """Numbers added to single logits; end tokens are held back while an answer is too short."""

    def __init__(
        self, params: Sequence[SamplingParams], generated: Sequence[int], vocab_size: int
    ) -> None:
        triples = [
            (row, one, bias)
            for row, item in enumerate(params)
            for one, bias in item.logit_bias
            if 0 <= one < vocab_size
        ]
        self._fixed = _Sparse(triples) if triples else None
        self._generated = list(generated)
        self._held = [
            (row, item.min_tokens, item.end_ids)
            for row, item in enumerate(params)
            if item.min_tokens > 0 and item.end_ids
        ]
        self._cached: tuple[tuple[int, ...], _Sparse | None] = ((), None)

    def apply(self, logits: mx.array) -> mx.array:
        if self._fixed is not None:
            logits = self._fixed.add_to(logits)
        if self._held:
            rows = tuple(row for row, least, _ in self._held if self._generated[row] < least)
            if rows != self._cached[0]:
                ids = {row: end_ids for row, _, end_ids in self._held}
                triples = [(row, one, -math.inf) for row in rows for one in ids[row]]
                self._cached = rows, _Sparse(triples) if triples else None
            held = self._cached[1]
            if held is not None:
                logits = held.add_to(logits)
        return logits

    def advance(self) -> None:
        self._generated = [count + 1 for count in self._generated]


class _Sparse:
    def __init__(self, triples: Sequence[tuple[int, int, float]]) -> None:
        self._rows = mx.array([row for row, _, _ in triples], dtype=mx.uint32)
        self._ids = mx.array([one for _, one, _ in triples], dtype=mx.uint32)
        self._values = mx.array([value for _, _, value in triples], dtype=mx.float32)

    def add_to(self, logits: mx.array) -> mx.array:
        return logits.at[self._rows, self._ids].add(self._values)


class BatchSampler:
    """Draws for one composition of a batch; the arrays of its settings are made once.

    ``histories``: all tokens of each row so far, the last one being the input of the next decode;
    only read for rows whose settings read them.  ``generated``: how many of them were drawn.
    """

    def __init__(
        self,
        params: Sequence[SamplingParams],
        vocab_size: int,
        *,
        histories: Sequence[Sequence[int]] | None = None,
        generated: Sequence[int] | None = None,
    ) -> None:
        self._seeds = np.array([item.seed for item in params], dtype=np.uint64)
        self._bias = _Bias(params, generated or [0] * len(params), vocab_size)
        self._penalties: list[Penalties | DryPenalty] = []
        for kind, rows in (
            (Penalties, [row for row, item in enumerate(params) if item.penalises]),
            (DryPenalty, [row for row, item in enumerate(params) if item.dry]),
        ):
            if rows:
                assert histories is not None
                assert all(len(histories[row]) for row in rows), "a row has no history"
                chosen = [histories[row] for row in rows]
                self._penalties.append(kind(rows, [params[row] for row in rows], chosen))
        members: dict[_Need, list[int]] = {}
        for row, item in enumerate(params):
            members.setdefault(_need(item, vocab_size), []).append(row)
        self.groups = [
            _Group(need, rows, [params[row] for row in rows], len(params), vocab_size)
            for need, rows in members.items()
        ]
        self._random = any(not group.need.greedy for group in self.groups)
        order = np.argsort(np.concatenate([group.index for group in self.groups]))
        self._order = None if len(self.groups) == 1 else mx.array(order.astype(np.uint32))
        asking = [(row, item.logprobs) for row, item in enumerate(params)]
        self._asking = [(row, count) for row, count in asking if count is not None]

    def draw(self, logits: mx.array, positions: Sequence[int], masks: Masks | None = None) -> Draw:
        """[B, V] logits -> one token per row; the next call goes on from these tokens.

        ``positions`` are the indices of the drawn tokens in their sequences.  ``masks``: [V] bools
        by row, False for tokens that must not be drawn.
        """
        raw = logits
        edited = self.edit(logits, masks)
        places = np.array(positions, dtype=np.uint64)
        uniform = mx.array(uniforms(self._seeds, places, DRAW)) if self._random else None
        drawn = [group.draw(edited, uniform, self._coins(group, places)) for group in self.groups]
        tokens = drawn[0] if self._order is None else mx.concatenate(drawn)[self._order]
        for one in self._penalties:
            one.push(tokens)
        self._bias.advance()
        logprobs = None
        if self._asking:
            rows, counts = zip(*self._asking, strict=True)
            logprobs = LogprobArrays(raw, tokens, rows, counts)
        return Draw(tokens, logprobs)

    def edit(self, logits: mx.array, masks: Masks | None = None) -> mx.array:
        """Bias, masks and penalties, in this order; [B, V] float32."""
        edited = logits if logits.dtype == mx.float32 else logits.astype(mx.float32)
        edited = self._bias.apply(edited)
        if masks:
            rows = mx.array(list(masks), dtype=mx.uint32)
            allowed = mx.array(np.stack(list(masks.values())))
            masked = mx.where(allowed, edited[rows], -math.inf)
            edited = mx.array(edited)
            edited[rows] = masked
        for one in self._penalties:
            edited = one.apply(edited)
        return edited

    def _coins(self, group: _Group, places: np.ndarray[Any, Any]) -> mx.array | None:
        """Which rows XTC works on in this step; None: none, so it is not in the graph."""
        if not group.need.xtc:
            return None
        seeds, rows = self._seeds[group.index], places[group.index]
        fires = uniforms(seeds, rows, XTC) < group.xtc_probability
        return mx.array(fires) if fires.any() else None
