"""Many architectures: sequences decoded together get the tokens that they get alone.

The reference is mlx-lm's own generation of one sequence, or, for quantised and limited caches, the
model run by hand with the whole prompt at once.
"""

from __future__ import annotations

import copy
import functools
from collections.abc import Mapping
from itertools import pairwise
from typing import Any

import mlx.core as mx
import pytest

from models.engine import PrefillChunk, StepPlan
from models.mlx.backend import MLXBackend
from models.mlx.batching import Caches, can_batch, new_caches, prefix_mode
from models.mlx.kv_probe import UnsupportedCaches, check_caches, widest_batch
from models.mlx.sides import assign, blank, columns_of, cut
from models.sampling import GREEDY
from tests.engine.families import FAMILIES, VOCAB_SIZE, Family, WithCaches, build
from tests.engine.tiny import make_backend, prompt_of, solo_tokens

pytestmark = pytest.mark.mlx

PROMPTS = {
    key: tuple(token % VOCAB_SIZE for token in prompt_of(key, length))
    for key, length in enumerate((3, 21, 9, 30, 1, 14))
}
LIMIT = 16  # tokens: shorter and longer prompts, and all sequences grow over it
CHOICES: dict[str, dict[str, Any]] = {
    "plain": {},
    "limited": {"max_kv_size": LIMIT},
    "quantised": {"kv_bits": 8, "kv_group_size": 32},
}


def _cases() -> list[Any]:
    """Each family with the kinds of caches that it can have."""
    wanted = [
        (family, choice)
        for family in FAMILIES
        for choice, support in (
            ("plain", "yes"),
            ("limited", family.limited),
            ("quantised", family.quantized),
        )
        if support == "yes"
    ]
    return [pytest.param(*case, id=f"{case[0].name}, {case[1]}") for case in wanted]


CASES = _cases()


@functools.cache
def model_of(family_name: str) -> Any:
    return build(next(family for family in FAMILIES if family.name == family_name))


class Conversation:
    """Drives a backend and collects tokens; prompts are read in chunks, beside decoding rows."""

    def __init__(self, backend: MLXBackend, chunk: int) -> None:
        self.backend = backend
        self.chunk = chunk
        self.tokens: dict[int, list[int]] = {}
        self.read: dict[int, int] = {}

    def step(
        self,
        *decode: int,
        read: tuple[int, ...] = (),
        drop: tuple[int, ...] = (),
    ) -> None:
        chunks = tuple(self._chunk(key) for key in read)
        result = self.backend.step(StepPlan(step=0, drop=drop, decode=decode, prefill=chunks))
        assert result.failed == {}
        for key, token in result.tokens.items():
            self.tokens.setdefault(key, []).append(token)

    def _chunk(self, key: int) -> PrefillChunk:
        start = self.read.get(key, 0)
        end = min(len(PROMPTS[key]), start + self.chunk)
        self.read[key] = end
        return PrefillChunk(
            sequence_id=key,
            tokens=PROMPTS[key][start:end],
            start=start,
            sampling=GREEDY if end == len(PROMPTS[key]) else None,
        )

    def read_prompt(self, key: int, *decode: int) -> None:
        while self.read.get(key, 0) < len(PROMPTS[key]):
            self.step(*decode, read=(key,))

    def check(self, expected: Mapping[int, list[int]]) -> None:
        for key, tokens in self.tokens.items():
            assert tokens == expected[key][: len(tokens)], f"sequence {key}"


def _expected(model: Any, settings: dict[str, Any]) -> dict[int, list[int]]:
    """Tokens of each prompt alone, for as long as the test decodes it at most."""
    count = 26
    if not settings:
        return {key: solo_tokens(model, prompt, count) for key, prompt in PROMPTS.items()}
    return {key: _by_hand(model, prompt, count, settings) for key, prompt in PROMPTS.items()}


def _by_hand(
    model: Any, prompt: tuple[int, ...], count: int, settings: dict[str, Any]
) -> list[int]:
    caches = new_caches(model, **settings)
    tokens: list[int] = []
    inputs = list(prompt)
    while len(tokens) < count:
        value: Any = mx.argmax(model(mx.array([inputs]), cache=caches)[0, -1]).item()
        tokens.append(int(value))
        inputs = tokens[-1:]
    return tokens


def _backend(model: Any, settings: dict[str, Any], **changes: Any) -> MLXBackend:
    used = WithCaches(model, **settings) if settings else model
    return make_backend(used, vocab_size=VOCAB_SIZE, **changes)


@pytest.mark.parametrize(("family", "choice"), CASES)
def test_together_equals_alone(family: Family, choice: str) -> None:
    """Joins, leaves and parking in mid-decode, with chunks of 5, in step and running ahead."""
    model, settings = model_of(family.name), CHOICES[choice]
    expected = _expected(model, settings)
    assert len({token for tokens in expected.values() for token in tokens}) > 8
    one_by_one = Conversation(_backend(model, settings), chunk=5)
    _take_turns(one_by_one)
    one_by_one.check(expected)
    if family.max_batch == 1:
        return
    crowd = Conversation(_backend(model, settings), chunk=5)
    _come_and_go(crowd)
    crowd.check(expected)
    assert [len(crowd.tokens[key]) for key in PROMPTS] == [21, 21, 11, 26, 16, 8]
    if choice != "plain" and family.name not in ("llama", "gemma3_text", "qwen3_next"):
        return
    ahead = Conversation(_backend(model, settings, run_ahead_s=float("inf")), chunk=30)
    _come_and_go(ahead)
    ahead.check(expected)


def _take_turns(talk: Conversation) -> None:
    """Sequences side by side, never two in one decode."""
    for key in PROMPTS:
        talk.read_prompt(key)
    for key in (0, 1, 1, 3, 0, 2, 4, 3, 5, 0, 5):
        talk.step(key)


def _come_and_go(talk: Conversation) -> None:
    for key in (0, 1):
        talk.read_prompt(key)
    for _ in range(4):
        talk.step(0, 1)
    talk.read_prompt(2, 0, 1)  # two chunks
    talk.read_prompt(3)  # six chunks, while the others are parked in the batch
    for _ in range(5):
        talk.step(0, 1, 2, 3)
    for _ in range(3):
        talk.step(1, 3)  # 0 and 2 are parked
    talk.read_prompt(4, 1, 3)
    for _ in range(5):
        talk.step(0, 1, 2, 3, 4)
    talk.step(0, 3, 4, drop=(1, 2))
    talk.read_prompt(5, 0, 3, 4)  # three chunks
    talk.step(3, 4, 5, drop=(0,))  # 5 takes the place of 0
    for _ in range(3):
        talk.step(3, 4, 5)
    for _ in range(3):
        talk.step(3)
    for _ in range(2):
        talk.step(4, 5)
    talk.step(5, drop=(3, 4))


@pytest.mark.parametrize("family", FAMILIES, ids=lambda family: family.name)
def test_what_the_server_finds_out(family: Family) -> None:
    model = model_of(family.name)
    used = new_caches(model)
    mx.eval(model(mx.array([[1, 2, 3]]), cache=used))
    assert prefix_mode(used) == family.prefix
    assert widest_batch(model) == family.max_batch
    assert _support(model, kv_bits=8) == family.quantized
    assert _support(model, max_kv_size=100) == family.limited


def _support(model: Any, **settings: Any) -> str:
    try:
        check_caches(model, **settings)
    except UnsupportedCaches:
        return "no"
    changed = [type(cache) for cache in new_caches(model, **settings)]
    return "ignored" if changed == [type(cache) for cache in new_caches(model)] else "yes"


@pytest.mark.parametrize(("family", "choice"), CASES)
def test_kept_caches_continue_like_the_original(family: Family, choice: str) -> None:
    """Blocks: token ranges of another sequence's caches, put together.  Snapshots: a copy."""
    model, settings = model_of(family.name), CHOICES[choice]
    prompt = PROMPTS[3]
    expected = _by_hand(model, prompt, 6, settings)
    source = new_caches(model, **settings)
    mx.eval(model(mx.array([prompt[:20]]), cache=source))
    mode = prefix_mode(source)
    assert mode == ("snapshots" if choice == "limited" else family.prefix)
    if mode == "blocks":
        mx.eval(model(mx.array([[7, 7, 7, 7]]), cache=source))  # goes on differently
        kept = _from_blocks(new_caches(model, **settings), source, (0, 8, 16, 20))
    else:
        kept = copy.deepcopy(source)
        mx.eval(model(mx.array([[7, 7, 7, 7]]), cache=source))
    tokens: list[int] = []
    inputs = list(prompt[20:])
    for _ in range(6):
        value: Any = mx.argmax(model(mx.array([inputs]), cache=kept)[0, -1]).item()
        tokens.append(int(value))
        inputs = tokens[-1:]
    assert tokens == expected


def _from_blocks(empty: Caches, source: Caches, edges: tuple[int, ...]) -> Caches:
    """``empty`` filled with the tokens between the first and the last edge of ``source``."""
    for new, old in zip(empty, source, strict=True):
        new.keys = blank(old.keys, 1, edges[-1])
        new.values = blank(old.values, 1, edges[-1])
        for start, end in pairwise(edges):
            block = slice(start, end)
            for target, origin in ((new.keys, old.keys), (new.values, old.values)):
                assert columns_of(origin) >= end
                assign(target, slice(None), block, cut(origin, slice(None), block))
        new.offset = edges[-1]
        if hasattr(old, "bits"):
            new.group_size = old.group_size
    return empty


def test_a_backend_decodes_one_by_one_where_caches_cannot_be_joined() -> None:
    model = model_of("llama4")
    caches = new_caches(model)
    mx.eval(model(mx.array([[1, 2, 3]]), cache=caches))
    assert not can_batch(caches)
    assert make_backend(model, vocab_size=VOCAB_SIZE).info.max_batch == 1
