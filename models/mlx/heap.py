"""Which freed memory stays in the process, on MLX's CPU backend with the GNU C library.

MLX takes the memory of every array from ``malloc`` and frees it after use.  Two kinds of arrays
want opposite things.  Activations come again with the next layer: their pages should stay, since
fresh ones have to be zeroed by the system (11 000 page faults for 46 MB).  KV caches of a batch are
replaced by ones of another size: their pages should go at once, or they stay as holes that the next
ones do not fit into.  The limits below part the two by size, and what is left of the holes is given
back by hand where a prompt was computed or a batch was rebuilt.
"""

from __future__ import annotations

import ctypes
import sys
from typing import Any, Final

import mlx.core as mx

from models.mlx.kv_kinds import Caches, arrays_of

# Numbers of the parameters in <malloc.h>.
_TRIM_THRESHOLD: Final = -1
_MMAP_THRESHOLD: Final = -3
# The largest piece that the heap keeps: an activation of 512 tokens in a layer 4096 wide.
PIECE_BYTES: Final = 8 << 20
# How many free bytes at its end the heap keeps.
END_BYTES: Final = 64 << 20
# Rebuilding smaller caches leaves holes that are not worth a walk over the heap.
WORTH_BYTES: Final = 64 << 20


def set_limits(*, library: Any = None) -> bool:
    """Fix both limits, which the C library would otherwise move by itself.

    False where it has no such limits; nothing is changed then.
    """
    mallopt = _function("mallopt", library)
    if mallopt is None:
        return False
    return all(
        [mallopt(_MMAP_THRESHOLD, PIECE_BYTES) == 1, mallopt(_TRIM_THRESHOLD, END_BYTES) == 1]
    )


def return_freed_memory(*, library: Any = None) -> bool:
    """Give all free pages of the heap back to the system now; a few milliseconds.

    False where the C library cannot, or had none.
    """
    trim = _function("malloc_trim", library)
    return trim is not None and trim(0) == 1


def evaluate_in_turn(caches: Caches, trims: int = 6) -> None:
    """Evaluate caches that were rebuilt from others layer by layer, and give back what those held.

    In one piece the old and the new ones would be there at once.  Small ones are left alone, and so
    is everything on other devices, where the memory is not the heap's.
    """
    if mx.default_device() != mx.Device(mx.cpu):
        return
    if sum(array.nbytes for array in arrays_of(caches)) < WORTH_BYTES:
        return
    often = -(-len(caches) // trims)
    for number, cache in enumerate(caches, 1):
        mx.eval(arrays_of([cache]))
        if number % often == 0 or number == len(caches):
            return_freed_memory()


def _function(name: str, library: Any) -> Any:
    if sys.platform != "linux":
        return None
    return getattr(ctypes.CDLL(None) if library is None else library, name, None)
