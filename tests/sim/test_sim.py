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

import pytest

from actors.kit.faults import CRASH_POINTS
from actors.kit.journal import Entry
from tests.sim import coverage
from tests.sim.checkers import check_all, same_journal
from tests.sim.run import CheckFailed
from tests.sim.world import WorldResult, run_world

pytestmark = pytest.mark.sim

SEEDS = int(os.environ.get("MLXCEL_SIM_SEEDS", "200"))
FIRST = int(os.environ.get("MLXCEL_SIM_FIRST", "0"))
BATCH = 20


def replay_hint(seed: int) -> str:
    return f"seed {seed}; replay it with: python -m tools.sim --seed {seed} --journal"


def digest(entries: Sequence[Entry]) -> str:
    """One line for one journal."""
    lines = "\n".join(map(repr, entries))
    return hashlib.sha256(lines.encode()).hexdigest()


def checked(seed: int) -> WorldResult:
    """Run a seed twice; every invariant holds and both journals are equal."""
    try:
        first = run_world(seed)
        check_all(first.run)
        same_journal(first.journal, run_world(seed).journal)
    except (Exception, BaseExceptionGroup) as error:
        raise AssertionError(f"{error}\n{replay_hint(seed)}") from error
    return first


@pytest.fixture(scope="module")
def met() -> set[str]:
    """The situations that the seeds of this module went through, and the points that crashed."""
    return set()


@pytest.mark.parametrize("first", range(FIRST, FIRST + SEEDS, BATCH))
def test_invariants_hold(first: int, met: set[str]) -> None:
    for seed in range(first, min(first + BATCH, FIRST + SEEDS)):
        run = checked(seed).run
        met |= coverage.situations(run)
        met |= {f"crash at {e['detail']}" for _, e in run.having("fault_armed")}


def test_the_seeds_meet_every_situation(met: set[str]) -> None:
    """I38.  A smaller set of seeds than the default may be too small for that, and says so."""
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
