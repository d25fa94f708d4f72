"""Token ids to text, one token at a time, without ever showing half a character.

Most tokenizers map a token to fixed bytes.  For those one table, shared by all sequences, is built
at load, and a push is a list access and one call of the codec (below 2 microseconds).  Tokenizers
whose decoder is not recognised are decoded through ``Tokenizer.decode`` over a short window.
"""

from __future__ import annotations

import codecs
import json
from collections.abc import Callable, Sequence
from typing import Any, Final

from tokenizers import Tokenizer

from models.text_model import IncrementalDecoder

REPLACEMENT: Final = "\ufffd"
_UTF8: Final = codecs.getincrementaldecoder("utf-8")
_METASPACE: Final = "\u2581"
_LONGEST_WAIT: Final = 16  # tokens: a character has at most four bytes, so this is broken text


class TableDecoder:
    """Bytes per token plus an incremental UTF-8 decoder.

    Bytes that can never become a character show as U+FFFD, as in a decode of the whole; those of a
    character that is merely unfinished are held back.  Ids outside the table have no text.
    """

    __slots__ = ("_codec", "_decode", "_strip_first", "_table")

    def __init__(self, table: Sequence[bytes], *, strip_first_space: bool = False) -> None:
        self._table = table
        self._codec = _UTF8(errors="replace")
        self._decode = self._codec.decode
        self._strip_first = strip_first_space

    def push(self, token_id: int) -> str:
        try:
            text = self._decode(self._table[token_id])
        except IndexError:
            return ""
        if self._strip_first and text:
            self._strip_first = False
            return text.removeprefix(" ")
        return text

    def flush(self) -> str:
        self._codec.reset()
        return ""


class WindowDecoder:
    """Any tokenizer: decode the ids since the last clean break, with and without the new one.

    ``tokenizers.decoders.DecodeStream`` does the same but raises when a later token changes text
    that was already given out (broken byte tokens do that), which one sequence must not do to its
    batch; here the text that was given out simply stays.
    """

    __slots__ = ("_given", "_ids", "_tokenizer", "_window")

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._tokenizer = tokenizer
        self._window: list[int] = []  # ids whose text is given out and that give context
        self._ids: list[int] = []  # ids after them
        self._given = ""  # text of the window

    def push(self, token_id: int) -> str:
        self._ids.append(token_id)
        text = self._decode(self._window + self._ids)
        waiting = len(text) <= len(self._given) or text.endswith(REPLACEMENT)
        if waiting and len(self._ids) < _LONGEST_WAIT:
            return ""
        fresh = text[len(self._given) :]
        self._window = self._ids
        self._ids = []
        self._given = self._decode(self._window)
        return fresh

    def flush(self) -> str:
        """Text in front of the unfinished character, if any was held back with it."""
        text = self._decode(self._window + self._ids)[len(self._given) :]
        self._window, self._ids, self._given = [], [], ""
        return text.rstrip(REPLACEMENT)

    def _decode(self, ids: list[int]) -> str:
        return str(self._tokenizer.decode(ids, skip_special_tokens=True))


def byte_level_alphabet() -> dict[str, int]:
    """The printable stand-in of every byte in byte-level BPE vocabularies: character -> byte.

    Printable Latin-1 characters stand for themselves, the other bytes take U+0100 onwards in order.
    """
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    alphabet = {chr(byte): byte for byte in printable}
    others = sorted(set(range(256)).difference(printable))
    alphabet.update({chr(0x100 + index): byte for index, byte in enumerate(others)})
    return alphabet


def _byte_level_bytes() -> Callable[[str], bytes]:
    alphabet = byte_level_alphabet()

    def to_bytes(token: str) -> bytes:
        try:
            return bytes([alphabet[char] for char in token])
        except KeyError:
            return token.encode()

    return to_bytes


def _sentencepiece_bytes(token: str) -> bytes:
    if len(token) == 6 and token.startswith("<0x") and token.endswith(">"):
        try:
            return bytes([int(token[3:5], 16)])
        except ValueError:
            pass
    return token.replace(_METASPACE, " ").encode()


def token_table(tokenizer: Tokenizer, to_bytes: Callable[[str], bytes]) -> list[bytes]:
    """Bytes of every id.  Special tokens have none; other added tokens are their own text."""
    added = tokenizer.get_added_tokens_decoder()
    vocab = tokenizer.get_vocab(with_added_tokens=True)
    table = [b""] * (max(vocab.values(), default=-1) + 1)
    for token, token_id in vocab.items():
        if token_id not in added:
            table[token_id] = to_bytes(token)
    for token_id, extra in added.items():
        table[token_id] = b"" if extra.special else extra.content.encode()
    return table


def byte_table(tokenizer: Tokenizer) -> list[bytes] | None:
    """The bytes of every id, where they do not depend on their neighbours; None elsewhere."""
    steps = _decoder_steps(tokenizer)
    if [step["type"] for step in steps] == ["ByteLevel"]:
        return token_table(tokenizer, _byte_level_bytes())
    if _sentencepiece_strip(steps) is not None:
        return token_table(tokenizer, _sentencepiece_bytes)
    return None


def decoder_factory(
    tokenizer: Tokenizer, table: list[bytes] | None
) -> Callable[[], IncrementalDecoder]:
    """How to make a decoder per sequence for this tokenizer; ``table`` is its ``byte_table``."""
    if table is None:
        return lambda: WindowDecoder(tokenizer)
    strip = bool(_sentencepiece_strip(_decoder_steps(tokenizer)))
    return lambda: TableDecoder(table, strip_first_space=strip)


def _decoder_steps(tokenizer: Tokenizer) -> list[dict[str, Any]]:
    decoder = json.loads(tokenizer.to_str()).get("decoder") if tokenizer.decoder else None
    if decoder is None:
        return []
    steps = decoder["decoders"] if decoder["type"] == "Sequence" else [decoder]
    # Fuse joins the pieces, which a table does anyway when nothing but bytes came before.
    if [step["type"] for step in steps] == ["ByteLevel", "Fuse"]:
        return list(steps[:1])
    return list(steps)


def _sentencepiece_strip(steps: list[dict[str, Any]]) -> bool | None:
    """Whether the first space goes, for ``Replace, ByteFallback, Fuse[, Strip]``; None: another."""
    if [step["type"] for step in steps[:3]] != ["Replace", "ByteFallback", "Fuse"]:
        return None
    if steps[0].get("pattern") != {"String": _METASPACE} or steps[0].get("content") != " ":
        return None
    match steps[3:]:
        case []:
            return False
        case [{"type": "Strip", "content": " ", "start": 1, "stop": 0}]:
            return True
        case _:
            return None
