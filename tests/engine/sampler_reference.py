"""Every stage of the sampler as its definition says, one row at a time, in float64."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from models.sampling import WHOLE, SamplingParams

Row = npt.NDArray[np.float64]


def softmax(z: Row, temperature: float = 1.0) -> Row:
    with np.errstate(under="ignore", over="ignore"):
        p = np.exp((z - z.max()) / temperature)
    return np.asarray(p / p.sum())


def window(history: Sequence[int], size: int) -> list[int]:
    return list(history) if size == WHOLE else list(history)[-size:] if size else []


def edited(
    logits: npt.NDArray[Any],
    params: SamplingParams,
    history: Sequence[int] = (),
    generated: int = 0,
) -> Row:
    """Bias, repetition, frequency, presence and DRY."""
    z = logits.astype(np.float64).copy()
    for token, bias in params.logit_bias:
        if 0 <= token < len(z):
            z[token] += bias
    if generated < params.min_tokens:
        z[list(params.end_ids)] = -np.inf
    recent = window(history, params.penalty_window)
    for token in set(recent):
        if z[token] > 0:
            z[token] /= params.repetition_penalty
        else:
            z[token] *= params.repetition_penalty
        z[token] -= params.frequency_penalty * recent.count(token) + params.presence_penalty
    for token, penalty in dry(params, history).items():
        z[token] -= penalty
    return z


def dry(params: SamplingParams, history: Sequence[int]) -> dict[int, float]:
    if params.dry_multiplier <= 0:
        return {}
    tokens = window(history, params.dry_window)
    found: dict[int, float] = {}
    last = len(tokens) - 1
    for place in range(last):
        length = 0
        while (
            place - length >= 0
            and tokens[place - length] == tokens[last - length]
            and tokens[last - length] not in params.dry_breakers
        ):
            length += 1
        if length > params.dry_allowed_length:
            penalty = params.dry_multiplier * params.dry_base ** (
                length - params.dry_allowed_length
            )
            follower = tokens[place + 1]
            found[follower] = max(found.get(follower, 0.0), min(penalty, 1e9))
    return found


def kept(z: Row, params: SamplingParams, *, fires: bool = False) -> npt.NDArray[np.bool_]:
    """Which tokens survive the filters; ties at a cut stay, as in docs/sampling.md."""
    keep = np.isfinite(z)
    if params.top_n_sigma > 0:
        keep &= z >= z.max() - params.top_n_sigma * z[keep].std()
    if params.p_less:
        p = softmax(np.where(keep, z, -np.inf), max(params.temperature, 1e-6))
        keep &= (p >= (p**2).sum()) | (z == z[keep].max())
    if params.typical_p < 1:
        p = softmax(np.where(keep, z, -np.inf))
        with np.errstate(divide="ignore", invalid="ignore"):
            surprise = np.where(p > 0, -np.log(p), 0.0)
        distance = np.where(keep & (p > 0), np.abs(surprise - (p * surprise).sum()), np.inf)
        keep &= distance <= _cut(distance, p, params.typical_p)
    return _truncated(z, keep, params, fires)


def _cut(key: Row, mass: Row, share: float) -> float:
    """The key of the last token that is kept when they come in rising order of it."""
    order = np.argsort(key, kind="stable")
    before = np.cumsum(mass[order]) - mass[order]
    count = max(1, int((before < share).sum()))
    return float(key[order[count - 1]])


def _truncated(
    z: Row, keep: npt.NDArray[np.bool_], params: SamplingParams, fires: bool
) -> npt.NDArray[np.bool_]:
    best = z[keep].max()
    if 0 < params.top_k < keep.sum():
        keep &= z >= np.sort(z[keep])[-params.top_k]
    if params.top_p < 1:
        p = softmax(np.where(keep, z, -np.inf))
        keep &= -z <= _cut(np.where(keep, -z, np.inf), p, params.top_p)
    if params.min_p > 0:
        with np.errstate(divide="ignore"):
            keep &= z - best >= np.log(min(params.min_p, 1.0))
    if fires and params.xtc_threshold <= 0.5:
        p = softmax(np.where(keep, z, -np.inf))
        likely = keep & (p >= params.xtc_threshold)
        if likely.sum() > 1:
            drop = likely & (p > p[likely].min())
            drop[list(params.xtc_protected)] = False
            keep &= ~drop
    return keep


def probabilities(z: Row, params: SamplingParams, *, fires: bool = False) -> Row:
    """What the token is drawn from."""
    keep = kept(z, params, fires=fires)
    return softmax(np.where(keep, z, -np.inf), max(params.temperature, 1e-6))
