"""I1-I12: what one request may see, and what its cancellation costs."""

from __future__ import annotations

import math

from actors.kit.journal import Entry
from tests.sim.run import EPSILON_S, PIPELINE, CheckFailed, Run

_CLIENT_ENDS = ("finished", "failed")


def one_terminal(run: Run) -> None:
    """I1: every submitted request ends exactly once, and its client sees the end and the close."""
    for rid, entries in run.by_rid.items():
        if not _was_let_in(entries):
            continue
        ends = [entry for _, entry in entries if entry.event in ("terminal", "refused")]
        if len(ends) > 1:
            raise CheckFailed("I1", "two terminal events", at=ends[1], rid=rid)
        left = run.first(rid, "client_closed") is not None
        if not ends and not left:
            raise CheckFailed("I1", "no terminal event", at=entries[-1][1], rid=rid)
        if not ends and run.first(rid, "cancel_seen", "swept") is None:
            raise CheckFailed("I1", "the cancelled request was forgotten", rid=rid)
        seen = [e for _, e in entries if e.event == "client_event" and e["kind"] in _CLIENT_ENDS]
        if not left and len(seen) != 1:
            raise CheckFailed("I1", f"the client saw {len(seen)} terminal events", rid=rid)
        closed = any(e.event == "client_event" and e["kind"] == "end" for _, e in entries)
        if seen and not closed:
            raise CheckFailed("I1", "the channel stayed open", at=seen[0], rid=rid)


def _was_let_in(entries: list[tuple[int, Entry]]) -> bool:
    """Whether the server took it at all: there was a place, and it was ready."""
    if any(e.event == "client_event" and e["kind"] == "turned_away" for _, e in entries):
        return False
    return any(e.event in ("client_sent", "submitted") for _, e in entries)


_AFTER_END = frozenset(
    {"accepted", "queued", "picked", "requeued", "started", "planned", "token", "parked", "resumed"}
)


def nothing_after_terminal(run: Run) -> None:
    """I2: nothing follows a terminal event, neither in the actors nor at the client."""
    for rid, entries in run.by_rid.items():
        end: Entry | None = None
        client_end: Entry | None = None
        for _, entry in entries:
            if end is not None and entry.event in _AFTER_END:
                raise CheckFailed("I2", f"follows {end.event}{end.fields!r}", at=entry, rid=rid)
            if entry.event in ("terminal", "refused"):
                end = entry
            if entry.event != "client_event" or entry["kind"] == "end":
                continue
            if client_end is not None:
                raise CheckFailed("I2", "the client got an event after the end", at=entry, rid=rid)
            if entry["kind"] in _CLIENT_ENDS:
                client_end = entry


def positions_without_gap(run: Run) -> None:
    """I3: token positions are 0, 1, 2, ... and the client gets each exactly once."""
    for rid, entries in run.by_rid.items():
        sent = 0
        got = 0
        for _, entry in entries:
            if entry.event == "token":
                if entry["position"] != sent:
                    raise CheckFailed("I3", f"expected position {sent}", at=entry, rid=rid)
                sent += 1
            elif entry.event == "client_event" and entry["kind"].startswith("delta"):
                if entry["kind"] != f"delta:{got}":
                    raise CheckFailed("I3", f"client expected {got}", at=entry, rid=rid)
                got += 1
                if got > sent:
                    raise CheckFailed("I3", "a delta that nobody sent", at=entry, rid=rid)


def client_text(entries: list[tuple[int, Entry]]) -> str:
    """What the client has read, the held-back rest included."""
    parts: list[str] = []
    for _, entry in entries:
        if entry.event != "client_event":
            continue
        if entry["kind"].startswith("delta") or entry["kind"] == "rest":
            parts.append(entry["text"])
    return "".join(parts)


def text_equals_script(run: Run) -> None:
    """I4: a finished request has exactly the script's text; any other a beginning of it."""
    for rid, facts in run.requests.items():
        entries = run.by_rid.get(rid, [])
        text = client_text(entries)
        if not facts.text.startswith(text):
            raise CheckFailed("I4", f"{text!r} is no beginning of {facts.text!r}", rid=rid)
        for _, entry in entries:
            if entry.event == "client_event" and entry["kind"] == "finished":
                if text != facts.text:
                    raise CheckFailed("I4", f"{text!r} is not {facts.text!r}", at=entry, rid=rid)
                if entry["text"].split(",")[0] != facts.reason:
                    raise CheckFailed("I4", f"reason is not {facts.reason}", at=entry, rid=rid)


def refused_never_queued(run: Run) -> None:
    """I5: a refused request never reaches the waiting room; an invalid one is refused."""
    for rid in run.by_rid:
        queued = run.first(rid, "queued")
        if queued and run.first(rid, "refused"):
            raise CheckFailed("I5", "refused and queued", at=queued[1], rid=rid)
        facts = run.requests.get(rid)
        if queued and facts is not None and not facts.valid:
            raise CheckFailed("I5", "an invalid request was queued", at=queued[1], rid=rid)


def starts_once(run: Run) -> None:
    """I6: each request starts at most once."""
    for rid, entries in run.by_rid.items():
        starts = [entry for _, entry in entries if entry.event == "started"]
        if len(starts) > 1:
            raise CheckFailed("I6", "started again", at=starts[1], rid=rid)


def usage_is_delivered(run: Run) -> None:
    """I7: usage counts equal what was delivered."""
    for rid, entries in run.by_rid.items():
        sent = sum(1 for _, entry in entries if entry.event == "token")
        accepted = run.first(rid, "accepted")
        for _, entry in entries:
            if entry.event != "client_event" or entry["kind"] != "finished":
                continue
            _, prompt, completion = entry["text"].split(",")
            if int(completion) != sent:
                raise CheckFailed("I7", f"{sent} tokens were sent", at=entry, rid=rid)
            if accepted is None or int(prompt) != accepted[1]["prompt_tokens"]:
                raise CheckFailed("I7", "wrong prompt tokens", at=entry, rid=rid)


def cancelled_leaves_plans(run: Run) -> None:
    """I8: a closed or ended request is at most in the step in flight, in no step planned later.

    A stop string is found while the next step runs, so one row more than needed may be computed.
    """
    gone: dict[str, str] = {}
    drawn: dict[str, int] = {}
    for entry in run.entries:
        if entry.event in ("client_closed", "terminal", "slot_freed"):
            gone.setdefault(entry["rid"], entry.event)
        elif entry.event == "preempted":
            # Its new prefill draws the token after those that it has.
            facts = run.requests.get(entry["rid"])
            drawn[entry["rid"]] = 1 + entry["tokens"] - (facts.prompt_tokens if facts else 0)
        elif entry.event == "planned":
            for rid in (*entry["decode"], *(rid for rid, _ in entry["prefill"])):
                if rid in gone:
                    raise CheckFailed("I8", f"planned after {gone[rid]}", at=entry, rid=rid)
            for rid in entry["decode"]:
                drawn[rid] = drawn.get(rid, 1) + 1  # the prompt's last chunk draws the first
                facts = run.requests.get(rid)
                if facts is not None and drawn[rid] > len(facts.tokens) + 1:
                    raise CheckFailed("I8", "computed past its end", at=entry, rid=rid)


def cancelled_frees_slot(run: Run) -> None:
    """I9: the slot of a closed request is free before the next plan, its lease at the same time.

    When no step follows, both are free within the step in flight and one poll.
    """
    waiting: dict[str, Entry] = {}
    active: set[str] = set()
    leased: dict[str, float] = {}  # rid -> when the next plan was made
    bound_s = run.max_step_s + run.limits.poll_s + EPSILON_S
    for entry in run.entries:
        for rid, planned_s in leased.items():
            if entry.time_s > planned_s + EPSILON_S:
                raise CheckFailed("I9", f"lease held since {planned_s}", at=entry, rid=rid)
        for rid, closed in waiting.items():
            if entry.time_s > closed.time_s + bound_s:
                raise CheckFailed("I9", f"slot held since {closed.time_s}", at=entry, rid=rid)
        match entry.event:
            case "started":
                active.add(entry["rid"])
            case "client_closed" if entry["rid"] in active:
                waiting[entry["rid"]] = entry
                leased[entry["rid"]] = math.inf
            case "slot_freed":
                active.discard(entry["rid"])
                waiting.pop(entry["rid"], None)
            case "lease_released":
                leased.pop(entry["rid"], None)
            case "crashed" | "ended" if entry.event == "ended" or entry["child"] in PIPELINE:
                active.clear()
                waiting.clear()
                leased.clear()
            case "fault_armed" if entry["detail"].startswith("cache"):
                leased.clear()  # nobody keeps the book until the restart
            case "planned":
                for rid, closed in waiting.items():
                    raise CheckFailed("I9", f"slot held since {closed.time_s}", at=entry, rid=rid)
                leased = {rid: min(time_s, entry.time_s) for rid, time_s in leased.items()}
            case _:
                pass


def cancelled_leaves_queue(run: Run) -> None:
    """I10: a queued request whose client leaves is out of the room within one sweep.

    If the whole server ends first, its terminal event is I27's matter.
    """
    for rid, entries in run.by_rid.items():
        closed = run.first(rid, "client_closed")
        if closed is None:
            continue
        since_s = math.inf  # when it was both in the room and without a client
        waiting = False
        for _, entry in entries:
            if entry.event in ("queued", "requeued"):
                waiting = True
                since_s = max(entry.time_s, closed[1].time_s)
            elif entry.event in ("picked", "swept", "terminal", "cancel_seen"):
                late_s = entry.time_s - since_s - run.downtime(since_s, entry.time_s)
                if (
                    waiting
                    and entry.event != "terminal"
                    and late_s > run.limits.sweep_s + EPSILON_S
                ):
                    raise CheckFailed("I10", f"{late_s} s late", at=entry, rid=rid)
                waiting = False
        if waiting and _later(run, since_s) > run.limits.sweep_s + EPSILON_S:
            raise CheckFailed("I10", "it never left the room", at=closed[1], rid=rid)


def _later(run: Run, since_s: float) -> float:
    """Seconds of pipeline life between a time and the last entry."""
    last_s = run.entries[-1].time_s
    return last_s - since_s - run.downtime(since_s, last_s)


def no_token_after_close(run: Run) -> None:
    """I11: no token is delivered after the receive end is closed."""
    closed: set[str] = set()
    for entry in run.entries:
        if entry.event == "client_closed":
            closed.add(entry["rid"])
        elif entry.event == "token" and entry["rid"] in closed:
            raise CheckFailed("I11", "token after the close", at=entry, rid=entry["rid"])


def cancellation_is_private(run: Run) -> None:
    """I12: every request gets the tokens of its own script, whoever else leaves or fails."""
    for rid, facts in run.requests.items():
        for _, entry in run.by_rid.get(rid, []):
            if entry.event != "token":
                continue
            position = entry["position"]
            if facts.tokens[position : position + 1] != (entry["token_id"],):
                raise CheckFailed("I12", "not the script's token", at=entry, rid=rid)
