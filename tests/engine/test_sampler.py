"""The sampler against a plain float64 computation."""

from __future__ import annotations

from typing import Any

import mlx.core as mx
import numpy as np
import pytest

from models.mlx.sampler import BatchSampler, _Sampled, _top, check_params, uniforms
from models.sampling import GREEDY, SamplingParams

pytestmark = pytest.mark.mlx

OFF = {"temperature": 1.0, "top_k": 0, "top_p": 1.0, "min_p": 0.0}
SETTINGS = [
    SamplingParams(**OFF),
    SamplingParams(),
    SamplingParams(**{**OFF, "temperature": 0.3}),
    SamplingParams(**{**OFF, "top_k": 2}),
    SamplingParams(**{**OFF, "top_k": 64}),
    SamplingParams(**{**OFF, "top_k": 65}),
    SamplingParams(**{**OFF, "top_k": 256}),
    SamplingParams(**{**OFF, "top_k": 300}),
    SamplingParams(**{**OFF, "top_k": 10**9}),
    SamplingParams(**{**OFF, "top_p": 0.9}),
    SamplingParams(**{**OFF, "top_p": 0.0}),
    SamplingParams(**{**OFF, "top_p": 0.5, "temperature": 2.0}),
    SamplingParams(**{**OFF, "min_p": 0.2}),
    SamplingParams(**{**OFF, "min_p": 1.0}),
    SamplingParams(**{**OFF, "min_p": 7.0, "top_k": 5}),
    SamplingParams(temperature=1.7, top_k=20, top_p=0.8, min_p=0.02),
    SamplingParams(temperature=1e-30, top_k=30, top_p=0.9, min_p=0.0),
]


def reference(logits: np.ndarray[Any, Any], params: SamplingParams) -> np.ndarray[Any, Any]:
    """Probabilities of one row, by the definition of each filter."""
    z = logits.astype(np.float64)
    p = np.exp(z - z.max())
    p /= p.sum()
    order = np.argsort(-z, kind="stable")
    if 0 < params.top_k < len(z):
        p[order[params.top_k :]] = 0
        p /= p.sum()
    if params.top_p < 1:
        before = np.cumsum(p[order]) - p[order]
        dropped = before >= params.top_p
        dropped[0] = False
        p[order[dropped]] = 0
    p[p < min(params.min_p, 1.0) * p.max()] = 0
    with np.errstate(under="ignore"):
        tempered = np.exp((z - z.max()) / max(params.temperature, 1e-6)) * (p > 0)
    return np.asarray(tempered / tempered.sum())


def weights_of(sampler: BatchSampler, logits: mx.array) -> np.ndarray[Any, Any]:
    """[B, V] probabilities that the sampler draws from."""
    out = np.zeros(tuple(logits.shape))
    for group in sampler.groups:
        assert isinstance(group, _Sampled)
        weights, ids = group.weights(group.select(logits))
        values = np.array(weights, dtype=np.float64)
        values /= values.sum(axis=-1, keepdims=True)
        for place, row in enumerate(group.index):
            columns = slice(None) if ids is None else np.array(ids)[place]
            out[row, columns] = values[place]
    return out


@pytest.mark.parametrize("width", [50, 512, 16384 + 64])
@pytest.mark.parametrize("scale", [0.5, 4.0])
def test_kept_tokens_and_probabilities(width: int, scale: float) -> None:
    rng = np.random.default_rng(width)
    values = (rng.standard_normal((len(SETTINGS), width)) * scale).astype(np.float32)
    got = weights_of(BatchSampler(SETTINGS, width), mx.array(values))
    for row, params in enumerate(SETTINGS):
        want = reference(values[row], params)
        assert got[row][want == 0].sum() == 0, params
        assert got[row][want > 1e-25].min() > 0, params  # less than that may vanish in float32
        assert np.allclose(got[row], want, rtol=2e-4, atol=1e-7), params


@pytest.mark.parametrize("params", SETTINGS[:10], ids=str)
def test_frequencies(params: SamplingParams) -> None:
    """Chi-square of 20000 draws; the seeds are fixed, so this cannot fail by chance."""
    rng = np.random.default_rng(7)
    width, draws = 512, 20_000
    values = (rng.standard_normal(width) * 2.5).astype(np.float32)
    rows = mx.broadcast_to(mx.array(values)[None], (200, width))
    seeded = [
        SamplingParams(
            temperature=params.temperature,
            top_k=params.top_k,
            top_p=params.top_p,
            min_p=params.min_p,
            seed=1000 + row,
        )
        for row in range(200)
    ]
    sampler = BatchSampler(seeded, width)
    counts = np.zeros(width)
    for position in range(draws // 200):
        counts += np.bincount(np.array(sampler.draw(rows, [position] * 200)), minlength=width)
    expected = reference(values, params) * draws
    assert counts[expected == 0].sum() == 0
    common = expected >= 5
    observed, wanted = counts[common], expected[common]
    rest = expected[~common].sum()
    if rest >= 5:
        observed = np.append(observed, counts[~common].sum())
        wanted = np.append(wanted, rest)
    freedom = len(wanted) - 1
    chi_square = ((observed - wanted) ** 2 / wanted).sum()
    assert chi_square < freedom + 4 * np.sqrt(2 * freedom) + 4


def test_greedy_takes_the_largest() -> None:
    logits = mx.array(np.random.default_rng(1).standard_normal((3, 100)).astype(np.float32))
    sampler = BatchSampler([GREEDY, SamplingParams(top_k=1, temperature=3.0), GREEDY], 100)
    drawn = sampler.draw(logits, [0, 1, 2])
    assert np.array(drawn).tolist() == np.array(logits).argmax(axis=-1).tolist()


def test_a_row_is_the_same_in_every_company() -> None:
    rng = np.random.default_rng(3)
    width = 1000
    params = [
        SamplingParams(
            temperature=float(rng.uniform(0.2, 2)),
            top_k=int(rng.choice([0, 1, 5, 40, 100, 400])),
            top_p=float(rng.choice([0.5, 0.95, 1.0])),
            min_p=float(rng.choice([0.0, 0.05])),
            seed=int(rng.integers(1 << 63)),
        )
        for _ in range(40)
    ]
    # Few distinct values, so that ties are everywhere.
    values = np.round(rng.standard_normal((40, width)) * 3).astype(np.float32)
    positions = [int(item) for item in rng.integers(0, 1000, 40)]
    everyone = np.array(BatchSampler(params, width).draw(mx.array(values), positions))
    for size in (1, 2, 5, 13):
        rows = rng.permutation(40)[:size]
        some = BatchSampler([params[row] for row in rows], width)
        drawn = some.draw(mx.array(values[rows]), [positions[row] for row in rows])
        assert np.array(drawn).tolist() == everyone[rows].tolist()


def test_half_precision_logits() -> None:
    values = mx.array([[1.0, 9.0, 2.0, 3.0]] * 2, dtype=mx.bfloat16)
    drawn = BatchSampler([GREEDY, SamplingParams(temperature=0.01)], 4).draw(values, [0, 0])
    assert np.array(drawn).tolist() == [1, 1]


def test_every_token_has_its_interval() -> None:
    """Two equal tokens: the draw is the first exactly when the number is below one half."""
    numbers = uniforms(np.arange(500, dtype=np.uint64), np.full(500, 3, dtype=np.uint64))
    params = [SamplingParams(**OFF, seed=seed) for seed in range(500)]
    drawn = BatchSampler(params, 2).draw(mx.zeros((500, 2)), [3] * 500)
    assert np.array(drawn).tolist() == (numbers >= 0.5).astype(int).tolist()


def test_uniform_numbers() -> None:
    seeds = np.repeat(np.arange(300, dtype=np.uint64), 300)
    positions = np.tile(np.arange(300, dtype=np.uint64), 300)
    numbers = uniforms(seeds, positions).astype(np.float64)
    assert numbers.min() >= 0.0
    assert numbers.max() < 1.0
    assert abs(numbers.mean() - 0.5) < 4 * (1 / 12 / 90_000) ** 0.5
    table = numbers.reshape(300, 300)
    along = [np.corrcoef(table[:, i], table[:, i + 1])[0, 1] for i in range(299)]
    across = [np.corrcoef(table[i], table[i + 1])[0, 1] for i in range(299)]
    assert abs(np.mean(along)) < 0.02
    assert abs(np.mean(across)) < 0.02
    # The stream of every seed is part of the interface: a seeded request must repeat for ever.
    some = uniforms(np.array([0, 1, 2**63], dtype=np.uint64), np.array([0, 5, 9], dtype=np.uint64))
    assert (some * 2**23).astype(int).tolist() == [7409748, 4997663, 589510]


def test_candidates_are_the_largest() -> None:
    rng = np.random.default_rng(5)
    for width in (64, 1000, 64 * 256, 64 * 300):
        values = np.round(rng.standard_normal((4, width)) * 50).astype(np.float32)
        columns = np.array(_top(mx.array(values), 64))
        for row in range(4):
            assert len(set(columns[row].tolist())) == 64
            got = np.sort(values[row][columns[row]])
            assert np.array_equal(got, np.sort(values[row])[-64:])


def test_settings_are_checked() -> None:
    for params in SETTINGS:
        assert check_params(params) is None
    assert "temperature" in str(check_params(SamplingParams(temperature=-1.0)))
    assert "min_p" in str(check_params(SamplingParams(min_p=float("inf"))))
    assert "top_k" in str(check_params(SamplingParams(top_k=-2)))
    assert "seed" in str(check_params(SamplingParams(seed=1 << 64)))
