"""I25-I31 and I37: deadlines, drain, faults and restarts, and that everybody finishes."""

from __future__ import annotations

import math

from actors.kit.journal import Entry
from tests.sim.run import EPSILON_S, PIPELINE, CheckFailed, Run, Slots, rids_of

_WORLD = frozenset({"client_sent", "client_event", "client_closed", "fault_armed", "probe"})


def deadline_kept(run: Run) -> None:
    """I25: after its deadline a request is in no new step and gets no token of a later one."""
    for rid, facts in run.requests.items():
        bound_s = facts.deadline_s + run.max_step_s + EPSILON_S
        for _, entry in run.by_rid.get(rid, []):
            if entry.event == "planned" and entry.time_s > facts.deadline_s + EPSILON_S:
                raise CheckFailed("I25", f"deadline {facts.deadline_s}", at=entry, rid=rid)
            if entry.event == "token" and entry.time_s > bound_s:
                raise CheckFailed("I25", f"deadline {facts.deadline_s}", at=entry, rid=rid)


def drain_accepts_nothing(run: Run) -> None:
    """I26: after draining starts nothing is accepted."""
    draining = False
    for entry in run.entries:
        if entry.event == "phase":
            draining = draining or entry["phase"] in ("draining", "stopped")
        elif entry.event == "accepted" and draining:
            raise CheckFailed("I26", "accepted while draining", at=entry, rid=entry["rid"])


def drain_ends(run: Run) -> None:
    """I27: shutdown ends within ``drain_s`` plus one step, and fails what remains."""
    if run.drain_s == math.inf:
        return
    bound_s = run.drain_s + run.limits.drain_s + run.max_step_s + run.limits.poll_s + EPSILON_S
    last = run.entries[-1]
    ends = [entry for _, entry in run.having("ended")]
    if not ends and last.time_s > bound_s:
        raise CheckFailed("I27", f"draining since {run.drain_s}, no end", at=last)
    for entry in ends:
        if entry.time_s > bound_s:
            raise CheckFailed("I27", f"draining since {run.drain_s}", at=entry)
    for rid in run.by_rid if ends else ():
        sent = run.first(rid, "submitted")
        if sent and run.first(rid, "terminal", "refused", "cancel_seen") is None:
            raise CheckFailed("I27", "not failed by the shutdown", at=sent[1], rid=rid)


def nothing_after_end(run: Run) -> None:
    """I28: nothing runs after the root nursery has closed."""
    ended = False
    for entry in run.entries:
        if ended and entry.event not in _WORLD:
            raise CheckFailed("I28", "after the end", at=entry)
        ended = ended or entry.event == "ended"


def fault_fails_the_running(run: Run) -> None:
    """I29: an engine fault fails every running request before anything else runs, and only those.

    Who waits in the room survives, unless the queue itself crashed or the pipeline was given up.
    """
    room_lost = False
    slots = Slots()
    waiting: set[str] = set()
    owed: dict[str, Entry] = {}
    for entry in run.entries:
        match entry.event:
            case "engine_fault":
                owed = dict.fromkeys(slots.active, entry)
            case "queued" | "requeued":
                waiting.add(entry["rid"])
            case "picked" | "swept":
                waiting.discard(entry["rid"])
            case "terminal" if entry["rid"] in owed:
                _is_engine_failure(entry)
                del owed[entry["rid"]]
            case "terminal":
                if entry["rid"] in waiting and not room_lost and entry["detail"] not in _OWN_END:
                    raise CheckFailed("I29", "it was not running", at=entry, rid=entry["rid"])
                waiting.discard(entry["rid"])
            case "escalated":
                room_lost = True
            case "fault_armed":
                room_lost = room_lost or entry["detail"].startswith("prefill.")
            case "cancel_seen" | "client_closed":
                owed.pop(entry["rid"], None)
            case "restarted" | "planned" | "ended":
                for rid, fault in owed.items():
                    raise CheckFailed("I29", f"not failed after {fault.time_s}", at=entry, rid=rid)
            case _:
                pass
        slots.apply(entry)


_OWN_END = ("deadline", "shutting_down", "engine_dead")


def _is_engine_failure(entry: Entry) -> None:
    known = ("engine_error", "engine_dead", "deadline", "slow_client", "shutting_down")
    if entry["kind"] == "failed" and entry["detail"] in known:
        return
    if entry["kind"] == "finished":
        return  # its last token was already here
    raise CheckFailed("I29", "the wrong end after a fault", at=entry, rid=entry["rid"])


def restarts_bounded(run: Run) -> None:
    """I30: a child never restarts more often than the policy allows; too often ends the run."""
    times: dict[str, list[float]] = {}
    escalated: Entry | None = None
    for _, entry in run.having("restarted", "escalated", "ended"):
        if entry.event == "escalated":
            escalated = entry
        elif entry.event == "ended":
            escalated = None
        else:
            # Another child's restart may fall due in the very moment in which one is given up.
            if escalated is not None and (
                escalated["child"] == entry["child"] or entry.time_s > escalated.time_s + EPSILON_S
            ):
                raise CheckFailed("I30", "restarted after it was given up", at=entry)
            recent = times.setdefault(entry["child"], [])
            window_s = run.limits.restart_window_s - run.limits.restart_backoff_max_s
            recent[:] = [t for t in recent if t > entry.time_s - window_s]
            recent.append(entry.time_s)
            if len(recent) > run.limits.restart_max:
                raise CheckFailed("I30", f"{len(recent)} restarts in {window_s} s", at=entry)
    if escalated is not None:
        raise CheckFailed("I30", "the run went on after giving up", at=escalated)


def restart_is_clean(run: Run) -> None:
    """I31: the first plan after a restart finds new grants, new leases and nobody of before."""
    old: set[str] = set()
    slots = Slots()
    since: Entry | None = None
    for entry in run.entries:
        if entry.event in ("crashed", "restarted") and entry["child"] in PIPELINE:
            old |= set(slots.active)
            since = entry
        elif entry.event == "planned":
            for rid in rids_of(entry):
                if rid in old:
                    raise CheckFailed("I31", "it ran before the restart", at=entry, rid=rid)
            held = slots.offered | slots.withheld | set(slots.active.values())
            if since is not None and len(held) != run.limits.max_slots:
                raise CheckFailed("I31", "slots were lost in the restart", at=entry)
            since = None
        slots.apply(entry)
        if entry.event == "leased" and since is not None:
            total = sum(tokens for _, tokens in slots.leases.values())
            if entry["leased_tokens"] != total:
                raise CheckFailed("I31", "old leases survived", at=entry, rid=entry["rid"])


def patient_ones_finish(run: Run) -> None:
    """I37: without faults and shutdown every valid request of a reading client finishes in time."""
    if run.faults or run.drain_s < math.inf:
        return
    for rid, facts in run.requests.items():
        if not facts.patient or not facts.valid or run.first(rid, "submitted") is None:
            continue
        if facts.deadline_s < run.entries[-1].time_s or run.first(rid, "client_closed"):
            continue
        ends = [e for _, e in run.by_rid[rid] if e.event == "client_event"]
        if not any(e["kind"] == "finished" for e in ends):
            raise CheckFailed("I37", "never finished", rid=rid)
