"""The simulation again, with a cache that makes everything scarce and keeps what it can."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from actors.limits import PromptCacheLimits
from tests.actors.fake_cache import FakeCache
from tests.sim import coverage
from tests.sim.checkers import check_all, same_journal
from tests.sim.world import run_plan
from tests.sim.world_plan import WorldPlan, make_plan

pytestmark = pytest.mark.sim

SEEDS = range(5000, 5060)


def scarce(seed: int, kind: str) -> WorldPlan:
    """The same world with less cache: hardly more than the largest request needs."""
    plan = make_plan(seed)
    limits = plan.limits
    budget = int(limits.slot_context_tokens * (1.0 + (seed % 5) / 4))
    prompt_cache = PromptCacheLimits(
        enabled=kind != "nothing kept",
        block_tokens=1 + seed % 4,
        min_prefix=1 + seed % 5,
        max_entries=2 + seed % 7,
        ttl_s=0.5 if seed % 3 == 0 else 3600.0,
        apc=seed % 6 != 0,
    )
    return replace(
        plan,
        prefix="snapshots" if kind == "snapshots" else "blocks",
        limits=replace(limits, cache_budget_tokens=budget, prompt_cache=prompt_cache),
    )


def fake_with_disk(*, inbox: Any, limits: Any, journal: Any, faults: Any, **_: Any) -> FakeCache:
    """Keeps everything outside the engine too, and loads it again."""
    return FakeCache(
        inbox=inbox,
        budget_tokens=limits.cache_budget_tokens,
        journal=journal,
        faults=faults,
        quantum=limits.lease_quantum_tokens,
        block=3,
        disk=True,
    )


@pytest.mark.parametrize("kind", ["blocks", "snapshots", "nothing kept", "disk"])
def test_invariants_hold(kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    met: set[str] = set()
    if kind == "disk":
        monkeypatch.setattr("actors.pipeline.CacheManager", fake_with_disk)
    for seed in SEEDS:
        plan = scarce(seed, kind)
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
