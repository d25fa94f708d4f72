"""The GGUF container: what is not a complete, known file is one clear line."""

from __future__ import annotations

import struct
from pathlib import Path

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from models.errors import ModelLoadError
from models.gguf_file import read_gguf
from tests.unit.gguf_writer import Raw, encode, write_gguf

VALUES = np.arange(64, dtype=np.float32).reshape(2, 32)
META = {"general.architecture": "llama", "list": ["a", "b"], "n": [1, 2], "f": 0.5, "yes": True}


def small(path: Path) -> Path:
    return write_gguf(path, META, {"x": encode(VALUES, "F32"), "y": encode(VALUES, "Q8_0")})


def test_metadata_and_tensors_are_read(tmp_path: Path) -> None:
    file = read_gguf(small(tmp_path / "a.gguf"))
    assert dict(file.metadata) == META
    info = file.tensors["x"]
    assert (info.type_name, info.shape, info.nbytes) == ("F32", (2, 32), 256)
    data = file.path.read_bytes()[info.offset : info.offset + info.nbytes]
    assert data == VALUES.tobytes()


def test_every_truncation_is_an_error(tmp_path: Path) -> None:
    whole = small(tmp_path / "a.gguf").read_bytes()
    end = max(info.offset + info.nbytes for info in read_gguf(tmp_path / "a.gguf").tensors.values())
    for size in range(end):
        path = tmp_path / "cut.gguf"
        path.write_bytes(whole[:size])
        with pytest.raises(ModelLoadError, match=r"truncated|not a GGUF file"):
            read_gguf(path)


@settings(suppress_health_check=[HealthCheck.function_scoped_fixture], max_examples=300)
@given(data=st.data())
def test_a_damaged_header_never_gives_anything_but_a_load_error(
    tmp_path: Path, data: st.DataObject
) -> None:
    raw = bytearray(small(tmp_path / "a.gguf").read_bytes()[:400])
    for _ in range(data.draw(st.integers(1, 4))):
        raw[data.draw(st.integers(4, len(raw) - 1))] = data.draw(st.integers(0, 255))
    path = tmp_path / "damaged.gguf"
    path.write_bytes(raw)
    try:
        file = read_gguf(path)
    except ModelLoadError:
        return
    assert all(info.offset + info.nbytes <= len(raw) for info in file.tensors.values())


def expect(path: Path, message: str) -> None:
    with pytest.raises(ModelLoadError, match=message) as caught:
        read_gguf(path)
    assert str(path) in str(caught.value)


def test_foreign_files(tmp_path: Path) -> None:
    path = tmp_path / "a.gguf"
    path.write_bytes(b"PK\x03\x04 something else")
    expect(path, "is not a GGUF file")
    path.write_bytes(b"")
    expect(path, "is not a GGUF file")
    expect(tmp_path / "none.gguf", "No such file")


def test_unsupported_versions(tmp_path: Path) -> None:
    expect(write_gguf(tmp_path / "a.gguf", {}, {}, version=1), "GGUF version 1")
    expect(write_gguf(tmp_path / "b.gguf", {}, {}, version=3 << 24), "big-endian")


def test_unsupported_tensor_types_are_named(tmp_path: Path) -> None:
    raw = Raw(16, (1, 256), bytes(66))
    expect(write_gguf(tmp_path / "a.gguf", {}, {"x": raw}), r"type IQ2_XXS \(x\)")
    expect(write_gguf(tmp_path / "b.gguf", {}, {"x": Raw(999, (1,), b"1")}), "type number 999")


def test_shapes_that_do_not_fit_the_type(tmp_path: Path) -> None:
    expect(write_gguf(tmp_path / "a.gguf", {}, {"x": Raw(8, (2, 31), bytes(99))}), "cannot be Q8_0")
    expect(write_gguf(tmp_path / "b.gguf", {}, {"x": Raw(0, (0, 4), b"")}), "cannot be F32")


def test_false_counts_end_without_a_huge_allocation(tmp_path: Path) -> None:
    path = tmp_path / "a.gguf"
    path.write_bytes(b"GGUF" + struct.pack("<IQQ", 3, 2**60, 0))
    expect(path, "tensors")
    array = struct.pack("<Q", 1) + b"k" + struct.pack("<IIQ", 9, 8, 2**60)
    path.write_bytes(b"GGUF" + struct.pack("<IQQ", 3, 0, 1) + array)
    expect(path, "truncated")
    array = struct.pack("<Q", 1) + b"k" + struct.pack("<IIQ", 9, 10, 2**60)
    path.write_bytes(b"GGUF" + struct.pack("<IQQ", 3, 0, 1) + array)
    expect(path, "truncated")
