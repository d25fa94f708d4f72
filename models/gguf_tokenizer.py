"""A ``tokenizers.Tokenizer`` out of the vocabulary that a GGUF file carries."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Final

from tokenizers import (
    AddedToken,
    Regex,
    Tokenizer,
    decoders,
    normalizers,
    pre_tokenizers,
)
from tokenizers import models as tokenizer_models

from models.errors import ModelLoadError
from models.tokenizer import SpecialTokens, TextTokenizer

CONTROL: Final = 3
USER_DEFINED: Final = 4
_METASPACE: Final = "\u2581"

# Control tokens that end a turn or a document in the families that use byte-level BPE; files often
# name only one of them as the end token.
END_TEXTS: Final = frozenset(
    {
        "<|im_end|>",
        "<|eot_id|>",
        "<|eom_id|>",
        "<|end|>",
        "<|endoftext|>",
        "<|end_of_text|>",
        "<end_of_turn>",
        "</s>",
        "<EOT>",
    }
)

_CONTRACTIONS: Final = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)"
_WORDS: Final = r"[^\r\n\p{L}\p{N}]?\p{L}+"
_REST: Final = r" ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
_LLAMA3: Final = rf"{_CONTRACTIONS}|{_WORDS}|\p{{N}}{{1,3}}|{_REST}"
_QWEN2: Final = rf"{_CONTRACTIONS}|{_WORDS}|\p{{N}}|{_REST}"

_GPT2_NAMES: Final = frozenset(
    {"default", "gpt-2", "phi-2", "jina-es", "jina-de", "mpt", "olmo", "jais", "exaone"}
)
_DIGIT_NAMES: Final = frozenset({"smollm", "starcoder", "refact", "command-r", "codeshell"})
_LLAMA3_NAMES: Final = frozenset(
    {"llama3", "llama-v3", "llama-bpe", "falcon3", "pixtral", "llama4-bpe"}
)
_QWEN2_NAMES: Final = frozenset({"qwen2", "stablelm2", "deepseek-r1-qwen", "megrez"})


def gguf_tokenizer(metadata: Mapping[str, Any]) -> TextTokenizer:
    """The tokenizer a file's metadata describes.  Raises ModelLoadError, naming what is missing."""
    kind = metadata.get("tokenizer.ggml.model")
    tokens = metadata.get("tokenizer.ggml.tokens")
    if kind is None or not isinstance(tokens, list) or not tokens:
        raise ModelLoadError("the GGUF file has no vocabulary (tokenizer.ggml.tokens)")
    types = metadata.get("tokenizer.ggml.token_type")
    if not isinstance(types, list) or len(types) != len(tokens):
        types = [1] * len(tokens)
    match kind:
        case "gpt2":
            tokenizer = _byte_level(metadata, tokens)
        case "llama":
            tokenizer = _sentencepiece(metadata, tokens)
        case _:
            raise ModelLoadError(
                f"the GGUF file's tokenizer model {kind!r} is not supported (gpt2 and llama are)"
            )
    _add_tokens(tokenizer, tokens, types)
    return TextTokenizer(tokenizer, _special(metadata, tokens, types, kind))


def _byte_level(metadata: Mapping[str, Any], tokens: list[str]) -> Tokenizer:
    merges = metadata.get("tokenizer.ggml.merges")
    if not isinstance(merges, list):
        raise ModelLoadError("the GGUF file has no merges (tokenizer.ggml.merges)")
    pairs: list[tuple[str, str]] = []
    for merge in merges:
        # A token may start with a space stand-in but never contains a space itself.
        left, found, right = merge.partition(" ")
        if not found:
            raise ModelLoadError("the GGUF file has a malformed merge (tokenizer.ggml.merges)")
        pairs.append((left, right))
    name = metadata.get("tokenizer.ggml.pre", "default")
    try:
        model = tokenizer_models.BPE(
            vocab=_vocab(tokens), merges=pairs, ignore_merges=name in _LLAMA3_NAMES
        )
    except Exception as error:  # the library raises nothing narrower than Exception
        raise ModelLoadError(f"the GGUF file's vocabulary is not consistent: {error}") from error
    tokenizer = Tokenizer(model)
    tokenizer.pre_tokenizer = _pre_tokenizer(name)
    if name in _QWEN2_NAMES:
        tokenizer.normalizer = normalizers.NFC()
    tokenizer.decoder = decoders.ByteLevel()
    return tokenizer


def _pre_tokenizer(name: object) -> pre_tokenizers.PreTokenizer:
    if name in _GPT2_NAMES:
        return pre_tokenizers.ByteLevel(add_prefix_space=False)
    if name in _DIGIT_NAMES:
        return pre_tokenizers.Sequence(
            [
                pre_tokenizers.Digits(individual_digits=True),
                pre_tokenizers.ByteLevel(add_prefix_space=False),
            ]
        )
    if name in _LLAMA3_NAMES or name in _QWEN2_NAMES:
        pattern = _LLAMA3 if name in _LLAMA3_NAMES else _QWEN2
        return pre_tokenizers.Sequence(
            [
                pre_tokenizers.Split(Regex(pattern), behavior="isolated"),
                pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
            ]
        )
    raise ModelLoadError(
        f"the GGUF file's pre-tokenizer {name!r} (tokenizer.ggml.pre) is not supported"
    )


def _sentencepiece(metadata: Mapping[str, Any], tokens: list[str]) -> Tokenizer:
    """SentencePiece BPE: it joins the pair whose result has the highest score, so every way to
    split a token into two tokens is a merge, in the order of the scores."""
    scores = metadata.get("tokenizer.ggml.scores")
    if not isinstance(scores, list) or len(scores) != len(tokens):
        raise ModelLoadError("the GGUF file has no token scores (tokenizer.ggml.scores)")
    vocab = _vocab(tokens)
    unknown = metadata.get("tokenizer.ggml.unknown_token_id", 0)
    types = metadata.get("tokenizer.ggml.token_type") or [1] * len(tokens)
    normal = {token for token, kind in zip(tokens, types, strict=False) if kind == 1}
    tokenizer = Tokenizer(
        tokenizer_models.BPE(
            vocab=vocab,
            merges=_score_merges(vocab, scores, normal),
            byte_fallback=True,
            fuse_unk=True,
            unk_token=_text(tokens, unknown),
        )
    )
    steps = [decoders.Replace(_METASPACE, " "), decoders.ByteFallback(), decoders.Fuse()]
    spaces = normalizers.Replace(" ", _METASPACE)
    if metadata.get("tokenizer.ggml.add_space_prefix", True):
        tokenizer.normalizer = normalizers.Sequence([normalizers.Prepend(_METASPACE), spaces])
        steps.append(decoders.Strip(" ", 1, 0))
    else:
        tokenizer.normalizer = spaces
    tokenizer.decoder = decoders.Sequence(steps)
    return tokenizer


def _score_merges(
    vocab: Mapping[str, int], scores: Sequence[float], normal: set[str]
) -> list[tuple[str, str]]:
    found: list[tuple[float, int, int, str, str]] = []
    for token in normal:
        token_id = vocab[token]
        for cut in range(1, len(token)):
            left, right = token[:cut], token[cut:]
            if left in normal and right in normal:
                found.append((-scores[token_id], token_id, cut, left, right))
    found.sort()
    return [(left, right) for _, _, _, left, right in found]


def _vocab(tokens: list[str]) -> dict[str, int]:
    vocab: dict[str, int] = {}
    for index, token in enumerate(tokens):
        if vocab.setdefault(token, index) != index:
            # A duplicate keeps its place under a name that no text produces.
            vocab[f"\x00duplicate {index}"] = index
    return vocab


def _add_tokens(tokenizer: Tokenizer, tokens: list[str], types: list[int]) -> None:
    special = [
        AddedToken(text, special=True, normalized=False)
        for text, kind in zip(tokens, types, strict=True)
        if kind == CONTROL and text
    ]
    plain = [
        AddedToken(text, special=False, normalized=False)
        for text, kind in zip(tokens, types, strict=True)
        if kind == USER_DEFINED and text
    ]
    tokenizer.add_special_tokens(special)
    tokenizer.add_tokens(plain)


def _special(
    metadata: Mapping[str, Any], tokens: list[str], types: list[int], kind: str
) -> SpecialTokens:
    eos: set[int] = set()
    for name in ("eos_token_id", "eot_token_id", "eom_token_id"):
        token_id = metadata.get(f"tokenizer.ggml.{name}")
        if isinstance(token_id, int) and _text(tokens, token_id) is not None:
            eos.add(token_id)
    eos.update(
        index
        for index, (text, token_type) in enumerate(zip(tokens, types, strict=True))
        if token_type == CONTROL and text in END_TEXTS
    )
    bos_id = metadata.get("tokenizer.ggml.bos_token_id")
    add_bos = metadata.get("tokenizer.ggml.add_bos_token")
    if not isinstance(add_bos, bool):
        # Without a statement: SentencePiece and Llama 3 vocabularies begin with BOS.
        add_bos = kind == "llama" or metadata.get("tokenizer.ggml.pre") in _LLAMA3_NAMES
    roles = {"bos": "bos", "eos": "eos", "unk": "unknown", "pad": "padding"}
    return SpecialTokens(
        bos_id=bos_id if _text(tokens, bos_id) is not None else None,
        eos_ids=frozenset(eos),
        add_bos=add_bos,
        variables={
            f"{short}_token": _text(tokens, metadata.get(f"tokenizer.ggml.{long}_token_id"))
            for short, long in roles.items()
        },
    )


def _text(tokens: list[str], token_id: object) -> str | None:
    if isinstance(token_id, int) and 0 <= token_id < len(tokens):
        return tokens[token_id]
    return None
