"""The Fortran runtime that the packaged OpenBLAS needs, where the system has none.

``libopenblas.so`` asks for ``libgfortran.so.5``, which a machine without a compiler lacks.  The MLX
and numpy wheels carry that very library under a name of their own.  The dynamic linker goes by the
name written inside a loaded library, so a copy in memory with its usual name restored satisfies
OpenBLAS.  Nothing is written to disk.
"""

from __future__ import annotations

import ctypes
import os
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Final

WANTED: Final = b"libgfortran.so.5"
CARRIERS: Final = ("mlx_cpu.libs", "numpy.libs", "scipy.libs")


def load_fortran_runtime(folders: Sequence[str]) -> bool:
    """Load a Fortran runtime under its usual name; False if no wheel carries one that loads."""
    return any(_load_renamed(path) for path in _candidates(folders))


def _candidates(folders: Sequence[str]) -> Iterator[Path]:
    for folder in folders:
        for carrier in CARRIERS:
            yield from sorted((Path(folder or ".") / carrier).glob("libgfortran-*.so.5*"))


def _load_renamed(path: Path) -> bool:
    image = renamed(path.read_bytes(), path.name.encode())
    if image is None:
        return False
    try:
        # Its neighbour is found by name once it is loaded.
        for neighbour in sorted(path.parent.glob("libquadmath-*.so*")):
            ctypes.CDLL(str(neighbour))
        with os.fdopen(os.memfd_create("libgfortran", os.MFD_CLOEXEC), "wb") as file:
            file.write(image)
            file.flush()
            ctypes.CDLL(f"/proc/self/fd/{file.fileno()}")
    except OSError:
        return False
    return True


def renamed(image: bytes, own_name: bytes) -> bytes | None:
    """The library with ``own_name`` (its name for the linker) replaced by the usual one.

    Only the string changes, in place; None if it does not occur exactly once or is too short.
    """
    old = own_name + b"\x00"
    if image.count(old) != 1 or len(own_name) < len(WANTED):
        return None
    return image.replace(old, WANTED.ljust(len(old), b"\x00"))
