"""Vocabularies of GGUF files as tokenizers."""

from __future__ import annotations

import itertools
import json
import math
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from models.errors import ModelLoadError
from models.gguf_tokenizer import gguf_tokenizer
from tests.unit.tiny_llama import metadata
from tests.unit.tokenizers_for_tests import byte_level


def changed(**changes: Any) -> dict[str, Any]:
    entries = metadata()
    entries.update({f"tokenizer.ggml.{name}": value for name, value in changes.items()})
    return {name: value for name, value in entries.items() if value is not None}


@given(st.text(max_size=40))
def test_byte_level_equals_the_tokenizer_it_was_taken_from(text: str) -> None:
    tokenizer = TINY
    ids = tokenizer.encode(text, add_special=False)
    assert ids == SOURCE.encode(text, add_special_tokens=False).ids
    decoder = tokenizer.decoder()
    assert "".join(map(decoder.push, ids)) == text


SOURCE = byte_level()
TINY = gguf_tokenizer(metadata())


def test_token_types_and_roles() -> None:
    ids = TINY.encode("<|bos|>the<tool_call><|im_end|>", add_special=False)
    assert ids[0] == 0
    assert ids[-2:] == [SOURCE.token_to_id("<tool_call>"), 1]
    decoder = TINY.decoder()
    assert "".join(map(decoder.push, ids)) == "the<tool_call>"
    assert TINY.eos_ids == {1}
    assert TINY.special.variables is not None
    assert TINY.special.variables["bos_token"] == "<|bos|>"


def test_the_end_token_of_the_file_and_those_known_by_their_text() -> None:
    tokenizer = gguf_tokenizer(changed(eos_token_id=0, eot_token_id=5, eom_token_id=10**9))
    assert tokenizer.eos_ids == {0, 5, 1}  # 1 is <|im_end|>


def test_bos_follows_the_file() -> None:
    assert TINY.encode("the", add_special=True)[0] != 0
    tokenizer = gguf_tokenizer(changed(add_bos_token=True))
    assert tokenizer.encode("<|bos|>the", add_special=True).count(0) == 1
    assert tokenizer.encode("the", add_special=True)[0] == 0
    assert gguf_tokenizer(changed(pre="llama-bpe")).encode("the", add_special=True)[0] == 0


def pieces(pre: str, text: str) -> list[str]:
    steps = gguf_tokenizer(changed(pre=pre)).raw.pre_tokenizer
    assert steps is not None
    return [piece for piece, _ in steps.pre_tokenize_str(text)]


@pytest.mark.parametrize(
    ("pre", "expected"),
    [
        ("default", ["I", "'m", "Ġ1234", ",", "ĠOK", "ĊĊ"]),
        ("smollm", ["I", "'m", "Ġ", "1", "2", "3", "4", ",", "ĠOK", "ĊĊ"]),
        ("llama-bpe", ["I", "'m", "Ġ", "123", "4", ",", "ĠOK", "ĊĊ"]),
        ("qwen2", ["I", "'m", "Ġ", "1", "2", "3", "4", ",", "ĠOK", "ĊĊ"]),
    ],
)
def test_pre_tokenizers(pre: str, expected: list[str]) -> None:
    assert pieces(pre, "I'm 1234, OK\n\n") == expected


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"model": None}, "no vocabulary"),
        ({"tokens": None}, "no vocabulary"),
        ({"merges": None}, "no merges"),
        ({"merges": ["ab"]}, "malformed merge"),
        ({"merges": ["zz yy"]}, "not consistent"),
        ({"model": "bert"}, "'bert' is not supported"),
        ({"pre": "unheard-of"}, "'unheard-of'"),
        ({"model": "llama"}, "no token scores"),
    ],
)
def test_what_is_missing_or_unknown_is_named(changes: dict[str, Any], message: str) -> None:
    with pytest.raises(ModelLoadError, match=message):
        gguf_tokenizer(changed(**changes))


WORDS = ["\u2581", "a", "b", "c", "d", "ab", "bc", "cd", "abc", "\u2581a", "\u2581ab", "dd", "bcd"]


def sentencepiece(**changes: Any) -> dict[str, Any]:
    tokens = ["<unk>", "<s>", "</s>", *(f"<0x{byte:02X}>" for byte in range(256)), *WORDS]
    scores = [0.0] * 259 + [-math.sqrt(7 + 31 * index % 17) for index in range(len(WORDS))]
    types = [2, 3, 3, *[6] * 256, *[1] * len(WORDS)]
    entries = {
        "model": "llama",
        "tokens": tokens,
        "scores": scores,
        "token_type": types,
        "bos_token_id": 1,
        "eos_token_id": 2,
        "unknown_token_id": 0,
        **changes,
    }
    return {f"tokenizer.ggml.{name}": value for name, value in entries.items()}


def best_first(text: str, entries: dict[str, Any]) -> list[str]:
    """SentencePiece's rule: join the neighbours with the best score, the leftmost of equals."""
    scores = dict(
        zip(entries["tokenizer.ggml.tokens"], entries["tokenizer.ggml.scores"], strict=True)
    )
    symbols = list("\u2581" + text.replace(" ", "\u2581"))
    while True:
        joins = [
            (-scores[left + right], index)
            for index, (left, right) in enumerate(itertools.pairwise(symbols))
            if left + right in WORDS
        ]
        if not joins:
            return symbols
        _, index = min(joins)
        symbols[index : index + 2] = [symbols[index] + symbols[index + 1]]


@given(st.text(alphabet="abcd ", min_size=1, max_size=24))
def test_sentencepiece_joins_by_score(text: str) -> None:
    entries = sentencepiece()
    tokenizer = SPM
    ids = tokenizer.encode(text, add_special=False)
    tokens = [entries["tokenizer.ggml.tokens"][token_id] for token_id in ids]
    assert tokens == best_first(text, entries)


SPM = gguf_tokenizer(sentencepiece())


@given(st.text(max_size=24))
def test_sentencepiece_keeps_any_text_through_byte_tokens(text: str) -> None:
    text = text.replace("\u2581", "")
    decoder = SPM.decoder()
    ids = SPM.encode(text, add_special=False)
    assert "".join(map(decoder.push, ids)) == text


def test_sentencepiece_begins_with_bos_and_ends_with_its_end_token() -> None:
    assert SPM.encode("ab", add_special=True)[0] == 1
    assert SPM.eos_ids == {2}
    plain = gguf_tokenizer(sentencepiece(add_space_prefix=False))
    assert plain.raw.encode("ab", add_special_tokens=False).tokens == ["ab"]


def test_the_metadata_is_left_as_it_was() -> None:
    entries = metadata()
    before = json.dumps(entries)
    gguf_tokenizer(entries)
    assert json.dumps(entries) == before
