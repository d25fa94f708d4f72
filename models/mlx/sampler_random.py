"""Random numbers as a pure function of (seed, position, stream)."""

from __future__ import annotations

from typing import Final

import numpy as np
import numpy.typing as npt

DRAW: Final = 0
XTC: Final = 1

_GOLDEN: Final = 0x9E3779B97F4A7C15
_STREAM: Final = 0xD1342543DE82EF95
_MIX_1: Final = np.uint64(0xBF58476D1CE4E5B9)
_MIX_2: Final = np.uint64(0x94D049BB133111EB)

Words = npt.NDArray[np.uint64]


def uniforms(seeds: Words, positions: Words, stream: int = DRAW) -> npt.NDArray[np.float32]:
    """One number in [0, 1) per (seed, position), on a grid of 2**-23.

    The grid is coarse enough that the product with any float32 total stays below that total.
    """
    salt = np.uint64((stream * _STREAM) % 2**64)
    with np.errstate(over="ignore"):
        words = _mix(_mix(seeds ^ salt) + (positions + np.uint64(1)) * np.uint64(_GOLDEN))
    return (words >> np.uint64(41)).astype(np.float32) * np.float32(2.0**-23)


def _mix(words: Words) -> Words:
    """A bijection of 64-bit words in which every input bit moves about half of the output bits."""
    words = (words ^ (words >> np.uint64(30))) * _MIX_1
    words = (words ^ (words >> np.uint64(27))) * _MIX_2
    return words ^ (words >> np.uint64(31))
