"""Choosing and loading the BLAS.  Each real load happens in a process of its own."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from models.mlx import blas
from models.mlx.blas import HINT, fastest, prepare_blas, thread_candidates
from models.mlx.fortran import load_fortran_runtime, renamed

PROBE = """
import json, os
from models.mlx.blas import prepare_blas
report = prepare_blas({threads})
import mlx.core as mx, numpy as np
rng = np.random.default_rng(0)
a, b = rng.normal(size=(8, 576)).astype("f4"), rng.normal(size=(576, 96)).astype("f4")
error = float(np.abs(np.array(mx.array(a) @ mx.array(b)) - a @ b).max())
print(json.dumps([report.library, report.found, report.threads, error,
                  os.environ.get("MLX_DISABLE_COMPILE")]))
"""

linux = sys.platform == "linux"


def test_elsewhere_nothing_is_touched() -> None:
    report = prepare_blas(3, platform="darwin", modules={})
    assert report.found
    assert report.threads is None


def test_too_late_is_reported(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(blas, "_has_cuda", lambda: False)
    report = prepare_blas(1, platform="linux", modules={"mlx.core": object()})
    assert not report.found
    assert "imported before" in report.note


def test_without_a_library_the_note_says_how_to_get_one(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(blas, "_has_cuda", lambda: False)
    monkeypatch.setattr(blas, "SYSTEM", "libno-such-blas.so.0")
    report = prepare_blas(1, platform="linux", modules={}, search=[])
    assert (report.found, report.threads, report.note) == (False, None, HINT)
    assert "pip install cmeel-openblas" in report.note


def test_a_damaged_library_counts_as_none(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(blas, "_has_cuda", lambda: False)
    monkeypatch.setattr(blas, "SYSTEM", "libno-such-blas.so.0")
    path = tmp_path / blas.PACKAGED
    path.parent.mkdir(parents=True)
    path.write_bytes(b"not a library")
    assert not prepare_blas(1, platform="linux", modules={}, search=[str(tmp_path)]).found


@pytest.mark.parametrize(
    ("cores", "expected"),
    [(1, [1]), (2, [1]), (3, [1, 2]), (4, [1, 2, 3]), (8, [1, 2, 4, 7]), (9, [1, 2, 4, 8])],
)
def test_thread_candidates_leave_a_core(cores: int, expected: list[int]) -> None:
    assert thread_candidates(cores) == expected


def test_more_threads_must_be_clearly_better() -> None:
    assert fastest({1: 1.0, 2: 0.95, 4: 0.5, 7: 0.49}) == 4
    assert fastest({1: 1.0, 2: 3.0}) == 1
    assert fastest({1: 2.0}) == 1


def test_the_fortran_runtime_gets_its_usual_name_in_place() -> None:
    own = b"libgfortran-f7379c93.so.5.0.0"
    image = b"head\x00" + own + b"\x00tail"
    result = renamed(image, own)
    assert result is not None
    assert len(result) == len(image)
    assert result.startswith(b"head\x00libgfortran.so.5\x00")
    assert result.endswith(b"\x00tail")
    assert renamed(image + own + b"\x00", own) is None
    assert renamed(b"nothing", own) is None


def test_a_wheel_without_a_loadable_runtime(tmp_path: Path) -> None:
    assert not load_fortran_runtime([str(tmp_path)])
    carrier = tmp_path / "numpy.libs"
    carrier.mkdir()
    (carrier / "libgfortran-0123456789ab.so.5.0.0").write_bytes(
        b"libgfortran-0123456789ab.so.5.0.0\x00"
    )
    assert not load_fortran_runtime([str(tmp_path)])


@pytest.mark.mlx
def test_mlx_multiplies_correctly_with_the_library_that_was_found() -> None:
    out = subprocess.run(
        [sys.executable, "-c", PROBE.format(threads=1)],
        capture_output=True,
        text=True,
        check=True,
        timeout=120,
    )
    library, found, threads, error, disabled = json.loads(out.stdout)
    assert error < 1e-3
    if linux:
        assert disabled == "1"
        assert not found or (threads == 1 and library.startswith("OpenBLAS"))
