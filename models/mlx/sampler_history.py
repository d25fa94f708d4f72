"""Penalties over what a sequence has said so far: repetition, frequency, presence, DRY.

The windows live on the device and move on by the drawn token itself, so that the next step can be
built before this one is evaluated.  Windows are right-aligned: the newest token is in the last
column.  Where a row's window is shorter than the array, ``inside`` is False.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

import mlx.core as mx
import numpy as np

from models.sampling import WHOLE, SamplingParams

# Windows up to this are counted by comparing all pairs, longer ones by a pass over the vocabulary.
PAIRS: Final = 128
# No penalty is larger: beyond it a token is out of the question anyway, and infinities breed NaN.
MAX_PENALTY: Final = 1e9


class _Window:
    """[r, N] latest tokens of some rows of the batch, N the longest of their windows.

    ``most`` None: a row wants everything, so N grows by one per token.
    """

    def __init__(
        self, rows: Sequence[int], windows: Sequence[int], histories: Sequence[Sequence[int]]
    ) -> None:
        self.rows = mx.array(list(rows), dtype=mx.uint32)
        whole = WHOLE in windows
        longest = max(len(history) for history in histories)
        self.most = None if whole else max(windows)
        width = longest if self.most is None else min(self.most, longest)
        tokens = np.zeros((len(rows), width), dtype=np.uint32)
        inside = np.zeros((len(rows), width), dtype=np.bool_)
        for row, history in enumerate(histories):
            count = min(len(history), width)
            # What stands before the history repeats its newest token, which is in every window.
            tokens[row] = history[-1]
            tokens[row, width - count :] = history[len(history) - count :]
            inside[row, width - count :] = True
        self.tokens = mx.array(tokens)
        self.real = mx.array(inside)
        # A row's own window, where it is shorter than the widest.
        self.limits = mx.array([[2**31 - 1 if one == WHOLE else one] for one in windows])
        self.same = len(set(windows)) == 1

    @property
    def width(self) -> int:
        return int(self.tokens.shape[1])

    def inside(self) -> mx.array:
        """[r, N]: real tokens within the row's own window."""
        if self.same:
            return self.real
        age = mx.arange(self.width, 0, -1)[None]
        return self.real & (age <= self.limits)

    def push(self, drawn: mx.array) -> None:
        """``drawn`` [B] tokens of the whole batch."""
        newest = drawn[self.rows][:, None]
        start = 1 if self.most is not None and self.width >= self.most else 0
        self.tokens = mx.concatenate([self.tokens[:, start:], newest], axis=1)
        true = mx.ones(newest.shape, dtype=mx.bool_)
        self.real = mx.concatenate([self.real[:, start:], true], axis=1)


def _column(values: Sequence[float]) -> mx.array:
    return mx.array(np.asarray(values, dtype=np.float32)[:, None])


class Penalties:
    """Repetition (z > 0: z / r, else z * r, once per distinct token), frequency and presence
    (z - f * count - q where count > 0)."""

    def __init__(
        self,
        rows: Sequence[int],
        params: Sequence[SamplingParams],
        histories: Sequence[Sequence[int]],
    ) -> None:
        self._window = _Window(rows, [one.penalty_window for one in params], histories)
        self._repetition = _column([one.repetition_penalty for one in params])
        self._frequency = _column([one.frequency_penalty for one in params])
        self._presence = _column([one.presence_penalty for one in params])
        self._counts = any(one.frequency_penalty or one.presence_penalty for one in params)

    def apply(self, logits: mx.array) -> mx.array:
        """[B, V] -> [B, V]"""
        window = self._window
        rows = window.rows[:, None]
        counts = self._count(logits.shape[1])
        values = logits[rows, window.tokens]
        changed = mx.where(values > 0, values / self._repetition, values * self._repetition)
        if self._counts:
            changed = changed - self._frequency * counts - self._presence
        changed = mx.where(counts > 0, changed, values)
        # Several columns with one token write one and the same value.
        edited = mx.array(logits)
        edited[rows, window.tokens] = changed
        return edited

    def _count(self, vocab: int) -> mx.array:
        """[r, N] float32: how often each token of the array is in its row's window."""
        window = self._window
        inside = window.inside().astype(mx.float32)
        if window.width <= PAIRS:
            equal = window.tokens[:, :, None] == window.tokens[:, None, :]
            return mx.sum(equal * inside[:, None, :], axis=-1)
        rows = mx.arange(inside.shape[0])[:, None]
        totals = mx.zeros((inside.shape[0], vocab)).at[rows, window.tokens].add(inside)
        return totals[rows, window.tokens]

    def push(self, drawn: mx.array) -> None:
        self._window.push(drawn)


class DryPenalty:
    """Tokens that would prolong a repetition: multiplier * base**(n - allowed) for n > allowed.

    n is the length of the longest match that ends at some earlier position and at the newest token,
    without a breaker in it.  It is kept for all positions at once: when a token comes, the match at
    each position that holds the same token is one longer than the one before it was, and all others
    are 0.
    """

    def __init__(
        self,
        rows: Sequence[int],
        params: Sequence[SamplingParams],
        histories: Sequence[Sequence[int]],
    ) -> None:
        self._window = _Window(rows, [one.dry_window for one in params], histories)
        self._multiplier = _column([one.dry_multiplier for one in params])
        self._base = _column([one.dry_base for one in params])
        self._allowed = _column([float(one.dry_allowed_length) for one in params])
        most = max(len(one.dry_breakers) for one in params)
        breakers = np.full((len(rows), max(most, 1)), -1, dtype=np.int64)
        for row, one in enumerate(params):
            breakers[row, : len(one.dry_breakers)] = one.dry_breakers
        self._breakers = mx.array(breakers)
        width = self._window.width
        runs = np.zeros((len(rows), width), dtype=np.float32)
        for row, (history, one) in enumerate(zip(histories, params, strict=True)):
            found = match_lengths(history, frozenset(one.dry_breakers))
            count = min(len(found), width)
            runs[row, width - count :] = found[len(found) - count :]
        self._runs = mx.array(runs)

    def apply(self, logits: mx.array) -> mx.array:
        """[B, V] -> [B, V]"""
        window = self._window
        if window.width < 2:
            return logits
        # A match may not reach behind the beginning of the row's window.
        reach = mx.cumsum(window.inside().astype(mx.float32), axis=1)
        length = mx.minimum(self._runs, reach)[:, :-1]
        excess = length - self._allowed
        penalty = mx.minimum(self._multiplier * mx.power(self._base, excess), MAX_PENALTY)
        penalty = mx.where(excess > 0, penalty, 0.0)
        followers = window.tokens[:, 1:]
        rows = mx.arange(penalty.shape[0])[:, None]
        totals = mx.zeros((penalty.shape[0], logits.shape[1]))
        totals = totals.at[rows, followers].maximum(penalty)
        edited = mx.array(logits)
        edited[window.rows] = logits[window.rows] - totals
        return edited

    def push(self, drawn: mx.array) -> None:
        window = self._window
        newest = drawn[window.rows][:, None]
        before = window.width
        window.push(drawn)
        breaks = mx.any(self._breakers == newest.astype(mx.int64), axis=1, keepdims=True)
        nothing = mx.zeros(newest.shape)
        # Where the array slid, its columns already stand one position further.
        shifted = (
            self._runs if window.width == before else mx.concatenate([nothing, self._runs], axis=1)
        )
        same = (window.tokens == newest) & window.real & ~breaks
        runs = mx.where(same, shifted + 1.0, 0.0)
        self._runs = mx.concatenate([runs[:, :-1], nothing], axis=1)


def match_lengths(
    history: Sequence[int], breakers: frozenset[int]
) -> np.ndarray[tuple[int], np.dtype[np.float32]]:
    """For each position: how long a match ends there and at the newest token; 0 at the newest."""
    tokens = np.asarray(history, dtype=np.int64)
    newest = len(tokens) - 1
    lengths = np.zeros(len(tokens), dtype=np.float32)
    ends = np.flatnonzero(tokens[:-1] == tokens[-1]) if len(tokens) > 1 else np.zeros(0, np.int64)
    back = 0
    while len(ends) and int(tokens[newest - back]) not in breakers:
        lengths[ends] += 1
        back += 1
        ends = ends[ends - back >= 0]
        ends = ends[tokens[ends - back] == tokens[newest - back]]
    return lengths
