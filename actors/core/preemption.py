"""Who gives up its cache when a running sequence needs more of it than there is."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

Policy = Literal["longest-first", "lowest-priority"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Candidate:
    """``tokens`` are held in the engine.  ``lane`` grows downwards, ``sequence_id`` with the start.

    ``spared``: it was preempted before and has not got on since, so others go first.
    """

    sequence_id: int
    lane: int
    tokens: int
    spared: bool = False


def choose_victim(candidates: Sequence[Candidate], policy: Policy) -> int | None:
    """The sequence that has to go; None if there is only one, which would gain nothing by it.

    Whoever comes back is spared until it has got on by a whole quantum.  As its lease covers that
    quantum, a sequence that has to grow is never spared itself, so somebody can always go, and
    between two preemptions of a sequence lies at least a quantum of its own progress.
    """
    if len(candidates) < 2:
        return None
    pool = [one for one in candidates if not one.spared] or candidates
    if policy == "longest-first":
        return max(pool, key=lambda one: (one.tokens, one.sequence_id)).sequence_id
    return max(pool, key=lambda one: (one.lane, one.sequence_id)).sequence_id
