"""Opening sequences from kept parts of others: never another token than without."""

from __future__ import annotations

import random
from dataclasses import dataclass, field
from typing import Any

import pytest

from models.engine import (
    KeepBlock,
    KeptPrefix,
    PrefillChunk,
    PrefixData,
    StepPlan,
)
from models.mlx.backend import MLXBackend
from models.sampling import GREEDY, SamplingParams
from tests.engine.tiny import VARIANTS, decode, load, make_backend, prefill, prompt_of, solo_tokens

pytestmark = pytest.mark.mlx

BLOCK = 4
SAMPLED = SamplingParams(temperature=1.3, seed=7)


@pytest.fixture(scope="module")
def plain() -> Any:
    return load("plain")


@pytest.fixture(scope="module", params=VARIANTS)
def model(request: pytest.FixtureRequest) -> Any:
    return load(request.param)


def open_from(
    backend: MLXBackend,
    sequence_id: int,
    prompt: tuple[int, ...],
    prefix: KeptPrefix,
    **more: Any,
) -> list[int]:
    chunk = PrefillChunk(
        sequence_id=sequence_id,
        tokens=prompt[prefix.tokens :],
        start=prefix.tokens,
        prefix=prefix,
        sampling=GREEDY,
    )
    return [backend.step(StepPlan(step=0, prefill=(chunk,), **more)).tokens[sequence_id]]


def blocks(sequence_id: int, count: int, first_handle: int = 100, **more: Any) -> list[KeepBlock]:
    return [
        KeepBlock(
            sequence_id=sequence_id,
            handle=first_handle + number,
            start=number * BLOCK,
            end=(number + 1) * BLOCK,
            **more,
        )
        for number in range(count)
    ]


def run(backend: MLXBackend, sequence_id: int, tokens: list[int], count: int) -> list[int]:
    while len(tokens) < count:
        tokens.extend(decode(backend, sequence_id).tokens.values())
    return tokens


def test_a_sequence_opened_from_blocks_of_another_one(plain: Any) -> None:
    backend = make_backend(plain)
    assert backend.info.prefix == "blocks"
    prompt = prompt_of(1, 19)
    prefill(backend, 1, prompt)
    decode(backend, 1)
    backend.step(StepPlan(step=0, keep=tuple(blocks(1, 4)), drop=(1,)))
    other = prompt[:14] + prompt_of(2, 9)
    prefix = KeptPrefix(handles=(100, 101, 102, 103), tokens=14)
    got = run(backend, 2, open_from(backend, 2, other, prefix), 12)
    assert got == solo_tokens(plain, other, 12)


def test_generated_tokens_can_be_kept_from_any_row_of_the_batch(plain: Any) -> None:
    backend = make_backend(plain, run_ahead_s=float("inf"))
    prompts = {key: prompt_of(key, 5 + 3 * key) for key in (1, 2, 3)}
    tokens = {
        key: list(prefill(backend, key, prompt).tokens.values()) for key, prompt in prompts.items()
    }
    for _ in range(12):
        for key, token in decode(backend, 1, 2, 3).tokens.items():
            tokens[key].append(token)
    whole = prompts[2] + tuple(tokens[2])
    held = (len(whole) - 1) // BLOCK
    result = backend.step(StepPlan(step=0, keep=tuple(blocks(2, held)), drop=(2,), decode=(1, 3)))
    for key, token in result.tokens.items():
        tokens[key].append(token)
    longer = whole + prompt_of(9, 5)
    prefix = KeptPrefix(handles=tuple(range(100, 100 + held)), tokens=held * BLOCK)
    chunk = PrefillChunk(
        sequence_id=4,
        tokens=longer[prefix.tokens :],
        start=prefix.tokens,
        prefix=prefix,
        sampling=GREEDY,
    )
    result = backend.step(StepPlan(step=0, decode=(1, 3), prefill=(chunk,)))
    tokens[4] = [result.tokens[4]]
    for key in (1, 3):
        tokens[key].append(result.tokens[key])
    for _ in range(10):
        for key, token in decode(backend, 1, 3, 4).tokens.items():
            tokens[key].append(token)
    assert tokens[4] == solo_tokens(plain, longer, len(tokens[4]))
    for key in (1, 3):
        assert tokens[key] == solo_tokens(plain, prompts[key], len(tokens[key]))


def test_two_sequences_over_one_prefix_never_disturb_each_other(plain: Any) -> None:
    backend = make_backend(plain)
    prompt = prompt_of(1, 21)
    prefill(backend, 1, prompt)
    backend.step(StepPlan(step=0, keep=tuple(blocks(1, 5)), drop=(1,)))
    prefix = KeptPrefix(handles=(100, 101, 102, 103, 104), tokens=20)
    tokens = {}
    for key in (2, 3, 4):
        tokens[key] = open_from(backend, key, (*prompt[:20], key), prefix)
        run(backend, key, tokens[key], 5)  # writes behind the prefix, in a batch of one
    for _ in range(6):
        for key, token in decode(backend, 2, 3, 4).tokens.items():
            tokens[key].append(token)
    for key in (2, 3, 4):
        assert tokens[key] == solo_tokens(plain, (*prompt[:20], key), len(tokens[key]))
    fresh = run(backend, 5, open_from(backend, 5, (*prompt[:20], 9), prefix), 8)
    assert fresh == solo_tokens(plain, (*prompt[:20], 9), 8)


def test_choices_opened_from_a_snapshot(model: Any) -> None:
    """The way of several choices over one prefill, for every kind of cache."""
    backend = make_backend(model)
    prompt = prompt_of(6, 23)
    chunks = (
        PrefillChunk(sequence_id=1, tokens=prompt[:-1], start=0, keep_as=-1),
        PrefillChunk(sequence_id=1, tokens=prompt[-1:], start=22, sampling=GREEDY),
    )
    first = list(backend.step(StepPlan(step=0, prefill=chunks)).tokens.values())
    run(backend, 1, first, 9)
    again = open_from(backend, 2, prompt, KeptPrefix(handles=(-1,), tokens=22))
    run(backend, 2, again, 9)
    backend.step(StepPlan(step=0, forget=(-1,), drop=(1, 2)))
    expected = solo_tokens(model, prompt, 9)
    assert first == expected
    assert again == expected


def test_a_kept_block_survives_the_process(plain: Any) -> None:
    backend = make_backend(plain)
    prompt = prompt_of(3, 17)
    prefill(backend, 1, prompt)
    result = backend.step(StepPlan(step=0, keep=tuple(blocks(1, 4, export=True)), drop=(1,)))
    assert [data.handle for data in result.exported] == [100, 101, 102, 103]
    other = make_backend(plain)
    load_plan = tuple(
        PrefixData(handle=data.handle + 900, arrays=data.arrays) for data in result.exported
    )
    prefix = KeptPrefix(handles=(1000, 1001, 1002, 1003), tokens=16)
    got = run(other, 2, open_from(other, 2, prompt, prefix, load=load_plan), 10)
    assert got == solo_tokens(plain, prompt, 10)


def test_forgotten_handles_are_gone_and_unknown_ones_a_bug(plain: Any) -> None:
    backend = make_backend(plain)
    prefill(backend, 1, prompt_of(1, 9))
    backend.step(StepPlan(step=0, keep=tuple(blocks(1, 2))))
    backend.step(StepPlan(step=0, forget=(100,)))
    with pytest.raises(KeyError):
        backend.step(StepPlan(step=0, forget=(100,)))
    backend.reset()
    with pytest.raises(KeyError):
        backend.step(StepPlan(step=0, forget=(101,)))


def test_a_block_behind_the_end_is_a_bug(plain: Any) -> None:
    backend = make_backend(plain)
    prefill(backend, 1, prompt_of(1, 9))
    with pytest.raises(AssertionError):
        backend.step(StepPlan(step=0, keep=tuple(blocks(1, 3))))


@pytest.mark.parametrize("ahead", [False, True])
def test_a_forced_token_takes_the_place_of_the_drawn_one(plain: Any, ahead: bool) -> None:
    backend = make_backend(plain, run_ahead_s=float("inf") if ahead else 0.0)
    prompts = {1: prompt_of(1, 8), 2: prompt_of(2, 13)}
    tokens = {
        key: list(prefill(backend, key, prompt).tokens.values()) for key, prompt in prompts.items()
    }
    for step in range(12):
        force = {1: 77} if step == 5 else {}
        result = backend.step(StepPlan(step=0, decode=(1, 2), force=force))
        for key, token in result.tokens.items():
            tokens[key].append(token)
    place = tokens[1].index(77)
    before = solo_tokens(plain, prompts[1], place)
    after = solo_tokens(plain, (*prompts[1], *before, 77), len(tokens[1]) - place - 1)
    assert tokens[1] == [*before, 77, *after]
    assert tokens[2] == solo_tokens(plain, prompts[2], len(tokens[2]))


def test_short_prompts_share_a_pass_and_keep_their_tokens(plain: Any) -> None:
    backend = make_backend(plain)
    prompts = {key: prompt_of(key, length) for key, length in enumerate((9, 11, 12, 3, 10), 1)}
    chunks = tuple(
        PrefillChunk(sequence_id=key, tokens=prompt, start=0, sampling=GREEDY)
        for key, prompt in prompts.items()
    )
    result = backend.step(StepPlan(step=0, prefill=chunks))
    assert list(result.tokens) == [1, 2, 3, 4, 5]
    tokens = {key: [token] for key, token in result.tokens.items()}
    for _ in range(8):
        for key, token in decode(backend, *prompts).tokens.items():
            tokens[key].append(token)
    for key, prompt in prompts.items():
        assert tokens[key] == solo_tokens(plain, prompt, 9)


def test_deterministic_rows_are_bit_for_bit_alone(model: Any) -> None:
    """Sampling at a high temperature shows differences that greedy tokens would hide."""

    def alone(key: int) -> list[int]:
        backend = make_backend(model, deterministic=True)
        tokens = list(prefill(backend, key, prompt_of(key, 6 + key), SAMPLED).tokens.values())
        return run(backend, key, tokens, 10)

    backend = make_backend(model, deterministic=True)
    tokens: dict[int, list[int]] = {}
    for key in (1, 2, 3):
        result = prefill(backend, key, prompt_of(key, 6 + key), SAMPLED)
        tokens[key] = [result.tokens[key]]
        for row, token in decode(backend, *tokens).tokens.items():
            tokens[row].append(token)
    for key in (1, 2, 3):
        assert run(backend, key, tokens[key], 10) == alone(key)


@dataclass
class Sharer:
    prompt: tuple[int, ...]
    expected: list[int]
    prefix: KeptPrefix | None
    read: int
    tokens: list[int] = field(default_factory=list)


@pytest.mark.parametrize("seed", range(3))
def test_shared_prefixes_at_random_equal_a_cold_backend(plain: Any, seed: int) -> None:
    """Prompts with shared parts, kept and opened at any step, beside rows that decode."""
    rng = random.Random(seed)
    backend = make_backend(plain, run_ahead_s=rng.choice((0.0, float("inf"))))
    kept: list[tuple[tuple[int, ...], tuple[int, ...]]] = []  # tokens, handles
    live: dict[int, Sharer] = {}
    keep: list[KeepBlock] = []
    drop: list[int] = []
    next_handle, finished, hits = 1, 0, 0
    for number in range(140):
        if len(live) < 4 and number < 110:
            stems, handles = rng.choice([*kept, ((), ())])
            cut = rng.randint(0, len(stems))
            prompt = stems[:cut] + prompt_of(rng.randint(0, 40), rng.randint(1, 18))
            prefix = None
            usable = min(cut, len(prompt) - 1)
            if usable and rng.random() < 0.8:
                used = handles[: -(-usable // BLOCK)]
                prefix = KeptPrefix(handles=used, tokens=min(usable, len(used) * BLOCK))
                hits += 1
            expected = solo_tokens(plain, prompt, rng.randint(2, 14))
            live[number] = Sharer(prompt, expected, prefix, prefix.tokens if prefix else 0)
        chunks = []
        for key, one in live.items():
            if one.read < len(one.prompt) and rng.random() < 0.7:
                end = min(len(one.prompt), one.read + rng.choice((2, 7, 40)))
                chunks.append(
                    PrefillChunk(
                        sequence_id=key,
                        tokens=one.prompt[one.read : end],
                        start=one.read,
                        prefix=one.prefix,
                        sampling=GREEDY if end == len(one.prompt) else None,
                    )
                )
                one.read, one.prefix = end, None
        rows = tuple(key for key, one in live.items() if one.tokens and rng.random() < 0.9)
        plan = StepPlan(
            step=0, keep=tuple(keep), drop=tuple(drop), decode=rows, prefill=tuple(chunks)
        )
        keep, drop = [], []
        for key, token in backend.step(plan).tokens.items():
            live[key].tokens.append(token)
        for key, one in list(live.items()):
            assert one.tokens == one.expected[: len(one.tokens)]
            if len(one.tokens) < len(one.expected):
                continue
            whole = (one.prompt + tuple(one.tokens))[:-1]
            count = len(whole) // BLOCK
            if count and rng.random() < 0.7:
                keep += blocks(key, count, next_handle)
                kept.append(
                    (whole[: count * BLOCK], tuple(range(next_handle, next_handle + count)))
                )
                next_handle += count
            drop.append(key)
            del live[key]
            finished += 1
    assert finished >= 10
    assert hits >= 5
