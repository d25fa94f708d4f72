"""Text to token ids, and which ids mean something."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tokenizers import Tokenizer

from models.detokenize import byte_table, decoder_factory
from models.errors import ModelLoadError
from models.text_model import IncrementalDecoder

TOKENIZER_FILE = "tokenizer.json"


@dataclass(frozen=True, slots=True, kw_only=True)
class SpecialTokens:
    """Texts and ids of the tokens with a role; None: the model has none.

    ``add_bos``: True adds BOS to a prompt, False never does, None leaves it to the tokenizer's own
    post-processor.  ``variables`` are the texts by the names that chat templates use.
    """

    bos_id: int | None = None
    eos_ids: frozenset[int] = frozenset()
    add_bos: bool | None = None
    variables: Mapping[str, str | None] | None = None


class TextTokenizer:
    """A ``tokenizers.Tokenizer`` with its roles.  Immutable after construction, thread-safe."""

    def __init__(self, tokenizer: Tokenizer, special: SpecialTokens) -> None:
        # Files made for training may cut or pad; a prompt must be neither.
        tokenizer.no_truncation()
        tokenizer.no_padding()
        self._tokenizer = tokenizer
        self._special = special
        self._table = byte_table(tokenizer)
        self._make_decoder: Callable[[], IncrementalDecoder] = decoder_factory(
            tokenizer, self._table
        )
        ids = tokenizer.encode("\n", add_special_tokens=False).ids
        self._newlines = frozenset(ids if len(ids) == 1 else ())
        added = tokenizer.get_added_tokens_decoder()
        self._special_ids = frozenset(one for one, token in added.items() if token.special)

    @property
    def raw(self) -> Tokenizer:
        return self._tokenizer

    @property
    def special(self) -> SpecialTokens:
        return self._special

    @property
    def eos_ids(self) -> frozenset[int]:
        return self._special.eos_ids

    @property
    def newline_ids(self) -> frozenset[int]:
        """Tokens that are exactly one newline."""
        return self._newlines

    @property
    def vocab_size(self) -> int:
        """Tokens that have a text; the model may have more rows."""
        return int(self._tokenizer.get_vocab_size(with_added_tokens=True))

    def encode(self, text: str, *, add_special: bool) -> list[int]:
        """Token ids.  Special tokens written in ``text`` are recognised.

        With ``add_special`` the ids start with BOS (if the model wants one, or if there is nothing
        else), exactly once, even
        when the text begins with it already.  Text that is not valid Unicode (lone surrogates) is
        encoded with U+FFFD in their place.
        """
        try:
            ids = self._encode(text, add_special=add_special)
        except (UnicodeEncodeError, TypeError):
            clean = text.encode("utf-16", "surrogatepass").decode("utf-16", "replace")
            ids = self._encode(clean, add_special=add_special)
        return self._with_bos(ids) if add_special else ids

    def decoder(self) -> IncrementalDecoder:
        return self._make_decoder()

    def token_bytes(self, token_id: int) -> bytes:
        """What the token adds to a text; special tokens by their name, unknown ids nothing."""
        name = self._tokenizer.id_to_token(token_id)
        if name is None:
            return b""
        if token_id in self._special_ids:
            return str(name).encode()
        if self._table is not None:
            return self._table[token_id]
        return str(self._tokenizer.decode([token_id], skip_special_tokens=False)).encode()

    def _encode(self, text: str, *, add_special: bool) -> list[int]:
        return list(self._tokenizer.encode(text, add_special_tokens=add_special).ids)

    def _with_bos(self, ids: list[int]) -> list[int]:
        bos = self._special.bos_id
        if bos is None:
            return ids
        if not ids:
            return [bos]  # something has to be evaluated
        if self._special.add_bos and ids[:1] != [bos]:
            return [bos, *ids]
        while ids[:2] == [bos, bos]:
            ids = ids[1:]
        return ids


def load_folder(folder: Path, config: Mapping[str, Any]) -> TextTokenizer:
    """The tokenizer of a model folder.  Raises ModelLoadError.

    End tokens are the union of what ``generation_config.json``, ``config`` (an id or a list each)
    and ``tokenizer_config.json`` (a text) name.
    """
    path = folder / TOKENIZER_FILE
    try:
        text = path.read_text(encoding="utf-8")
    except FileNotFoundError as error:
        raise ModelLoadError(f"the model folder {folder} has no {TOKENIZER_FILE}") from error
    except (OSError, UnicodeDecodeError) as error:
        raise ModelLoadError(f"cannot read {path}: {_reason(error)}") from error
    tokenizer = parse_tokenizer(text, str(path))
    tokenizer_config = read_json(folder / "tokenizer_config.json")
    generation_config = read_json(folder / "generation_config.json")
    texts = _special_texts(tokenizer_config, read_json(folder / "special_tokens_map.json"))
    eos = {*_ids(generation_config.get("eos_token_id")), *_ids(config.get("eos_token_id"))}
    text_config = config.get("text_config")
    if isinstance(text_config, Mapping):
        eos.update(_ids(text_config.get("eos_token_id")))
    eos_text = texts.get("eos_token")
    if eos_text is not None and (eos_id := tokenizer.token_to_id(eos_text)) is not None:
        eos.add(eos_id)
    add_bos = tokenizer_config.get("add_bos_token")
    return TextTokenizer(
        tokenizer,
        SpecialTokens(
            bos_id=_bos_id(tokenizer, texts.get("bos_token"), config),
            eos_ids=frozenset(eos),
            add_bos=add_bos if isinstance(add_bos, bool) else None,
            variables=texts,
        ),
    )


def parse_tokenizer(text: str, where: str) -> Tokenizer:
    """A tokenizer from the text of a ``tokenizer.json``.  Raises ModelLoadError."""
    try:
        data = json.loads(text)
    except ValueError as error:
        raise ModelLoadError(f"{where} is not valid JSON: {error}") from error
    if not isinstance(data, dict) or "model" not in data:
        raise ModelLoadError(f"{where} is not a tokenizer file")
    try:
        return Tokenizer.from_str(text)
    except Exception as error:  # the library raises nothing narrower than Exception
        raise ModelLoadError(f"{where} cannot be read as a tokenizer: {error}") from error


def read_json(path: Path) -> dict[str, Any]:
    """A JSON object from an optional file: {} when there is none.  Raises ModelLoadError."""
    try:
        data = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        return {}
    except OSError as error:
        raise ModelLoadError(f"cannot read {path}: {_reason(error)}") from error
    except ValueError as error:
        raise ModelLoadError(f"{path} is not valid JSON: {error}") from error
    if not isinstance(data, dict):
        raise ModelLoadError(f"{path} does not hold a JSON object")
    return data


def _reason(error: OSError | UnicodeDecodeError) -> str:
    return (error.strerror or str(error)) if isinstance(error, OSError) else "not UTF-8 text"


def _ids(value: object) -> Iterable[int]:
    if isinstance(value, bool):
        return ()
    if isinstance(value, int):
        return (value,)
    if isinstance(value, list):
        return tuple(item for item in value if isinstance(item, int))
    return ()


def _special_texts(*sources: Mapping[str, Any]) -> dict[str, str | None]:
    """``bos_token``, ``eos_token`` ... by name; the first source that has one wins."""
    texts: dict[str, str | None] = {}
    for source in sources:
        for name, value in source.items():
            if not name.endswith("_token") or name in texts:
                continue
            text = value.get("content") if isinstance(value, Mapping) else value
            if isinstance(text, str):
                texts[name] = text
    return texts


def _bos_id(tokenizer: Tokenizer, text: str | None, config: Mapping[str, Any]) -> int | None:
    if text is not None:
        found: int | None = tokenizer.token_to_id(text)
        return found
    return next(iter(_ids(config.get("bos_token_id"))), None)
