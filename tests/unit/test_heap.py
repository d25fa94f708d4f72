"""The heap's limits: set where the C library has them, left alone elsewhere."""

import json
import subprocess
import sys
from types import SimpleNamespace

import pytest

from models.mlx.heap import END_BYTES, PIECE_BYTES, return_freed_memory, set_limits

# Page faults of filling a 4 MiB buffer that was used and freed before.
PROBE = """
import ctypes, json, resource
from models.mlx.heap import set_limits
libc = ctypes.CDLL(None)
libc.malloc.restype = ctypes.c_void_p
libc.malloc.argtypes, libc.free.argtypes = [ctypes.c_size_t], [ctypes.c_void_p]
size = 4 << 20
def use():
    before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
    place = libc.malloc(size)
    ctypes.memset(place, 1, size)
    libc.free(place)
    return resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before
usual = [use(), use()]
done = set_limits()
print(json.dumps([done, usual, [use(), use()]]))
"""


@pytest.mark.skipif(sys.platform != "linux", reason="only the GNU C library has these limits")
def test_freed_memory_is_used_again_without_page_faults() -> None:
    out = subprocess.run(
        [sys.executable, "-c", PROBE], capture_output=True, text=True, check=True, timeout=60
    )
    done, usual, kept = json.loads(out.stdout)
    if done:  # another C library says False
        assert usual[1] > 20  # huge pages need few faults; small ones 16384
        assert kept[1] <= 2


@pytest.mark.skipif(sys.platform != "linux", reason="other platforms are left alone")
def test_both_limits_are_set() -> None:
    calls: list[tuple[int, int]] = []

    def mallopt(number: int, value: int) -> int:
        calls.append((number, value))
        return 1

    assert set_limits(library=SimpleNamespace(mallopt=mallopt))
    assert calls == [(-3, PIECE_BYTES), (-1, END_BYTES)]


def test_a_library_without_limits_is_left_alone() -> None:
    assert not set_limits(library=SimpleNamespace())
    assert not return_freed_memory(library=SimpleNamespace())


@pytest.mark.skipif(sys.platform != "linux", reason="only the GNU C library gives pages back")
def test_the_free_pages_of_the_whole_heap_are_given_back() -> None:
    asked: list[int] = []

    def malloc_trim(pad: int) -> int:
        asked.append(pad)
        return 1

    assert return_freed_memory(library=SimpleNamespace(malloc_trim=malloc_trim))
    assert asked == [0]
