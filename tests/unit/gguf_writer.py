"""Writes GGUF files for the tests: metadata of any Python value, tensors in a few types."""

from __future__ import annotations

import struct
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

CODES = {"F32": 0, "F16": 1, "Q4_0": 2, "Q4_1": 3, "Q8_0": 8, "BF16": 30}


@dataclass(frozen=True, slots=True)
class Raw:
    """A tensor given as bytes: ``code`` of its type, row-major ``shape``."""

    code: int
    shape: tuple[int, ...]
    data: bytes


def encode(values: NDArray[np.float32], type_name: str) -> Raw:
    """Round ``values`` to a type."""
    return Raw(CODES[type_name], values.shape, _ENCODERS[type_name](values.astype(np.float32)))


def write_gguf(
    path: Path, metadata: Mapping[str, Any], tensors: Mapping[str, Raw], *, version: int = 3
) -> Path:
    out = b"GGUF" + struct.pack("<IQQ", version, len(tensors), len(metadata))
    for key, value in metadata.items():
        out += _string(key) + _value(value)
    offset = 0
    data = b""
    for name, tensor in tensors.items():
        out += _string(name) + struct.pack("<I", len(tensor.shape))
        out += b"".join(struct.pack("<Q", extent) for extent in reversed(tensor.shape))
        out += struct.pack("<IQ", tensor.code, offset)
        padded = tensor.data + b"\x00" * (-len(tensor.data) % 32)
        data += padded
        offset += len(padded)
    path.write_bytes(out + b"\x00" * (-len(out) % 32) + data)
    return path


def _string(text: str) -> bytes:
    raw = text.encode()
    return struct.pack("<Q", len(raw)) + raw


def _value(value: Any) -> bytes:
    match value:
        case bool():
            return struct.pack("<I?", 7, value)
        case int():
            return struct.pack("<II", 4, value)
        case float():
            return struct.pack("<If", 6, value)
        case str():
            return struct.pack("<I", 8) + _string(value)
        case list():
            items = [_value(item) for item in value]
            head = items[0][:4] if items else struct.pack("<I", 4)
            body = b"".join(item[4:] for item in items)
            return struct.pack("<I", 9) + head + struct.pack("<Q", len(items)) + body
    raise TypeError(type(value))


def _halves(values: NDArray[np.float32]) -> NDArray[np.uint8]:
    return values.astype("<f2").view(np.uint8).reshape(-1, 2)


def _nibbles(q: NDArray[np.uint8]) -> NDArray[np.uint8]:
    return (q[:, :16] | (q[:, 16:] << 4)).astype(np.uint8)


def _q4_0(values: NDArray[np.float32]) -> bytes:
    groups = values.reshape(-1, 32)
    scale = np.abs(groups).max(axis=1) / 7 + 1e-8
    q = np.clip(np.round(groups / scale[:, None]) + 8, 0, 15).astype(np.uint8)
    return np.concatenate([_halves(scale), _nibbles(q)], axis=1).tobytes()


def _q4_1(values: NDArray[np.float32]) -> bytes:
    groups = values.reshape(-1, 32)
    low = groups.min(axis=1)
    scale = (groups.max(axis=1) - low) / 15 + 1e-8
    q = np.clip(np.round((groups - low[:, None]) / scale[:, None]), 0, 15).astype(np.uint8)
    return np.concatenate([_halves(scale), _halves(low), _nibbles(q)], axis=1).tobytes()


def _q8_0(values: NDArray[np.float32]) -> bytes:
    groups = values.reshape(-1, 32)
    scale = np.abs(groups).max(axis=1) / 127 + 1e-8
    q = np.round(groups / scale[:, None]).astype(np.int8).view(np.uint8)
    return np.concatenate([_halves(scale), q], axis=1).tobytes()


_ENCODERS = {
    "F32": lambda values: values.astype("<f4").tobytes(),
    "F16": lambda values: values.astype("<f2").tobytes(),
    "BF16": lambda values: (values.view("<u4") >> 16).astype("<u2").tobytes(),
    "Q4_0": _q4_0,
    "Q4_1": _q4_1,
    "Q8_0": _q8_0,
}
