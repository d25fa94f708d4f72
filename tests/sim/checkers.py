"""Every invariant by its number.  A checker takes a ``Run`` and raises ``CheckFailed``."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from actors.kit.journal import Entry
from tests.sim import checkers_cache as cache
from tests.sim import checkers_capacity as capacity
from tests.sim import checkers_order as order
from tests.sim import checkers_requests as requests
from tests.sim import checkers_store as store
from tests.sim import checkers_time as time
from tests.sim.run import CheckFailed, Run

Checker = Callable[[Run], None]

CHECKERS: dict[str, Checker] = {
    "I1": requests.one_terminal,
    "I2": requests.nothing_after_terminal,
    "I3": requests.positions_without_gap,
    "I4": requests.text_equals_script,
    "I5": requests.refused_never_queued,
    "I6": requests.starts_once,
    "I7": requests.usage_is_delivered,
    "I8": requests.cancelled_leaves_plans,
    "I9": requests.cancelled_frees_slot,
    "I10": requests.cancelled_leaves_queue,
    "I11": requests.no_token_after_close,
    "I12": requests.cancellation_is_private,
    "I13": order.fifo_in_lane,
    "I14": order.lower_lane_only_by_skip,
    "I15": order.head_waits_bounded,
    "I16": order.refused_head_keeps_its_turn,
    "I17": capacity.active_within_slots,
    "I18": capacity.budget_kept,
    "I19": capacity.bounds_kept,
    "I20": capacity.slots_add_up,
    "I21": capacity.leases_match,
    "I22": capacity.steps_within_budget,
    "I23": capacity.parked_rests,
    "I24": capacity.parked_slows_nobody,
    "I25": time.deadline_kept,
    "I26": time.drain_accepts_nothing,
    "I27": time.drain_ends,
    "I28": time.nothing_after_end,
    "I29": time.fault_fails_the_running,
    "I30": time.restarts_bounded,
    "I31": time.restart_is_clean,
    "I32": cache.prefix_is_the_prompts,
    "I33": cache.handles_live_once,
    "I34": store.nothing_expired,
    "I35": store.within_bounds,
    "I37": time.patient_ones_finish,
}


def check_all(run: Run) -> None:
    """Every single-run invariant.  I38 (coverage) and I39 (same seed, same journal) need more."""
    for checker in CHECKERS.values():
        checker(run)


def same_journal(first: Sequence[Entry], second: Sequence[Entry]) -> None:
    """I39: the same seed gives the same journal."""
    for index, (one, other) in enumerate(zip(first, second, strict=False)):
        if one != other:
            raise CheckFailed("I39", f"entry {index} differs from {other!r}", at=one)
    if len(first) != len(second):
        raise CheckFailed("I39", f"{len(first)} entries against {len(second)}")
