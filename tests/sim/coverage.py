"""I38: which situations a run went through, so that a set of seeds can prove that it meets all."""

from __future__ import annotations

from collections.abc import Iterable

from actors.kit.journal import Entry
from tests.sim.run import CheckFailed, Run

#: Every set of seeds that CI runs has to meet each of these at least once.
REQUIRED: tuple[str, ...] = (
    "busy",
    "park",
    "resume",
    "slow client ended",
    "cancel in admission",
    "cancel while queued",
    "cancel while prefilling",
    "cancel while decoding",
    "cache refusal",
    "skip rule",
    "restart",
    "admission restart",
    "store restart",
    "engine fault",
    "row failure",
    "escalation",
    "deadline in queue",
    "deadline in decode",
    "drain with work left",
    "drain in time",
    "refused while draining",
    "refused as invalid",
    "refused while giving up",
    "finish by stop",
    "finish by stop string",
    "finish by length",
    "two chunks in a step",
    "decode beside prefill",
    "requeued after a crash",
    "finish by loop",
    "fork wait",
    "fork prefix",
    "leader lost",
)

#: What needs leases that grow and prefixes that are kept.
WITH_GROWING_LEASES: tuple[str, ...] = (
    "growth",
    "starved",
    "preempt",
    "resume after preempt",
    "slot withheld",
    "prefix hit",
    "handle forgotten",
)


def situations(run: Run) -> set[str]:
    """The situations that the journal of ``run`` shows."""
    found: set[str] = set()
    for entry in run.entries:
        found.update(_of_entry(entry))
    started = {entry["rid"] for _, entry in run.having("started")}
    for _, entry in run.having("terminal"):
        if entry["detail"] == "deadline":
            running = entry["rid"] in started
            found.add("deadline in decode" if running else "deadline in queue")
        if entry["detail"] == "shutting_down" and entry["rid"] in started:
            found.add("drain with work left")
    restarts = {entry["child"] for _, entry in run.having("restarted")}
    found |= {"restart"} if "pipeline" in restarts else set()
    found |= {"store restart"} if "store" in restarts else set()
    found |= {"admission restart"} if any(c.startswith("admission") for c in restarts) else set()
    if run.ended and run.drain_s < float("inf") and "drain with work left" not in found:
        found.add("drain in time")
    return found | _after_crash(run)


_SIMPLE = {
    "fork_wait": "fork wait",
    "fork_lost": "leader lost",
    "grew": "growth",
    "starved": "starved",
    "preempted": "preempt",
    "returned": "resume after preempt",
    "withheld": "slot withheld",
    "parked": "park",
    "resumed": "resume",
    "lease_refused": "cache refusal",
    "escalated": "escalation",
    "engine_fault": "engine fault",
}
_CANCEL = {
    "admission": "cancel in admission",
    "queued": "cancel while queued",
    "prefill": "cancel while prefilling",
    "decode": "cancel while decoding",
}
_TERMINAL = {
    "stop": "finish by stop",
    "stop_string": "finish by stop string",
    "length": "finish by length",
    "loop": "finish by loop",
    "slow_client": "slow client ended",
}
_TURNED_AWAY = {
    "server_busy": "busy",
    "shutting_down": "refused while draining",
    "engine_dead": "refused while giving up",
}
_REFUSED = {
    "shutting_down": "refused while draining",
    "invalid_request": "refused as invalid",
    "context_length": "refused as invalid",
}


def _of_entry(entry: Entry) -> Iterable[str]:
    match entry.event:
        case "cancel_seen":
            yield _CANCEL[entry["where"]]
        case "terminal" if entry["detail"] in _TERMINAL:
            yield _TERMINAL[entry["detail"]]
        case "refused" if entry["code"] in _REFUSED:
            yield _REFUSED[entry["code"]]
        case "client_event" if entry["kind"] == "turned_away":
            yield _TURNED_AWAY[entry["text"]]
        case "engine_opened":
            yield "fork prefix" if entry["handles"][0] < 0 else "prefix hit"
        case "engine_forgot" if entry["handle"] >= 0:
            yield "handle forgotten"
        case "picked" if entry["by_skip"]:
            yield "skip rule"
        case "planned":
            if len(entry["prefill"]) > 1:
                yield "two chunks in a step"
            if entry["prefill"] and entry["decode"]:
                yield "decode beside prefill"
        case _ if entry.event in _SIMPLE:
            yield _SIMPLE[entry.event]
        case _:
            pass


def _after_crash(run: Run) -> set[str]:
    """What needs the entries around it to be told apart."""
    found: set[str] = set()
    refused: set[str] = set()
    faulted = False
    for entry in run.entries:
        if entry.event == "lease_refused":
            refused.add(entry["rid"])
        elif entry.event == "requeued":
            if entry["rid"] not in refused:
                found.add("requeued after a crash")
            refused.discard(entry["rid"])
        elif entry.event == "engine_fault":
            faulted = True
        elif entry.event in ("restarted", "stepped"):
            faulted = False
        if entry.event == "terminal" and entry["detail"] == "engine_error" and not faulted:
            found.add("row failure")
    return found


def require(found: set[str], required: tuple[str, ...] = REQUIRED) -> None:
    """I38: nothing of ``required`` is missing from ``found``."""
    missing = [name for name in required if name not in found]
    if missing:
        raise CheckFailed("I38", f"no seed met: {', '.join(missing)}")
