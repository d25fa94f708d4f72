"""Block formats against formulas written value by value, and MLX's packed layout."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from numpy.typing import NDArray

from models.gguf_blocks import is_affine, pack, read_bytes, to_affine, to_float32
from models.gguf_file import TENSOR_TYPES, TensorInfo, read_gguf
from tests.unit.gguf_writer import Raw, encode, write_gguf

QUANTISED = [name for name, block, _ in TENSOR_TYPES.values() if block > 1]
SIZES = {name: (block, size) for name, block, size in TENSOR_TYPES.values()}
# Where the float16 numbers of a block lie; all other bytes are arbitrary.
HALVES = {"Q4_1": (0, 2), "Q5_1": (0, 2), "Q4_K": (0, 2), "Q5_K": (0, 2), "Q6_K": (208,)}


def half(block: bytes, start: int) -> float:
    return float(np.frombuffer(block[start : start + 2], "<f2")[0])


def k_scale(scales: bytes, index: int) -> tuple[int, int]:
    if index < 4:
        return scales[index] & 63, scales[index + 4] & 63
    low, high = scales[index - 4] >> 6, scales[index] >> 6
    return (scales[index + 4] & 15) | (low << 4), (scales[index + 4] >> 4) | (high << 4)


def value(block: bytes, type_name: str, i: int) -> float:
    """The i-th number of a block."""
    match type_name:
        case "Q8_0":
            return half(block, 0) * int(np.int8(np.uint8(block[2 + i])))
        case "Q4_0" | "Q4_1" | "Q5_0" | "Q5_1":
            header = {"Q4_0": 2, "Q4_1": 4, "Q5_0": 6, "Q5_1": 8}[type_name]
            q = (block[header + i % 16] >> (4 if i >= 16 else 0)) & 15
            if type_name[1] == "5":
                fifth = int.from_bytes(block[header - 4 : header], "little") >> i & 1
                q |= fifth << 4
            if type_name.endswith("_1"):
                return half(block, 0) * q + half(block, 2)
            return half(block, 0) * (q - (8 if type_name == "Q4_0" else 16))
        case "Q4_K" | "Q5_K":
            group, j = divmod(i, 32)
            scale, minimum = k_scale(block[4:16], group)
            start = 16 if type_name == "Q4_K" else 48
            q = (block[start + group // 2 * 32 + j] >> (4 * (group % 2))) & 15
            if type_name == "Q5_K":
                q |= (block[16 + j] >> group & 1) << 4
            return half(block, 0) * scale * q - half(block, 2) * minimum
        case "Q6_K":
            part, rest = divmod(i, 128)
            quarter, j = divmod(rest, 32)
            low = block[part * 64 + (quarter % 2) * 32 + j] >> (4 * (quarter // 2)) & 15
            high = block[128 + part * 32 + j] >> (2 * quarter) & 3
            scale = int(np.int8(np.uint8(block[192 + i // 16])))
            return half(block, 208) * scale * ((low | high << 4) - 32)
    raise AssertionError(type_name)


def random_blocks(type_name: str, count: int) -> NDArray[np.uint8]:
    rng = np.random.default_rng(len(type_name) + SIZES[type_name][1])
    blocks = rng.integers(0, 256, size=(count, SIZES[type_name][1]), dtype=np.uint8)
    for start in HALVES.get(type_name, (0,)):
        halves = rng.uniform(-0.1, 0.1, size=count).astype("<f2")
        blocks[:, start : start + 2] = halves.view(np.uint8).reshape(-1, 2)
    return blocks


@pytest.mark.parametrize("type_name", QUANTISED)
def test_each_block_format_value_by_value(type_name: str) -> None:
    block = SIZES[type_name][0]
    blocks = random_blocks(type_name, 6)
    info = TensorInfo(
        name="x", type_name=type_name, shape=(3, 2 * block), offset=0, nbytes=blocks.size
    )
    values = to_float32(blocks.reshape(-1), info)
    expected = [value(b.tobytes(), type_name, i) for b in blocks for i in range(block)]
    assert values.shape == (3, 2 * block)
    np.testing.assert_allclose(values.ravel(), expected, rtol=2e-6, atol=1e-6)


@pytest.mark.parametrize("type_name", QUANTISED)
def test_pieces_and_scratch_change_nothing(type_name: str) -> None:
    block = SIZES[type_name][0]
    blocks = random_blocks(type_name, (1 << 17) // block + 3)
    info = TensorInfo(
        name="x", type_name=type_name, shape=(len(blocks), block), offset=0, nbytes=blocks.size
    )
    scratch = np.full(info.shape[0] * block + 5, np.nan, dtype=np.float32)
    values = to_float32(blocks.reshape(-1), info, scratch)
    affine = to_affine(blocks.reshape(-1), type_name)
    whole = affine.q * affine.scale[:, None] + affine.bias[:, None]
    np.testing.assert_array_equal(values.ravel(), whole.ravel())
    assert np.shares_memory(values, scratch)


@pytest.mark.mlx
@pytest.mark.parametrize("type_name", [name for name in QUANTISED if name != "Q6_K"])
def test_packed_weights_are_what_mlx_dequantises(type_name: str) -> None:
    import mlx.core as mx

    assert is_affine(type_name)
    affine = to_affine(random_blocks(type_name, 4).reshape(-1), type_name)
    weights = mx.dequantize(
        mx.array(pack(affine).reshape(2, -1)),
        mx.array(affine.scale.reshape(2, -1)),
        mx.array(affine.bias.reshape(2, -1)),
        group_size=affine.group_size,
        bits=affine.bits,
    )
    expected = affine.q * affine.scale[:, None] + affine.bias[:, None]
    np.testing.assert_allclose(np.array(weights).ravel(), expected.ravel(), rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize(
    ("type_name", "tolerance"),
    [("F32", 0.0), ("F16", 1e-3), ("BF16", 8e-3), ("Q8_0", 8e-3), ("Q4_1", 0.08), ("Q4_0", 0.15)],
)
def test_written_tensors_come_back(tmp_path: Path, type_name: str, tolerance: float) -> None:
    values = np.random.default_rng(1).uniform(-1, 1, size=(4, 64)).astype(np.float32)
    file = read_gguf(write_gguf(tmp_path / "a.gguf", {}, {"x": encode(values, type_name)}))
    info = file.tensors["x"]
    back = to_float32(read_bytes(file.path, info), info)
    assert np.abs(back - values).max() <= tolerance


def test_bfloat16_keeps_its_range(tmp_path: Path) -> None:
    raw = Raw(30, (1,), (0x7F00).to_bytes(2, "little"))
    file = read_gguf(write_gguf(tmp_path / "a.gguf", {}, {"x": raw}))
    info = file.tensors["x"]
    assert to_float32(read_bytes(file.path, info), info)[0] == np.float32(2.0**127)
