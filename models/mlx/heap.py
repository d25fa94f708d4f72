"""Keep freed memory in the process, for MLX's CPU backend on Linux with the GNU C library.

MLX takes the memory of every array from ``malloc`` and gives it back after use.  By default the GNU
C library maps large pieces one by one and unmaps them when they are freed, so each activation and
each opened prefix pays for fresh, zeroed pages: 11 000 page faults for a prefix of 1000 tokens of
the default model.  With higher limits the heap keeps such pieces for the next one.
"""

from __future__ import annotations

import ctypes
import sys
from typing import Any, Final

# Numbers of the parameters in <malloc.h>.
_TRIM_THRESHOLD: Final = -1
_MMAP_THRESHOLD: Final = -3
# Larger than any activation of the models that a CPU serves well; weights may be above it.
KEPT_BYTES: Final = 256 << 20


def keep_freed_memory(kept: int = KEPT_BYTES, *, library: Any = None) -> bool:
    """Let the heap keep up to ``kept`` free bytes at its end, and take pieces up to this size from
    it.  False where the C library has no such limits (nothing is changed then)."""
    mallopt = _function("mallopt", library)
    if mallopt is None:
        return False
    return all([mallopt(_MMAP_THRESHOLD, kept) == 1, mallopt(_TRIM_THRESHOLD, kept) == 1])


def return_freed_memory(*, library: Any = None) -> bool:
    """Give all free pages of the heap back to the system now, after something that needed much more
    than what comes next (loading a model).  False where the C library cannot."""
    trim = _function("malloc_trim", library)
    return trim is not None and trim(0) == 1


def _function(name: str, library: Any) -> Any:
    if sys.platform != "linux":
        return None
    return getattr(ctypes.CDLL(None) if library is None else library, name, None)
