"""A fast BLAS for MLX's CPU backend on Linux.

The MLX wheel links a reference BLAS; MLX uses another one if its symbols are already global when
``mlx.core`` is imported.  So :func:`prepare_blas` must run before that, and imports nothing of MLX
itself.
"""

from __future__ import annotations

import ctypes
import os
import sys
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from importlib import metadata
from pathlib import Path
from typing import Final

from models.mlx.fortran import load_fortran_runtime

PACKAGED: Final = "cmeel.prefix/lib/libopenblas.so"
SYSTEM: Final = "libopenblas.so.0"
HINT: Final = "matrix products will be slow; for a fast BLAS run `pip install cmeel-openblas`"
THREAD_VARIABLES: Final = ("OPENBLAS_NUM_THREADS", "OMP_NUM_THREADS")

# The measurement: one decode step's product of a small model, 8 rows.
ROWS, INNER, COLUMNS = 8, 576, 1536
MEASURE_S: Final = 0.1  # for all candidates together
WORTHWHILE: Final = 0.9  # more threads must bring the time below this share

_ROW_MAJOR, _NO_TRANSPOSE, _TRANSPOSE = 101, 111, 112


@dataclass(frozen=True, slots=True, kw_only=True)
class BlasReport:
    """What was done.  ``threads`` None: the library was not touched."""

    library: str
    found: bool
    threads: int | None = None
    note: str = ""


def prepare_blas(
    threads: int | None = None,
    *,
    platform: str = sys.platform,
    modules: Mapping[str, object] = sys.modules,
    search: Iterable[str] | None = None,
) -> BlasReport:
    """Load a fast BLAS and set its number of threads, on Linux with MLX's CPU backend.

    ``threads`` None takes ``OPENBLAS_NUM_THREADS`` if it is set, else measures and leaves one core
    to the rest of the server.  Never raises: without a library MLX works as well, only slower.
    """
    if platform != "linux" or _has_cuda():
        return BlasReport(library="MLX", found=True, note="this platform needs no other BLAS")
    os.environ["MLX_DISABLE_COMPILE"] = "1"  # compilation on the CPU backend runs a C++ compiler
    if "mlx.core" in modules:
        return BlasReport(
            library="bundled", found=False, note="MLX was imported before a BLAS could be loaded"
        )
    folders = list(sys.path if search is None else search)
    found = _load(folders)
    if found is None:
        return BlasReport(library="bundled", found=False, note=HINT)
    name, library = found
    count, note = _thread_count(library, threads)
    library.openblas_set_num_threads(count)
    return BlasReport(library=name, found=True, threads=count, note=note)


def set_blas_threads(library_threads: int) -> None:
    """Change the number of threads of the BLAS that is loaded, if there is one."""
    setter = getattr(ctypes.CDLL(None), "openblas_set_num_threads", None)
    if setter is not None:
        setter(library_threads)


def _has_cuda() -> bool:
    for name in ("mlx-cuda-12", "mlx-cuda-13", "mlx-cuda"):
        try:
            metadata.version(name)
        except metadata.PackageNotFoundError:
            continue
        return True
    return False


def _load(folders: Sequence[str]) -> tuple[str, ctypes.CDLL] | None:
    packaged = (Path(folder or ".") / PACKAGED for folder in folders)
    for path in [*(str(path) for path in packaged if path.is_file()), SYSTEM]:
        library = _open(path)
        if library is None and path != SYSTEM and load_fortran_runtime(folders):
            library = _open(path)
        if library is not None:
            return _describe(path, library), library
    return None


def _open(path: str) -> ctypes.CDLL | None:
    try:
        library = ctypes.CDLL(path, mode=ctypes.RTLD_GLOBAL)
    except OSError:
        return None
    usable = all(hasattr(library, name) for name in ("cblas_sgemm", "openblas_set_num_threads"))
    return library if usable else None


def _describe(path: str, library: ctypes.CDLL) -> str:
    config = getattr(library, "openblas_get_config", None)
    if config is None:
        return Path(path).name
    config.restype = ctypes.c_char_p
    words = (config() or b"").decode("ascii", "replace").split()
    return " ".join(words[:2]) or Path(path).name


def _thread_count(library: ctypes.CDLL, threads: int | None) -> tuple[int, str]:
    if threads is not None:
        return max(1, threads), "threads as asked for"
    for variable in THREAD_VARIABLES:
        value = os.environ.get(variable, "")
        if value.isdigit() and int(value) > 0:
            return int(value), f"threads from {variable}"
    candidates = thread_candidates(usable_cores())
    if len(candidates) == 1:
        return candidates[0], "one core is left to the rest of the server"
    seconds = {count: _measure(library, count, len(candidates)) for count in candidates}
    return fastest(seconds), f"threads measured over {candidates}"


def usable_cores() -> int:
    """Cores that this process may use, whole ones, at least 1."""
    cores = float(len(os.sched_getaffinity(0)))
    try:
        quota, period = Path("/sys/fs/cgroup/cpu.max").read_text().split()
        if quota != "max":
            cores = min(cores, int(quota) / int(period))
    except (OSError, ValueError):
        pass  # no control group: no quota
    return max(1, int(cores))


def thread_candidates(cores: int) -> list[int]:
    """Powers of two below the number of cores, and one less than it."""
    most = max(1, cores - 1)
    return sorted({most, *(1 << bit for bit in range(most.bit_length()))})


def fastest(seconds: Mapping[int, float]) -> int:
    """The count with the best time, where more threads have to be clearly better."""
    counts = sorted(seconds)
    best = counts[0]
    for count in counts[1:]:
        if seconds[count] < seconds[best] * WORTHWHILE:
            best = count
    return best


def _measure(
    library: ctypes.CDLL,
    threads: int,
    candidates: int,
    clock: Callable[[], float] = time.perf_counter,
) -> float:
    """Best seconds of one product with so many threads."""
    left = (ctypes.c_float * (ROWS * INNER))()
    right = (ctypes.c_float * (COLUMNS * INNER))()
    out = (ctypes.c_float * (ROWS * COLUMNS))()
    library.openblas_set_num_threads(threads)
    one, zero = ctypes.c_float(1.0), ctypes.c_float(0.0)
    best = float("inf")
    begin = clock()
    while True:
        start = clock()
        library.cblas_sgemm(
            *(_ROW_MAJOR, _NO_TRANSPOSE, _TRANSPOSE, ROWS, COLUMNS, INNER),
            *(one, left, INNER, right, INNER, zero, out, COLUMNS),
        )
        end = clock()
        best = min(best, end - start)
        if end - begin > MEASURE_S / candidates:
            return best
