"""The simulation again, with a cache that makes everything scarce and keeps what it can."""

from __future__ import annotations

from dataclasses import replace
from functools import partial

import pytest

from tests.actors.fake_cache import FakeCache
from tests.sim import coverage
from tests.sim.checkers import check_all, same_journal
from tests.sim.world import run_plan
from tests.sim.world_plan import WorldPlan, make_plan

pytestmark = pytest.mark.sim

SEEDS = range(5000, 5060)
KINDS = {
    "blocks": {"block": 4},
    "disk": {"block": 3, "disk": True},
    "snapshots": {"block": 1, "snapshots": True},
    "nothing kept": {"block": 0},
}


def scarce(seed: int) -> WorldPlan:
    """The same world with less cache: hardly more than the largest request needs."""
    plan = make_plan(seed)
    limits = plan.limits
    budget = int(limits.slot_context_tokens * (1.0 + (seed % 5) / 4))
    return replace(plan, limits=replace(limits, cache_budget_tokens=budget))


@pytest.mark.parametrize("kind", KINDS)
def test_invariants_hold(kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    met: set[str] = set()
    for seed in SEEDS:
        plan = scarce(seed)
        quantum = plan.limits.lease_quantum_tokens
        fake = partial(FakeCache, quantum=quantum, **KINDS[kind])
        monkeypatch.setattr("actors.pipeline.CacheManager", fake)
        try:
            first = run_plan(plan)
            check_all(first.run)
            same_journal(first.journal, run_plan(plan).journal)
        except (Exception, BaseExceptionGroup) as error:
            raise AssertionError(f"seed {seed}, {kind}: {error}") from error
        met |= coverage.situations(first.run)
    needs = coverage.WITH_GROWING_LEASES
    if kind == "nothing kept":
        needs = tuple(name for name in needs if name not in ("prefix hit", "handle forgotten"))
    coverage.require(met, needs)
