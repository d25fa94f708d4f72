"""Chained hashes of token blocks: equal hashes mean equal prefixes, up to the last block."""

from __future__ import annotations

import hashlib
from array import array
from collections.abc import Callable, Iterator, Sequence

Hash = Callable[[bytes], bytes]


def sha256(data: bytes) -> bytes:
    return hashlib.sha256(data).digest()


def hash_by_name(name: str) -> Hash:
    """Raises ValueError for a hash that this installation does not have."""
    if name == "sha256":
        return sha256
    if name == "blake3":
        try:
            from blake3 import blake3  # type: ignore[import-not-found, unused-ignore]
        except ImportError:
            raise ValueError("the hash blake3 needs the package blake3") from None

        def digest(data: bytes) -> bytes:
            return bytes(blake3(data).digest())

        return digest
    raise ValueError(f"unknown hash {name}")


def token_bytes(tokens: Sequence[int]) -> bytes:
    """Four bytes per token, little endian on the machines that MLX runs on."""
    return array("I", tokens).tobytes()


def chain(
    root: bytes, tokens: Sequence[int], block: int, hash_of: Hash
) -> Iterator[tuple[bytes, tuple[int, ...]]]:
    """(hash, tokens) of each whole block; h_i = H(h_(i-1) + tokens of block i), h_0 = ``root``."""
    current = root
    for start in range(0, len(tokens) - block + 1, block):
        part = tuple(tokens[start : start + block])
        current = hash_of(current + token_bytes(part))
        yield current, part
