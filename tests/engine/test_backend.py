"""The MLX backend against mlx-lm's own single-sequence generation, on tiny models."""

from __future__ import annotations

import random
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import mlx.core as mx
import pytest

from models.engine import PrefillChunk, StepPlan
from models.mlx.backend import MLXBackend
from models.mlx.batching import new_caches
from models.mlx.head import LastPositionHead
from models.sampling import GREEDY, SamplingParams
from tests.engine.tiny import (
    VARIANTS,
    VOCAB_SIZE,
    decode,
    generate,
    load,
    make_backend,
    prefill,
    prompt_of,
    solo_tokens,
)

pytestmark = pytest.mark.mlx


@pytest.fixture(scope="module", params=VARIANTS)
def model(request: pytest.FixtureRequest) -> Any:
    return load(request.param)


@pytest.fixture(scope="module")
def plain() -> Any:
    return load("plain")


@dataclass
class Sequence:
    prompt: tuple[int, ...]
    expected: list[int]
    read: int = 0
    tokens: list[int] = field(default_factory=list)


class Crowd:
    """Drives a backend at random: joins, chunks, parked rows, drops at any step."""

    def __init__(self, model: Any, backend: MLXBackend, seed: int, *, ahead: bool) -> None:
        self.ahead = ahead  # decodes run ahead of the plan, so that a joining row may have to wait
        self.rng = random.Random(seed)
        self.model = model
        self.backend = backend
        self.live: dict[int, Sequence] = {}
        self.next_id = 0
        self.finished = 0
        self.abandoned = 0

    def start(self) -> None:
        prompt = prompt_of(self.next_id, self.rng.randint(1, 45))
        count = self.rng.randint(2, 30)
        expected = solo_tokens(self.model, prompt, count)
        self.live[self.next_id] = Sequence(prompt, expected)
        self.next_id += 1

    def step(self, drop: list[int]) -> None:
        chunks = []
        for sequence_id, sequence in self.live.items():
            if sequence.read < len(sequence.prompt) and self.rng.random() < 0.5:
                chunks.append(self._chunk(sequence_id, sequence))
        ready = [key for key, sequence in self.live.items() if sequence.tokens]
        keep_all = self.rng.random() < 0.6
        rows = [key for key in ready if keep_all or self.rng.random() < 0.7]
        plan = StepPlan(step=0, drop=tuple(drop), decode=tuple(rows), prefill=tuple(chunks))
        result = self.backend.step(plan)
        assert result.failed == {}
        drawing = rows + [chunk.sequence_id for chunk in chunks if chunk.sampling]
        if self.ahead:
            assert set(result.tokens) <= set(drawing)
        else:
            assert list(result.tokens) == drawing
        for sequence_id, token in result.tokens.items():
            self.live[sequence_id].tokens.append(token)

    def _chunk(self, sequence_id: int, sequence: Sequence) -> PrefillChunk:
        start = sequence.read
        end = min(len(sequence.prompt), start + self.rng.choice((1, 3, 8, 40)))
        sequence.read = end
        return PrefillChunk(
            sequence_id=sequence_id,
            tokens=sequence.prompt[start:end],
            start=start,
            sampling=GREEDY if end == len(sequence.prompt) else None,
        )

    def reap(self) -> list[int]:
        """Check and remove what is finished, and abandon a row now and then."""
        gone = []
        for key, sequence in list(self.live.items()):
            assert sequence.tokens == sequence.expected[: len(sequence.tokens)]
            done = len(sequence.tokens) == len(sequence.expected)
            if done or (sequence.read and self.rng.random() < 0.01):
                self.finished += done
                self.abandoned += not done
                gone.append(key)
                del self.live[key]
        return gone


@pytest.mark.parametrize("ahead", [False, True], ids=["in step", "ahead"])
@pytest.mark.parametrize("seed", range(2))
def test_rows_of_a_changing_batch_equal_lone_sequences(model: Any, seed: int, ahead: bool) -> None:
    backend = make_backend(model, run_ahead_s=float("inf") if ahead else 0.0)
    crowd = Crowd(model, backend, seed, ahead=ahead)
    gone: list[int] = []
    for _ in range(120):
        if len(crowd.live) < 6 and crowd.rng.random() < 0.4:
            crowd.start()
        crowd.step(gone)
        gone = crowd.reap()
    assert crowd.finished >= 10


def ahead_of_two(model: Any) -> tuple[MLXBackend, dict[int, list[int]], dict[int, list[int]]]:
    """A backend that decodes rows 1 and 2 and has started a decode that nobody asked for yet."""
    backend = make_backend(model, run_ahead_s=float("inf"))
    prompts = {key: prompt_of(key, 10 + key) for key in (1, 2)}
    expected = {key: solo_tokens(model, prompt, 20) for key, prompt in prompts.items()}
    got = {key: [prefill(backend, key, prompt).tokens[key]] for key, prompt in prompts.items()}
    for _ in range(3):
        add(got, decode(backend, 1, 2).tokens)
    return backend, expected, got


def add(got: dict[int, list[int]], tokens: Mapping[int, int]) -> None:
    for key, token in tokens.items():
        got.setdefault(key, []).append(token)


def test_a_token_drawn_ahead_for_a_parked_row_is_kept(plain: Any) -> None:
    backend, expected, got = ahead_of_two(plain)
    for rows in [(1,)] * 4 + [(2,)] * 3 + [(1, 2)] * 5:
        add(got, decode(backend, *rows).tokens)
    for key in (1, 2):
        assert got[key] == expected[key][: len(got[key])]
        assert len(got[key]) >= 10


def test_a_decode_that_ran_ahead_for_a_dropped_row_disturbs_nobody(plain: Any) -> None:
    backend, expected, got = ahead_of_two(plain)
    add(got, decode(backend, 1, drop=(2,)).tokens)
    assert len(got[2]) == 4
    for _ in range(6):
        add(got, decode(backend, 1).tokens)
    assert got[1] == expected[1][: len(got[1])]


def test_a_newcomer_waits_at_most_for_the_decode_that_ran_ahead(plain: Any) -> None:
    backend, expected, got = ahead_of_two(plain)
    prompt = prompt_of(7, 12)
    chunk = PrefillChunk(sequence_id=7, tokens=prompt, start=0, sampling=GREEDY)
    add(got, backend.step(StepPlan(step=0, decode=(1, 2), prefill=(chunk,))).tokens)
    for _ in range(4):
        add(got, decode(backend, 1, 2, 7).tokens)
    assert got[7] == solo_tokens(plain, prompt, 5)[: len(got[7])]
    assert len(got[7]) >= 4
    for key in (1, 2):
        assert got[key] == expected[key][: len(got[key])]


def test_everything_may_be_dropped_while_a_decode_runs_ahead(plain: Any) -> None:
    backend, _, _ = ahead_of_two(plain)
    assert backend.step(StepPlan(step=9, drop=(1, 2))).tokens == {}
    again = prefill(backend, 3, prompt_of(1, 11)).tokens[3]
    assert again == solo_tokens(plain, prompt_of(1, 11), 1)[0]


def test_a_step_that_nobody_wants_ends_early_and_harms_nobody(
    plain: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("models.mlx.sequences.LAYERS_AT_ONCE", 1)
    monkeypatch.setattr("models.mlx.sequences.WORTH_ABANDONING_S", 0.0)
    backend = make_backend(plain)
    prompt = prompt_of(3, 14)
    expected = solo_tokens(plain, prompt, 6)
    got = [prefill(backend, 3, prompt).tokens[3]]
    got += decode(backend, 3).tokens.values()
    for key in (1, 2):
        prefill(backend, key, prompt_of(key, 9))
    backend.abandon(50)
    result = backend.step(StepPlan(step=50, decode=(1, 2)))  # row 3 is parked meanwhile
    assert result.abandoned
    assert result.tokens == {}
    got += decode(backend, 3, drop=(1, 2)).tokens.values()
    while len(got) < 6:
        got += decode(backend, 3).tokens.values()
    assert got == expected


def test_a_prompt_that_nobody_wants_is_given_up(
    plain: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("models.mlx.sequences.LAYERS_AT_ONCE", 1)
    backend = make_backend(plain)
    chunk = PrefillChunk(sequence_id=1, tokens=prompt_of(1, 30), start=0)
    backend.abandon(8)
    assert backend.step(StepPlan(step=8, prefill=(chunk,))).abandoned
    assert (
        prefill(backend, 2, prompt_of(2, 9), drop=(1,)).tokens[2]
        == (solo_tokens(plain, prompt_of(2, 9), 1)[0])
    )


def test_only_the_named_step_is_given_up(plain: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("models.mlx.sequences.LAYERS_AT_ONCE", 1)
    backend = make_backend(plain)
    backend.abandon(7)
    chunk = PrefillChunk(sequence_id=1, tokens=prompt_of(1, 9), start=0, sampling=GREEDY)
    assert list(backend.step(StepPlan(step=8, prefill=(chunk,))).tokens) == [1]


def test_long_decodes_do_not_run_ahead(plain: Any) -> None:
    backend = make_backend(plain, run_ahead_s=1e-9)
    prefill(backend, 1, prompt_of(1, 8))
    decode(backend, 1)
    decode(backend, 1)
    assert not backend._decoder.running


@pytest.mark.parametrize("chunk", [1, 2, 7, 16, 33])
def test_the_size_of_prompt_chunks_changes_nothing(model: Any, chunk: int) -> None:
    backend = make_backend(model)
    prompt = prompt_of(3, 37)
    expected = solo_tokens(model, prompt, 12)
    tokens: list[int] = []
    for start in range(0, len(prompt), chunk):
        part = prompt[start : start + chunk]
        sampling = GREEDY if start + chunk >= len(prompt) else None
        piece = PrefillChunk(sequence_id=1, tokens=part, start=start, sampling=sampling)
        tokens += backend.step(StepPlan(step=0, prefill=(piece,))).tokens.values()
    while len(tokens) < 12:
        tokens += decode(backend, 1).tokens.values()
    assert tokens == expected


def test_two_chunks_of_one_prompt_in_one_step(plain: Any) -> None:
    backend = make_backend(plain)
    prompt = prompt_of(5, 20)
    chunks = (
        PrefillChunk(sequence_id=1, tokens=prompt[:9], start=0),
        PrefillChunk(sequence_id=1, tokens=prompt[9:], start=9, sampling=GREEDY),
    )
    result = backend.step(StepPlan(step=4, prefill=chunks))
    assert result.step == 4
    assert list(result.tokens.values()) == solo_tokens(plain, prompt, 1)
    assert result.decode_s == 0.0
    assert result.prefill_s > 0.0


def test_a_parked_row_goes_on_where_it_was(model: Any) -> None:
    backend = make_backend(model)
    prompts = {1: prompt_of(1, 30), 2: prompt_of(2, 9), 3: prompt_of(3, 17)}
    expected = {key: solo_tokens(model, prompt, 30) for key, prompt in prompts.items()}
    tokens = {key: [prefill(backend, key, prompt).tokens[key]] for key, prompt in prompts.items()}
    for rows in [(1, 2, 3)] * 5 + [(1, 3)] * 9 + [(2,)] * 4 + [(3, 2, 1)] * 6:
        for key, token in decode(backend, *rows).tokens.items():
            tokens[key].append(token)
    for key, sequence in tokens.items():
        assert sequence == expected[key][: len(sequence)]
    assert [len(sequence) for sequence in tokens.values()] == [21, 16, 21]


def test_a_newcomer_takes_the_place_of_a_leaving_row(plain: Any) -> None:
    backend = make_backend(plain)
    prompts = {key: prompt_of(key, length) for key, length in ((1, 40), (2, 30), (3, 35), (4, 12))}
    expected = {key: solo_tokens(plain, prompt, 12) for key, prompt in prompts.items()}
    tokens = {key: [prefill(backend, key, prompts[key]).tokens[key]] for key in (1, 2, 3)}
    for _ in range(3):
        for key, token in decode(backend, 1, 2, 3).tokens.items():
            tokens[key].append(token)
    tokens[4] = [prefill(backend, 4, prompts[4]).tokens[4]]
    for step in range(8):
        drop = (2,) if step == 0 else ()
        for key, token in decode(backend, 1, 3, 4, drop=drop).tokens.items():
            tokens[key].append(token)
    for key, sequence in tokens.items():
        assert sequence == expected[key][: len(sequence)]


def test_seeded_rows_do_not_depend_on_their_neighbours(model: Any) -> None:
    backend = make_backend(model)
    settings = [
        SamplingParams(seed=11),
        SamplingParams(seed=12, top_k=0, top_p=1.0, min_p=0.0, temperature=1.0),
        SamplingParams(seed=13, top_k=0, top_p=0.9, min_p=0.0),
        SamplingParams(seed=14, top_k=200, top_p=0.99, min_p=0.0, temperature=1.5),
        GREEDY,
        SamplingParams(seed=11),
    ]
    requests = {key: (prompt_of(key, 5 + 3 * key), item) for key, item in enumerate(settings)}
    together = generate(backend, requests, 20)
    for key, request in requests.items():
        assert generate(backend, {key: request}, 20)[key] == together[key]
    again = generate(backend, {9: (requests[0][0], SamplingParams(seed=99))}, 20)
    assert again[9] != together[0]


def test_a_row_with_broken_numbers_fails_alone(model: Any) -> None:
    backend = make_backend(model)
    prompts = {key: prompt_of(key, 6 + 5 * key) for key in (1, 2, 3)}
    expected = {key: solo_tokens(model, prompt, 12) for key, prompt in prompts.items()}
    tokens = {key: [prefill(backend, key, prompt).tokens[key]] for key, prompt in prompts.items()}
    _poison(backend, 2)
    result = decode(backend, 1, 2, 3)
    assert list(result.failed) == [2]
    assert list(result.tokens) == [1, 3]
    for _ in range(6):
        for key, token in result.tokens.items():
            tokens[key].append(token)
        result = decode(backend, 1, 3)
    # Nothing of it is left for the row that comes next.
    tokens[2] = [prefill(backend, 2, prompts[2]).tokens[2]]
    for _ in range(4):
        for key, token in decode(backend, 1, 2, 3).tokens.items():
            if key == 2:
                tokens[2].append(token)
    assert tokens[2] == expected[2][:5]
    for key in (1, 3):
        assert tokens[key] == expected[key][: len(tokens[key])]


def _poison(backend: MLXBackend, sequence_id: int) -> None:
    """Make every number in a waiting sequence's caches a NaN."""
    caches = backend._sequences[sequence_id].caches
    assert caches is not None
    for cache in [part for whole in caches for part in getattr(whole, "caches", [whole])]:
        if hasattr(cache, "keys"):
            cache.values = cache.values * float("nan")
        else:
            cache.cache = [array * float("nan") for array in cache.cache]


def test_a_lone_row_with_broken_numbers_fails(plain: Any) -> None:
    backend = make_backend(plain)
    prefill(backend, 1, prompt_of(1, 5))
    _poison(backend, 1)
    assert list(decode(backend, 1).failed) == [1]
    first = prefill(backend, 1, prompt_of(1, 5)).tokens[1]
    assert [first] == solo_tokens(plain, prompt_of(1, 5), 1)


def test_bad_sampling_settings_fail_their_row_alone(plain: Any) -> None:
    backend = make_backend(plain)
    bad = {
        2: SamplingParams(temperature=float("nan")),
        3: SamplingParams(top_k=-1),
        4: SamplingParams(top_p=-0.5),
        5: SamplingParams(seed=-1),
    }
    chunks = tuple(
        PrefillChunk(sequence_id=key, tokens=(1, 2, 3), start=0, sampling=sampling)
        for key, sampling in {1: GREEDY, **bad}.items()
    )
    result = backend.step(StepPlan(step=0, prefill=chunks))
    assert list(result.tokens) == [1]
    assert list(result.failed) == list(bad)
    assert list(decode(backend, 1).tokens) == [1]


def test_a_top_k_of_the_whole_vocabulary_and_more(plain: Any) -> None:
    backend = make_backend(plain)
    for top_k in (VOCAB_SIZE - 1, VOCAB_SIZE, VOCAB_SIZE + 1, 10**9):
        sampling = SamplingParams(top_k=top_k, seed=5)
        tokens = generate(backend, {1: (prompt_of(1, 5), sampling)}, 4)
        assert all(0 <= token < VOCAB_SIZE for token in tokens[1])


def test_drops_free_the_memory(plain: Any) -> None:
    backend = make_backend(plain)
    generate(backend, {1: (prompt_of(0, 9), GREEDY)}, 2)
    before = mx.get_active_memory()
    for key in range(8):
        prefill(backend, key, prompt_of(key, 100))
    for _ in range(3):
        decode(backend, *range(8))
    half_finished = PrefillChunk(sequence_id=8, tokens=prompt_of(8, 50), start=0)
    backend.step(StepPlan(step=0, prefill=(half_finished,)))
    used = mx.get_active_memory() - before
    assert used > 8 * 100 * backend.info.kv_bytes_per_token
    decode(backend, drop=(1, 2, 3, 8))
    assert mx.get_active_memory() - before < used * 0.75
    decode(backend, drop=(0, 4, 5, 6, 7))
    assert mx.get_active_memory() - before < 20_000


def test_reset_forgets_everything(plain: Any) -> None:
    backend = make_backend(plain)
    prefill(backend, 1, prompt_of(1, 5))
    prefill(backend, 2, prompt_of(2, 5))
    decode(backend, 1, 2)
    backend.reset()
    assert prefill(backend, 1, prompt_of(1, 5)).tokens
    with pytest.raises(KeyError):
        decode(backend, 2)


def test_a_sequence_cannot_outgrow_the_context(plain: Any) -> None:
    backend = make_backend(plain, context_length=8)
    prefill(backend, 1, prompt_of(1, 7))
    assert decode(backend, 1).tokens
    with pytest.raises(AssertionError):
        decode(backend, 1)
    backend.reset()
    with pytest.raises(AssertionError):
        prefill(backend, 1, prompt_of(1, 9))


def test_the_head_runs_for_the_last_position_only(model: Any) -> None:
    head = LastPositionHead(model)
    ids = mx.array([prompt_of(1, 20)])
    whole = model(ids)
    assert whole.shape == (1, 20, VOCAB_SIZE)
    seen: list[int] = []

    class Watched:
        def __call__(self, inputs: mx.array, cache: list[Any]) -> Any:
            logits = model(inputs, cache=cache)
            seen.append(logits.shape[1])
            return logits

    last = head(Watched(), ids, new_caches(model))
    assert last.shape == (1, VOCAB_SIZE)
    assert mx.allclose(last, whole[:, -1, :], rtol=1e-4, atol=1e-4)
    assert seen == [1]


def test_facts_about_the_model(model: Any) -> None:
    info = make_backend(model, notes={"device": "cpu"}).info
    assert info.vocab_size == VOCAB_SIZE
    assert info.model_type == model.model_type
    assert info.max_batch is None
    assert info.kv_budget_bytes is not None
    assert info.kv_budget_bytes > 0
    assert info.notes.items() >= {"device": "cpu"}.items()
    # 2 kv heads of 16 values, keys and values, float32; falcon_h1 has 2 attention heads likewise.
    attention_layers = 0 if model.model_type == "mamba2" else len(model.layers)
    assert info.kv_bytes_per_token == attention_layers * 2 * 2 * 16 * 4


def test_caches_that_cannot_be_joined_decode_one_by_one(plain: Any) -> None:
    from mlx_lm.models.cache import ChunkedKVCache

    class Chunked:
        """The model with caches that mlx-lm cannot batch."""

        model_type = "llama"
        layers = plain.layers
        named_modules = plain.named_modules

        def make_cache(self) -> list[Any]:
            return [ChunkedKVCache(chunk_size=4096) for _ in plain.layers]

        def __call__(self, inputs: mx.array, cache: list[Any]) -> Any:
            return plain(inputs, cache=cache)

    backend = make_backend(Chunked())
    assert backend.info.max_batch == 1
    prompts = {1: prompt_of(1, 9), 2: prompt_of(2, 14)}
    tokens = {key: [prefill(backend, key, prompt).tokens[key]] for key, prompt in prompts.items()}
    for key in (1, 2, 2, 1, 2, 1, 1, 1):
        tokens[key] += decode(backend, key).tokens.values()
    for key, prompt in prompts.items():
        assert tokens[key] == solo_tokens(plain, prompt, len(tokens[key]))
