"""The GGUF container: header, metadata and tensor directory, checked before any data is read.

Everything is bounds-checked against the size of the file, so a truncated or foreign file is an
error message and never a crash or a huge allocation.  No MLX here.
"""

from __future__ import annotations

import math
import mmap
import struct
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

from models.errors import ModelLoadError

MAGIC: Final = b"GGUF"
VERSIONS: Final = (2, 3)
MAX_DIMS: Final = 4
MAX_ENTRIES: Final = 1 << 20  # tensors, and metadata entries
MAX_NESTING: Final = 3

# Type code -> name, elements per block, bytes per block.
TENSOR_TYPES: Final[Mapping[int, tuple[str, int, int]]] = {
    0: ("F32", 1, 4),
    1: ("F16", 1, 2),
    2: ("Q4_0", 32, 18),
    3: ("Q4_1", 32, 20),
    6: ("Q5_0", 32, 22),
    7: ("Q5_1", 32, 24),
    8: ("Q8_0", 32, 34),
    12: ("Q4_K", 256, 144),
    13: ("Q5_K", 256, 176),
    14: ("Q6_K", 256, 210),
    30: ("BF16", 1, 2),
}
OTHER_TYPES: Final[Mapping[int, str]] = {
    9: "Q8_1",
    10: "Q2_K",
    11: "Q3_K",
    15: "Q8_K",
    16: "IQ2_XXS",
    17: "IQ2_XS",
    18: "IQ3_XXS",
    19: "IQ1_S",
    20: "IQ4_NL",
    21: "IQ3_S",
    22: "IQ2_S",
    23: "IQ4_XS",
    24: "I8",
    25: "I16",
    26: "I32",
    27: "I64",
    28: "F64",
    29: "IQ1_M",
    34: "TQ1_0",
    35: "TQ2_0",
    39: "MXFP4",
}

_STRING: Final = 8
_ARRAY: Final = 9
_BOOL: Final = 7
_SCALARS: Final[Mapping[int, str]] = {
    0: "B",
    1: "b",
    2: "H",
    3: "h",
    4: "I",
    5: "i",
    6: "f",
    _BOOL: "?",
    10: "Q",
    11: "q",
    12: "d",
}


@dataclass(frozen=True, slots=True, kw_only=True)
class TensorInfo:
    """One tensor: ``shape`` is row-major (rows first), ``offset`` counts from the file's start."""

    name: str
    type_name: str
    shape: tuple[int, ...]
    offset: int
    nbytes: int


@dataclass(frozen=True, slots=True, kw_only=True)
class GGUFFile:
    path: Path
    metadata: Mapping[str, Any]
    tensors: Mapping[str, TensorInfo]


class _Malformed(Exception):
    """The bytes do not follow the format; the message goes behind the file's name."""


class _Cursor:
    """Reads little-endian values and refuses to leave the file."""

    def __init__(self, data: mmap.mmap | bytes) -> None:
        self._data = data
        self._size = len(data)
        self.position = 0

    def take(self, size: int) -> int:
        """Move over ``size`` bytes; the position before them."""
        start = self.position
        if size > self._size - start:
            raise _Malformed("is truncated: the header ends in the middle")
        self.position = start + size
        return start

    def number(self, code: str) -> Any:
        form = "<" + code
        return struct.unpack_from(form, self._data, self.take(struct.calcsize(form)))[0]

    def numbers(self, code: str, count: int) -> list[Any]:
        form = f"<{count}{code}"
        start = self.take(count * struct.calcsize("<" + code))
        return list(struct.unpack_from(form, self._data, start))

    def string(self) -> str:
        size = self.number("Q")
        start = self.take(size)
        return self._data[start : start + size].decode("utf-8", "replace")

    def count(self, what: str) -> int:
        value: int = self.number("Q")
        if value > MAX_ENTRIES:
            raise _Malformed(f"is not a valid GGUF file: {value} {what}")
        return value


def read_gguf(path: Path) -> GGUFFile:
    """Metadata and tensor directory.  Raises ModelLoadError.

    A returned directory names only tensors of known types whose bytes all lie inside the file.
    """
    try:
        with path.open("rb") as file:
            if file.read(4) != MAGIC:
                raise ModelLoadError(f"{path} is not a GGUF file")
            with mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as data:
                return _parse(path, _Cursor(data), len(data))
    except _Malformed as error:
        raise ModelLoadError(f"{path} {error}") from error
    except OSError as error:
        raise ModelLoadError(f"cannot read {path}: {error.strerror}") from error


def _parse(path: Path, cursor: _Cursor, size: int) -> GGUFFile:
    cursor.take(4)
    version = cursor.number("I")
    if version not in VERSIONS:
        swapped = int.from_bytes(version.to_bytes(4, "little"), "big")
        what = "is big-endian" if swapped in VERSIONS else f"has GGUF version {version}"
        raise _Malformed(f"{what}, which is not supported")
    tensor_count = cursor.count("tensors")
    metadata = _metadata(cursor, cursor.count("metadata entries"))
    infos = [_tensor(cursor) for _ in range(tensor_count)]
    alignment = metadata.get("general.alignment", 32)
    if not isinstance(alignment, int) or alignment < 1 or alignment & (alignment - 1):
        raise _Malformed("is not a valid GGUF file: the alignment is not a power of two")
    start = -(-cursor.position // alignment) * alignment
    tensors: dict[str, TensorInfo] = {}
    for name, code, shape, offset in infos:
        info = _located(name, code, shape, start + offset)
        if info.offset + info.nbytes > size:
            raise _Malformed(
                f"is truncated: tensor {name} ends at byte {info.offset + info.nbytes}, "
                f"the file at byte {size}"
            )
        if name in tensors:
            raise _Malformed(f"is not a valid GGUF file: tensor {name} occurs twice")
        tensors[name] = info
    return GGUFFile(path=path, metadata=metadata, tensors=tensors)


def _metadata(cursor: _Cursor, count: int) -> dict[str, Any]:
    metadata: dict[str, Any] = {}
    for _ in range(count):
        key = cursor.string()
        metadata[key] = _value(cursor, cursor.number("I"), MAX_NESTING)
    return metadata


def _value(cursor: _Cursor, code: int, depth: int) -> Any:
    if code in _SCALARS:
        return cursor.number(_SCALARS[code])
    if code == _STRING:
        return cursor.string()
    if code != _ARRAY or depth == 0:
        raise _Malformed(f"is not a valid GGUF file: metadata of type {code}")
    inner = cursor.number("I")
    count: int = cursor.number("Q")
    if inner in _SCALARS:
        return cursor.numbers(_SCALARS[inner], count)
    read: Callable[[], Any] = cursor.string
    if inner != _STRING:
        read = lambda: _value(cursor, inner, depth - 1)  # noqa: E731
    # Each element takes bytes of the file, so a false count ends at the file's end.
    return [read() for _ in range(count)]


def _tensor(cursor: _Cursor) -> tuple[str, int, tuple[int, ...], int]:
    name = cursor.string()
    dims = cursor.number("I")
    if not 1 <= dims <= MAX_DIMS:
        raise _Malformed(f"is not a valid GGUF file: tensor {name} has {dims} dimensions")
    shape = tuple(reversed(cursor.numbers("Q", dims)))
    return name, cursor.number("I"), shape, cursor.number("Q")


def _located(name: str, code: int, shape: tuple[int, ...], offset: int) -> TensorInfo:
    if code not in TENSOR_TYPES:
        known = OTHER_TYPES.get(code, f"number {code}")
        raise _Malformed(
            f"has tensors of type {known} ({name}), which is not supported; supported are "
            + ", ".join(type_name for type_name, _, _ in TENSOR_TYPES.values())
        )
    type_name, block, block_bytes = TENSOR_TYPES[code]
    if min(shape) < 1 or shape[-1] % block:
        raise _Malformed(
            f"is not a valid GGUF file: tensor {name} of shape {list(shape)} cannot be {type_name}"
        )
    nbytes = math.prod(shape) // block * block_bytes
    return TensorInfo(name=name, type_name=type_name, shape=shape, offset=offset, nbytes=nbytes)
