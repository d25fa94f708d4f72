"""Incremental decoding equals decoding the whole and never shows half a character."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st
from tokenizers import Tokenizer, decoders

from models.detokenize import REPLACEMENT, TableDecoder, WindowDecoder, byte_table, decoder_factory
from tests.unit.tokenizers_for_tests import byte_level, sentencepiece_bpe, wordpiece

BYTE_LEVEL = byte_level()
SPM = sentencepiece_bpe()
SPM_NO_STRIP = sentencepiece_bpe(strip=False)
WORDPIECE = wordpiece()
TABLES = {
    id(tok): decoder_factory(tok, byte_table(tok))
    for tok in (BYTE_LEVEL, SPM, SPM_NO_STRIP, WORDPIECE)
}

PIECES = st.sampled_from(
    [
        "👩‍👩‍👧‍👦",
        "🏳️‍🌈",
        "日本語",
        "é",
        "e\u0301",
        "the capital",
        "\u200d",
        "\U0001d54f",
        "\n",
        "abc",
        "한국",
        "\x00",
    ]
)
TEXT = st.lists(PIECES | st.text(max_size=8), max_size=8).map("".join)


def pushed(tokenizer: Tokenizer, ids: list[int]) -> str:
    decoder = TABLES[id(tokenizer)]()
    return "".join([decoder.push(token_id) for token_id in ids]) + decoder.flush()


def ids_of(tokenizer: Tokenizer, text: str) -> list[int]:
    return list(tokenizer.encode(text, add_special_tokens=False).ids)


@given(TEXT)
def test_byte_level_equals_the_whole(text: str) -> None:
    ids = ids_of(BYTE_LEVEL, text)
    assert pushed(BYTE_LEVEL, ids) == BYTE_LEVEL.decode(ids) == text


@given(TEXT)
def test_sentencepiece_equals_the_whole(text: str) -> None:
    for tokenizer in (SPM, SPM_NO_STRIP):
        ids = ids_of(tokenizer, text)
        assert pushed(tokenizer, ids) == tokenizer.decode(ids)


@given(TEXT)
def test_a_cut_anywhere_shows_no_replacement_character(text: str) -> None:
    text = text.replace(REPLACEMENT, "")
    for tokenizer in (BYTE_LEVEL, SPM):
        whole = tokenizer.decode(ids_of(tokenizer, text))
        ids = ids_of(tokenizer, text)
        for cut in range(len(ids) + 1):
            part = pushed(tokenizer, ids[:cut])
            assert REPLACEMENT not in part
            assert whole.startswith(part)


@given(st.lists(st.integers(0, BYTE_LEVEL.get_vocab_size() + 3), max_size=30))
def test_any_byte_level_ids_decode_as_the_whole_up_to_the_unfinished_end(ids: list[int]) -> None:
    whole = BYTE_LEVEL.decode(ids)
    assert pushed(BYTE_LEVEL, ids).rstrip(REPLACEMENT) == whole.rstrip(REPLACEMENT)


@given(TEXT)
def test_the_window_decoder_equals_the_whole(text: str) -> None:
    text = text.replace(REPLACEMENT, "")
    for tokenizer in (BYTE_LEVEL, SPM):
        ids = ids_of(tokenizer, text)
        decoder = WindowDecoder(tokenizer)
        out = ""
        for token_id in ids:
            out += decoder.push(token_id)
            assert REPLACEMENT not in out
        assert out + decoder.flush() == tokenizer.decode(ids)


def test_an_unrecognised_decoder_uses_the_window() -> None:
    assert isinstance(TABLES[id(WORDPIECE)](), WindowDecoder)
    ids = ids_of(WORDPIECE, "hello world ab hello")
    assert pushed(WORDPIECE, ids) == WORDPIECE.decode(ids) == "hello world ab hello"


def test_a_window_decoder_drops_an_unfinished_character_but_no_text() -> None:
    ids = ids_of(BYTE_LEVEL, "ok 🙂")
    decoder = WindowDecoder(BYTE_LEVEL)
    out = "".join(decoder.push(token_id) for token_id in ids[:-1])
    assert out + decoder.flush() == "ok "


def test_broken_bytes_do_not_hold_the_text_back_for_ever() -> None:
    decoder = WindowDecoder(BYTE_LEVEL)
    broken = ids_of(BYTE_LEVEL, "日")[0]
    out = "".join(decoder.push(broken) for _ in range(40))
    assert 0 < len(decoder.flush()) + len(out) <= 40
    assert out.startswith(REPLACEMENT)


def test_special_tokens_have_no_text_and_other_added_tokens_do() -> None:
    ids = [BYTE_LEVEL.token_to_id(token) for token in ("<|bos|>", "<tool_call>", "<|im_end|>")]
    assert pushed(BYTE_LEVEL, ids) == "<tool_call>"


def test_added_tokens_outside_the_byte_alphabet_keep_their_text() -> None:
    tokenizer = byte_level()
    tokenizer.add_tokens(["<é 日>"])
    decoder = decoder_factory(tokenizer, byte_table(tokenizer))()
    assert decoder.push(tokenizer.token_to_id("<é 日>")) == "<é 日>"


def test_ids_beyond_the_vocabulary_have_no_text() -> None:
    decoder = TABLES[id(BYTE_LEVEL)]()
    assert decoder.push(10**6) == ""


def test_byte_level_inside_a_sequence_is_recognised() -> None:
    tokenizer = byte_level()
    tokenizer.decoder = decoders.Sequence([decoders.ByteLevel(), decoders.Fuse()])
    decoder = decoder_factory(tokenizer, byte_table(tokenizer))()
    assert isinstance(decoder, TableDecoder)
    assert "".join(map(decoder.push, ids_of(tokenizer, "the 日本"))) == "the 日本"


def test_decoders_of_two_sequences_share_no_state() -> None:
    first, second = TABLES[id(BYTE_LEVEL)](), TABLES[id(BYTE_LEVEL)]()
    ids = ids_of(BYTE_LEVEL, "日")
    assert first.push(ids[0]) == ""
    assert second.push(ids_of(BYTE_LEVEL, "x")[0]) == "x"
    assert "".join(map(first.push, ids[1:])) == "日"
