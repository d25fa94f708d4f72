"""Many seeds through the whole runtime: every invariant holds, and the same seed is the same run.

``MLXCEL_SIM_SEEDS`` sets how many seeds (default 200), ``MLXCEL_SIM_FIRST`` the first one (0).
A failing seed is replayed with ``python -m tools.sim --seed N``.
"""

from __future__ import annotations

import hashlib
import os
import subprocess
import sys
from collections.abc import Sequence
from functools import cache

import pytest

from actors.kit.faults import CRASH_POINTS
from actors.kit.journal import Entry
from tests.sim import coverage
from tests.sim.checkers import check_all, same_journal
from tests.sim.run import CheckFailed
from tests.sim.world import run_world

pytestmark = pytest.mark.sim

DEFAULT_SEEDS = 200
SEEDS = int(os.environ.get("MLXCEL_SIM_SEEDS", str(DEFAULT_SEEDS)))
FIRST = int(os.environ.get("MLXCEL_SIM_FIRST", "0"))
BATCH = 20


def replay_hint(seed: int) -> str:
    return f"seed {seed}; replay it with: python -m tools.sim --seed {seed} --journal"


def digest(entries: Sequence[Entry]) -> str:
    """One line for one journal."""
    lines = "\n".join(map(repr, entries))
    return hashlib.sha256(lines.encode()).hexdigest()


@cache
def checked(seed: int) -> frozenset[str]:
    """Run a seed twice; every invariant holds and both journals are equal.

    Returns the situations that it went through and the points at which an actor crashed.
    """
    try:
        first = run_world(seed)
        check_all(first.run)
        same_journal(first.journal, run_world(seed).journal)
    except (Exception, BaseExceptionGroup) as error:
        raise AssertionError(f"{error}\n{replay_hint(seed)}") from error
    crashes = {f"crash at {entry['detail']}" for _, entry in first.run.having("fault_armed")}
    return frozenset(coverage.situations(first.run) | crashes)


@pytest.mark.parametrize("first", range(FIRST, FIRST + SEEDS, BATCH))
def test_invariants_hold(first: int) -> None:
    for seed in range(first, min(first + BATCH, FIRST + SEEDS)):
        checked(seed)


def test_the_seeds_meet_every_situation() -> None:
    """I38, over at least the default number of seeds (what has been run is not run again)."""
    met: set[str] = set()
    for seed in range(FIRST, FIRST + max(SEEDS, DEFAULT_SEEDS)):
        met |= checked(seed)
    coverage.require(met)
    missed = [point for point in CRASH_POINTS if f"crash at {point}" not in met]
    assert not missed, f"no seed crashed at {missed}"


def test_missing_situations_are_reported() -> None:
    with pytest.raises(CheckFailed, match="skip rule"):
        coverage.require(set(coverage.REQUIRED) - {"skip rule"})


@pytest.mark.parametrize("hash_seed", ["1", "42"])
def test_same_journal_in_another_process(hash_seed: str) -> None:
    """I39: neither the process nor the order of sets matters."""
    seeds = range(5)
    code = (
        "from tests.sim.test_sim import digest\n"
        "from tests.sim.world import run_world\n"
        f"for seed in range({len(seeds)}): print(digest(run_world(seed).journal))"
    )
    path = ":".join(entry for entry in sys.path if entry)
    out = subprocess.run(
        [sys.executable, "-c", code],
        env={"PYTHONHASHSEED": hash_seed, "PYTHONPATH": path},
        capture_output=True,
        text=True,
        check=True,
    )
    assert out.stdout.split() == [digest(run_world(seed).journal) for seed in seeds]


def test_different_seeds_are_different_runs() -> None:
    assert len({digest(run_world(seed).journal) for seed in range(10)}) == 10
