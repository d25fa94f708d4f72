"""Seeds the order in which trio runs its tasks.

trio runs the tasks that are ready together in an order it draws itself.  Its scheduler has a switch
that sorts such a batch by task number and shuffles it with a module-level ``random.Random``; this
is the only file that touches the two private names.  ``tests/sim/test_schedule.py`` fails if they
ever stop working.
"""

from __future__ import annotations

import random
from collections.abc import Iterator
from contextlib import contextmanager

from trio._core import _run


@contextmanager
def seeded_schedule(seed: int) -> Iterator[None]:
    """Every ``trio.run`` inside has a task order that depends on ``seed`` alone."""
    if not isinstance(_run._r, random.Random) or not hasattr(
        _run, "_ALLOW_DETERMINISTIC_SCHEDULING"
    ):
        raise RuntimeError("this version of trio cannot be seeded; see tests/sim/schedule.py")
    before = _run._ALLOW_DETERMINISTIC_SCHEDULING
    state = _run._r.getstate()
    _run._ALLOW_DETERMINISTIC_SCHEDULING = True  # type: ignore[misc]
    _run._r.seed(seed)
    try:
        yield
    finally:
        _run._ALLOW_DETERMINISTIC_SCHEDULING = before  # type: ignore[misc]
        _run._r.setstate(state)
