"""The sampler against a plain float64 computation."""

from __future__ import annotations

from typing import Any

import mlx.core as mx
import numpy as np
import pytest

from models.mlx.sampler import BatchSampler, check_params
from models.mlx.sampler_filters import top_columns
from models.mlx.sampler_random import uniforms
from models.sampling import GREEDY, WHOLE, SamplingParams
from tests.engine import sampler_reference as reference

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


def weights_of(
    sampler: BatchSampler, logits: mx.array, fires: np.ndarray[Any, Any] | None = None
) -> np.ndarray[Any, Any]:
    """[B, V] probabilities that the sampler draws from; ``fires``: rows on which XTC works."""
    out = np.zeros(tuple(logits.shape))
    for group in sampler.groups:
        assert not group.need.greedy
        chosen = logits if group.rows is None else logits[group.rows]
        coins = mx.array(fires[group.index]) if fires is not None and group.need.xtc else None
        weights, ids = group.weights(chosen, coins)
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
        want = reference.probabilities(values[row].astype(np.float64), params)
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
        counts += np.bincount(
            np.array(sampler.draw(rows, [position] * 200).tokens), minlength=width
        )
    expected = reference.probabilities(values.astype(np.float64), params) * draws
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
    drawn = sampler.draw(logits, [0, 1, 2]).tokens
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
    everyone = np.array(BatchSampler(params, width).draw(mx.array(values), positions).tokens)
    for size in (1, 2, 5, 13):
        rows = rng.permutation(40)[:size]
        some = BatchSampler([params[row] for row in rows], width)
        drawn = some.draw(mx.array(values[rows]), [positions[row] for row in rows]).tokens
        assert np.array(drawn).tolist() == everyone[rows].tolist()


def test_half_precision_logits() -> None:
    values = mx.array([[1.0, 9.0, 2.0, 3.0]] * 2, dtype=mx.bfloat16)
    drawn = BatchSampler([GREEDY, SamplingParams(temperature=0.01)], 4).draw(values, [0, 0]).tokens
    assert np.array(drawn).tolist() == [1, 1]


def test_every_token_has_its_interval() -> None:
    """Two equal tokens: the draw is the first exactly when the number is below one half."""
    numbers = uniforms(np.arange(500, dtype=np.uint64), np.full(500, 3, dtype=np.uint64))
    params = [SamplingParams(**OFF, seed=seed) for seed in range(500)]
    drawn = BatchSampler(params, 2).draw(mx.zeros((500, 2)), [3] * 500).tokens
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
        columns = np.array(top_columns(mx.array(values), 64))
        for row in range(4):
            assert len(set(columns[row].tolist())) == 64
            got = np.sort(values[row][columns[row]])
            assert np.array_equal(got, np.sort(values[row])[-64:])


def test_settings_are_checked() -> None:
    for params in SETTINGS:
        assert check_params(params, 10**6) is None
    assert "temperature" in str(check_params(SamplingParams(temperature=-1.0), 100))
    assert "min_p" in str(check_params(SamplingParams(min_p=float("inf")), 100))
    assert "top_k" in str(check_params(SamplingParams(top_k=-2), 100))
    assert "seed" in str(check_params(SamplingParams(seed=1 << 64), 100))
    assert "forbids" in str(
        check_params(SamplingParams(logit_bias=tuple((i, -np.inf) for i in range(9))), 9)
    )


# The whole chain -------------------------------------------------------------------------------


def one_of(rng: np.random.Generator, *values: Any) -> Any:
    return values[int(rng.integers(len(values)))]


def random_params(rng: np.random.Generator, width: int) -> SamplingParams:
    """Any combination of stages, each switched off half of the time or more."""
    return SamplingParams(
        temperature=float(one_of(rng, 0.3, 1.0, 1.7)),
        seed=int(rng.integers(1 << 63)),
        logit_bias=one_of(rng, (), (), ((3, 5.0), (width + 7, 9.0), (1, -np.inf))),
        min_tokens=one_of(rng, 0, 0, 6),
        end_ids=(2, 5),
        repetition_penalty=float(one_of(rng, 1.0, 1.0, 1.3, 0.8)),
        frequency_penalty=float(one_of(rng, 0.0, 0.0, 0.4, -0.3)),
        presence_penalty=float(one_of(rng, 0.0, 0.0, 0.6)),
        penalty_window=one_of(rng, 0, 4, 20, WHOLE),
        dry_multiplier=float(one_of(rng, 0.0, 0.0, 0.8)),
        dry_base=1.6,
        dry_allowed_length=one_of(rng, 1, 2),
        dry_window=one_of(rng, 9, WHOLE),
        dry_breakers=one_of(rng, (), (1, 4)),
        top_n_sigma=float(one_of(rng, 0.0, 0.0, 1.0)),
        p_less=one_of(rng, False, False, True),
        typical_p=float(one_of(rng, 1.0, 1.0, 0.6)),
        top_k=one_of(rng, 0, 0, 3, 40),
        top_p=float(one_of(rng, 1.0, 1.0, 0.8)),
        min_p=float(one_of(rng, 0.0, 0.0, 0.1)),
        xtc_probability=float(one_of(rng, 0.0, 0.5)),
        xtc_threshold=float(one_of(rng, 0.05, 0.2, 0.5)),
        xtc_protected=one_of(rng, (), (0, 2)),
    )


@pytest.mark.parametrize("seed", range(12))
def test_random_chains_equal_the_definitions(seed: int) -> None:
    """Same support and probabilities within 1e-5, while the histories grow."""
    rng = np.random.default_rng(seed)
    width, rows = int(one_of(rng, 30, 300)), 12
    params = [random_params(rng, width) for _ in range(rows)]
    vocabulary = 6  # few tokens, so that histories repeat
    histories = [rng.integers(0, vocabulary, rng.integers(1, 30)).tolist() for _ in params]
    generated = [int(one_of(rng, 0, 3)) for _ in params]
    sampler = BatchSampler(params, width, histories=histories, generated=generated)
    for _ in range(5):
        values = (rng.standard_normal((rows, width)) * 2).astype(np.float32)
        logits = mx.array(values)
        fires = rng.random(rows) < 0.5
        z = sampler.edit(logits)
        got = weights_of(sampler, z, fires)
        edits = np.array(z)
        for row, one in enumerate(params):
            want = reference.edited(values[row], one, histories[row], generated[row])
            finite = np.isfinite(want)
            assert np.array_equal(finite, np.isfinite(edits[row])), one
            assert np.allclose(edits[row][finite], want[finite], atol=1e-4), one
            active = bool(fires[row]) and one.xtc_probability > 0
            exact = reference.probabilities(edits[row].astype(np.float64), one, fires=active)
            assert (got[row] > 0).any()
            assert np.array_equal(got[row] > 0, exact > 1e-30), one
            assert np.abs(got[row] - exact).max() < 1e-5, one
        tokens = np.array(sampler.draw(logits, [9] * rows).tokens) % vocabulary
        # Go on from tokens of our own choice: the histories have to follow the draw.
        sampler = BatchSampler(
            params,
            width,
            histories=[[*h, int(t)] for h, t in zip(histories, tokens, strict=True)],
            generated=[g + 1 for g in generated],
        )
        histories = [[*h, int(t)] for h, t in zip(histories, tokens, strict=True)]
        generated = [g + 1 for g in generated]


@pytest.mark.parametrize("seed", range(6))
def test_drawing_on_equals_a_sampler_made_anew(seed: int) -> None:
    """The device's histories against those of the host, also in another company."""
    rng = np.random.default_rng(100 + seed)
    width, rows, steps = 7, 6, 40
    params = [random_params(rng, width) for _ in range(rows)]
    histories = [rng.integers(0, width, rng.integers(1, 12)).tolist() for _ in params]
    going = BatchSampler(params, width, histories=histories, generated=[0] * rows)
    for step in range(steps):
        values = np.round(rng.standard_normal((rows, width)) * 2 * 64).astype(np.float32) / 64
        positions = [len(history) for history in histories]
        some = rng.permutation(rows)[: int(rng.integers(1, rows + 1))]
        anew = BatchSampler(
            [params[row] for row in some],
            width,
            histories=[histories[row] for row in some],
            generated=[step] * len(some),
        )
        drawn = np.array(going.draw(mx.array(values), positions).tokens)
        again = anew.draw(mx.array(values[some]), [positions[row] for row in some]).tokens
        assert np.array(again).tolist() == drawn[some].tolist()
        for history, token in zip(histories, drawn, strict=True):
            history.append(int(token))


def test_stages_that_nobody_uses_are_not_in_the_graph() -> None:
    sampler = BatchSampler([SamplingParams(), SamplingParams(temperature=0.5)], 1000)
    assert len(sampler.groups) == 1
    assert sampler._penalties == []
    logits = mx.zeros((2, 1000))
    assert sampler.edit(logits) is logits


def test_masks_forbid_whatever_the_other_settings_say() -> None:
    rng = np.random.default_rng(4)
    values = mx.array(rng.standard_normal((3, 100)).astype(np.float32))
    params = [GREEDY, SamplingParams(**OFF), SamplingParams(logit_bias=((4, 50.0),))]
    allowed = np.zeros(100, dtype=np.bool_)
    allowed[[7, 9]] = True
    drawn = BatchSampler(params, 100).draw(values, [1, 2, 3], {0: allowed, 2: allowed}).tokens
    assert np.array(drawn)[0] in (7, 9)
    assert np.array(drawn)[2] in (7, 9)


def test_logprobs_are_those_of_the_raw_distribution() -> None:
    rng = np.random.default_rng(8)
    values = (rng.standard_normal((4, 1000)) * 4).astype(np.float32)
    params = [
        SamplingParams(logprobs=5, seed=3, temperature=2.0),
        SamplingParams(),
        SamplingParams(temperature=0.0, logprobs=0, logit_bias=((7, 100.0),)),
        SamplingParams(logprobs=20),
    ]
    draw = BatchSampler(params, 1000).draw(mx.array(values), [0, 1, 2, 3])
    assert draw.logprobs is not None
    found = draw.logprobs.values()
    assert sorted(found) == [0, 2, 3]
    tokens = np.array(draw.tokens)
    assert tokens[2] == 7
    for row, one in found.items():
        exact = np.log(reference.softmax(values[row].astype(np.float64)))
        assert one.logprob == pytest.approx(exact[tokens[row]], abs=1e-5)
        count = params[row].logprobs or 0
        assert [token for token, _ in one.top] == np.argsort(-exact)[:count].tolist()
        for token, logprob in one.top:
            assert logprob == pytest.approx(exact[token], abs=1e-5)


def test_end_tokens_are_held_back_until_the_answer_is_long_enough() -> None:
    params = [SamplingParams(temperature=0.0, min_tokens=2, end_ids=(3,))]
    sampler = BatchSampler(params, 5, generated=[0])
    logits = mx.array([[0.0, 1.0, 2.0, 9.0, 0.0]])
    drawn = [int(sampler.draw(logits, [0]).tokens[0].item()) for _ in range(4)]
    assert drawn == [2, 2, 3, 3]


def test_the_greedy_choice_reads_penalties_and_no_filter() -> None:
    params = [
        SamplingParams(temperature=0.0, presence_penalty=5.0, typical_p=0.1, p_less=True),
        SamplingParams(top_k=1, typical_p=0.1),
    ]
    logits = mx.array([[4.0, 3.0, 0.0]] * 2)
    drawn = BatchSampler(params, 3, histories=[[0], []]).draw(logits, [1, 1]).tokens
    assert np.array(drawn).tolist() == [1, 0]
