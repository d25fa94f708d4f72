"""Small tokenizers of each family, built in memory."""

from __future__ import annotations

from tokenizers import AddedToken, Tokenizer, decoders, models, normalizers, pre_tokenizers

from models.detokenize import byte_level_alphabet

WORDS = ["Ġthe", "the", "Ġcap", "ital", "Ġof", "Fr", "ance", "Ġis", "Pa", "ris"]


def byte_level(*, specials: tuple[str, ...] = ("<|bos|>", "<|im_end|>")) -> Tokenizer:
    """Special tokens first, then the 256 bytes, a few merges, and one added, non-special token."""
    vocab: dict[str, int] = {}
    for token in [*specials, *byte_level_alphabet()]:
        vocab.setdefault(token, len(vocab))
    merges: list[tuple[str, str]] = []
    for word in WORDS:
        left = word[0]
        for char in word[1:]:
            if (left, char) not in merges:
                merges.append((left, char))
            vocab.setdefault(left + char, len(vocab))
            left += char
    # The first two bytes of the emoji block, so that characters split across uneven tokens.
    first, second = "ð", "Ł"
    merges.append((first, second))
    vocab.setdefault(first + second, len(vocab))
    tokenizer = Tokenizer(models.BPE(vocab=vocab, merges=merges))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens([AddedToken(text, special=True) for text in specials])
    tokenizer.add_tokens([AddedToken("<tool_call>", special=False, normalized=False)])
    return tokenizer


def sentencepiece_bpe(*, strip: bool = True) -> Tokenizer:
    """Llama 2 style: metaspace by normaliser, byte fallback, leading space stripped."""
    vocab = {"<unk>": 0, "<s>": 1, "</s>": 2}
    for byte in range(256):
        vocab[f"<0x{byte:02X}>"] = len(vocab)
    for char in "\u2581abcdefghijklmnop":
        vocab[char] = len(vocab)
    merges = [("\u2581", "a"), ("b", "c"), ("\u2581a", "bc")]
    for left, right in merges:
        vocab[left + right] = len(vocab)
    tokenizer = Tokenizer(
        models.BPE(vocab=vocab, merges=merges, byte_fallback=True, unk_token="<unk>", fuse_unk=True)
    )
    tokenizer.normalizer = normalizers.Sequence(
        [normalizers.Prepend("\u2581"), normalizers.Replace(" ", "\u2581")]
    )
    steps = [decoders.Replace("\u2581", " "), decoders.ByteFallback(), decoders.Fuse()]
    if strip:
        steps.append(decoders.Strip(" ", 1, 0))
    tokenizer.decoder = decoders.Sequence(steps)
    tokenizer.add_special_tokens(
        [AddedToken("<s>", special=True), AddedToken("</s>", special=True)]
    )
    return tokenizer


def wordpiece() -> Tokenizer:
    """A decoder that no table can stand for: it depends on the neighbouring token."""
    vocab = {"[UNK]": 0, "hello": 1, "wor": 2, "##ld": 3, "a": 4, "##b": 5}
    tokenizer = Tokenizer(models.WordPiece(vocab, unk_token="[UNK]"))
    tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
    tokenizer.decoder = decoders.WordPiece(cleanup=False)
    return tokenizer
