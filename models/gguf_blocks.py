"""GGUF tensor data to numbers: the block formats as integers with a scale and an offset per group.

All formats but Q6_K are affine over groups of 32: ``value = scale * q + bias``.  That is MLX's own
quantisation, so such a tensor can also be kept small (:func:`pack`) without loss.  numpy only.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

from models.errors import ModelLoadError
from models.gguf_file import TENSOR_TYPES, TensorInfo

Bytes = NDArray[np.uint8]
Floats = NDArray[np.float32]

_SIZES: Final = {name: (block, size) for name, block, size in TENSOR_TYPES.values()}
_PIECE: Final = 1 << 16  # values; a multiple of every block size


@dataclass(frozen=True, slots=True, kw_only=True)
class Affine:
    """``q`` uint8 [groups, group]; ``scale`` and ``bias`` float32 [groups]; ``bits`` of each q."""

    q: Bytes
    scale: Floats
    bias: Floats
    bits: int

    @property
    def group_size(self) -> int:
        return int(self.q.shape[1])


def read_bytes(path: Path, info: TensorInfo) -> Bytes:
    """The tensor's bytes.  Raises ModelLoadError when the file ends early."""
    try:
        data = np.fromfile(path, dtype=np.uint8, count=info.nbytes, offset=info.offset)
    except OSError as error:
        raise ModelLoadError(f"cannot read {path}: {error.strerror}") from error
    if data.size != info.nbytes:
        raise ModelLoadError(f"{path} is truncated: tensor {info.name} ends early")
    return data


def is_affine(type_name: str) -> bool:
    return type_name in _READERS


def to_affine(data: Bytes, type_name: str) -> Affine:
    """Split the blocks of one quantised tensor.  Only for types where :func:`is_affine`."""
    return _READERS[type_name](data.reshape(-1, _SIZES[type_name][1]))


def to_float32(data: Bytes, info: TensorInfo, scratch: Floats | None = None) -> Floats:
    """The tensor's values, float32 of ``info.shape``.

    They may lie in ``scratch``, if it is given and large enough: memory that is used again costs
    no page faults, which take longer than the arithmetic.
    """
    match info.type_name:
        case "F32":
            values = data.view("<f4")
        case "F16":
            values = data.view("<f2").astype(np.float32)
        case "BF16":
            values = (data.view("<u2").astype(np.uint32) << np.uint32(16)).view("<f4")
        case _:
            values = _dequantize(data, info, scratch)
    return values.reshape(info.shape)


def _dequantize(data: Bytes, info: TensorInfo, scratch: Floats | None) -> Floats:
    """In pieces that stay in the processor's cache: several times faster than all at once."""
    block, block_bytes = _SIZES[info.type_name]
    size = math.prod(info.shape)
    if scratch is None or scratch.size < size:
        scratch = np.empty(size, dtype=np.float32)
    values = scratch[:size]
    for start in range(0, values.size, _PIECE):
        piece = values[start : start + _PIECE]
        first = start // block * block_bytes
        affine = to_affine(data[first : first + piece.size // block * block_bytes], info.type_name)
        out = piece.reshape(affine.q.shape)
        np.multiply(affine.q, affine.scale[:, None], out=out)
        out += affine.bias[:, None]
    return values


def pack(affine: Affine) -> NDArray[np.uint32]:
    """MLX's layout of quantised weights: a little-endian stream of ``bits`` per value."""
    q, bits = affine.q, affine.bits
    if bits == 8:
        packed = np.ascontiguousarray(q)
    elif bits == 4:
        packed = _bytes(q[:, 0::2] | (q[:, 1::2] << 4))
    else:
        # Eight values fill ``bits`` whole bytes.
        eights = q.reshape(len(q), -1, 8).astype(np.uint64)
        words = np.zeros(eights.shape[:2], dtype="<u8")
        for index in range(8):
            words |= eights[:, :, index] << np.uint64(bits * index)
        packed = words.view(np.uint8).reshape(*words.shape, 8)[:, :, :bits].reshape(len(q), -1)
    return np.ascontiguousarray(packed).view("<u4")


def _bytes(values: NDArray[Any]) -> Bytes:
    """Values that fit into a byte, as bytes (numpy's types do not know that they stayed so)."""
    return values.astype(np.uint8, copy=False)


def _half(blocks: Bytes, start: int) -> Floats:
    """The float16 at byte ``start`` of each block."""
    return np.ascontiguousarray(blocks[:, start : start + 2]).view("<f2")[:, 0].astype(np.float32)


def _nibbles(packed: Bytes) -> Bytes:
    """[.., n] bytes to [.., 2n]: first all low halves, then all high halves."""
    return np.concatenate([packed & 0x0F, packed >> 4], axis=-1)


def _fifth_bits(high: Bytes) -> Bytes:
    """Four bytes per block to the fifth bit (16 or 0) of 32 values."""
    return _bytes(np.unpackbits(high, axis=-1, bitorder="little") << 4)


def _q4_0(blocks: Bytes) -> Affine:
    scale = _half(blocks, 0)
    return Affine(q=_nibbles(blocks[:, 2:]), scale=scale, bias=scale * -8, bits=4)


def _q4_1(blocks: Bytes) -> Affine:
    return Affine(q=_nibbles(blocks[:, 4:]), scale=_half(blocks, 0), bias=_half(blocks, 2), bits=4)


def _q5_0(blocks: Bytes) -> Affine:
    scale = _half(blocks, 0)
    q = _nibbles(blocks[:, 6:]) | _fifth_bits(blocks[:, 2:6])
    return Affine(q=q, scale=scale, bias=scale * -16, bits=5)


def _q5_1(blocks: Bytes) -> Affine:
    q = _nibbles(blocks[:, 8:]) | _fifth_bits(blocks[:, 4:8])
    return Affine(q=q, scale=_half(blocks, 0), bias=_half(blocks, 2), bits=5)


def _q8_0(blocks: Bytes) -> Affine:
    scale = _half(blocks, 0)
    # Signed to unsigned by moving the zero point.
    return Affine(q=_bytes(blocks[:, 2:] ^ 0x80), scale=scale, bias=scale * -128, bits=8)


def _k_scales(packed: Bytes) -> tuple[Floats, Floats]:
    """Twelve bytes per block to eight 6-bit scales and eight 6-bit minima: [blocks, 8] each."""
    low, middle, high = packed[:, 0:4], packed[:, 4:8], packed[:, 8:12]
    scale = np.concatenate([low & 63, (high & 0x0F) | ((low >> 6) << 4)], axis=1)
    minimum = np.concatenate([middle & 63, (high >> 4) | ((middle >> 6) << 4)], axis=1)
    return scale.astype(np.float32), minimum.astype(np.float32)


def _k_affine(blocks: Bytes, q: Bytes, bits: int) -> Affine:
    scales, minima = _k_scales(blocks[:, 4:16])
    return Affine(
        q=q.reshape(-1, 32),
        scale=(_half(blocks, 0)[:, None] * scales).reshape(-1),
        bias=(-_half(blocks, 2)[:, None] * minima).reshape(-1),
        bits=bits,
    )


def _q4_k(blocks: Bytes) -> Affine:
    return _k_affine(blocks, _nibbles(blocks[:, 16:].reshape(-1, 4, 32)), 4)


def _q5_k(blocks: Bytes) -> Affine:
    q = _nibbles(blocks[:, 48:].reshape(-1, 4, 32)).reshape(-1, 8, 32)
    # Bit k of byte j is the fifth bit of value j in group k.
    groups = np.arange(8, dtype=np.uint8)[:, None]
    fifth = (blocks[:, None, 16:48] >> groups) & 1
    return _k_affine(blocks, _bytes(q | (fifth << 4)), 5)


def _q6_k(blocks: Bytes) -> Affine:
    low = _nibbles(blocks[:, :128].reshape(-1, 2, 64))  # [blocks, 2, 128]
    shifts = np.array([0, 2, 4, 6], dtype=np.uint8)[:, None]
    high = (blocks[:, 128:192].reshape(-1, 2, 1, 32) >> shifts) & 3
    q = low | (high.reshape(-1, 2, 128) << 4)
    scales = np.ascontiguousarray(blocks[:, 192:208]).view(np.int8).astype(np.float32)
    scale = (_half(blocks, 208)[:, None] * scales).reshape(-1)
    return Affine(q=_bytes(q).reshape(-1, 16), scale=scale, bias=scale * -32, bits=6)


_READERS: Final[Mapping[str, Callable[[Any], Affine]]] = {
    "Q4_0": _q4_0,
    "Q4_1": _q4_1,
    "Q5_0": _q5_0,
    "Q5_1": _q5_1,
    "Q8_0": _q8_0,
    "Q4_K": _q4_k,
    "Q5_K": _q5_k,
    "Q6_K": _q6_k,
}
