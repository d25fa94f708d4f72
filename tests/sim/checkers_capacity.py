"""I17-I24: slots, leases, bounds, step sizes, parked sequences."""

from __future__ import annotations

from actors.kit.journal import Entry
from tests.sim.run import EPSILON_S, PIPELINE, CheckFailed, Run, Slots


def active_within_slots(run: Run) -> None:
    """I17: never more active sequences than slots, and no two in one slot."""
    slots = Slots()
    for entry in run.entries:
        if entry.event == "started" and entry["slot"] in slots.active.values():
            raise CheckFailed("I17", "the slot is taken", at=entry, rid=entry["rid"])
        slots.apply(entry)
        if len(slots.active) > run.limits.max_slots:
            raise CheckFailed("I17", f"{len(slots.active)} active", at=entry)


def budget_kept(run: Run) -> None:
    """I18: leased tokens are the sum of the leases, never negative, never above the budget."""
    slots = Slots()
    for entry in run.entries:
        slots.apply(entry)
        if entry.event not in ("leased", "lease_changed", "lease_released"):
            continue
        total = sum(tokens for _, tokens in slots.leases.values())
        if entry["leased_tokens"] != total:
            raise CheckFailed("I18", f"the leases add up to {total}", at=entry, rid=entry["rid"])
        if not 0 <= total <= run.limits.cache_budget_tokens:
            raise CheckFailed("I18", f"{total} leased", at=entry, rid=entry["rid"])


def bounds_kept(run: Run) -> None:
    """I19: places, waiting room and token channels stay within their bounds."""
    inside: set[str] = set()
    waiting: set[str] = set()
    undelivered: dict[str, int] = {}
    for entry in run.entries:
        match entry.event:
            case "submitted":
                inside.add(entry["rid"])
            case "terminal" | "refused" | "cancel_seen":
                inside.discard(entry["rid"])
                waiting.discard(entry["rid"])
            case "queued" | "requeued":
                waiting.add(entry["rid"])
            case "picked" | "swept":
                waiting.discard(entry["rid"])
            case "token":
                undelivered[entry["rid"]] = undelivered.get(entry["rid"], 0) + 1
            case "client_event" if entry["kind"].startswith("delta"):
                undelivered[entry["rid"]] = undelivered.get(entry["rid"], 0) - 1
            case _:
                continue
        if len(inside) > run.limits.places:
            raise CheckFailed("I19", f"{len(inside)} requests inside", at=entry)
        if len(waiting) > run.limits.places:
            raise CheckFailed("I19", f"{len(waiting)} requests waiting", at=entry)
        rid = entry["rid"]
        # One place is the terminal event's; one more event may be on its way to a waiting reader.
        if undelivered.get(rid, 0) > run.limits.token_channel:
            raise CheckFailed("I19", f"{undelivered[rid]} undelivered", at=entry, rid=rid)


def slots_add_up(run: Run) -> None:
    """I20: every slot is offered, starting or active: a plan finds all of them accounted for."""
    slots = Slots()
    for entry in run.entries:
        held = slots.active.values()
        if entry.event == "granted" and (entry["slot"] in slots.offered or entry["slot"] in held):
            raise CheckFailed("I20", "the slot is not free", at=entry)
        if entry.event == "started" and entry["slot"] not in slots.offered:
            raise CheckFailed("I20", "the slot was not offered", at=entry, rid=entry["rid"])
        if entry.event == "withheld" and (entry["slot"] in slots.offered or entry["slot"] in held):
            raise CheckFailed("I20", "the withheld slot is not free", at=entry)
        if entry.event == "slot_freed" and slots.active.get(entry["rid"]) != entry["slot"]:
            raise CheckFailed("I20", "freed by another", at=entry, rid=entry["rid"])
        slots.apply(entry)
        if entry.event == "planned":
            total = len(slots.offered) + len(slots.withheld) + len(slots.active)
            if total != run.limits.max_slots:
                raise CheckFailed("I20", f"{total} slots accounted for", at=entry)


def leases_match(run: Run) -> None:
    """I21: one lease per active or starting sequence, each released once.

    When all is over (the world's ``idle`` probe) no lease, slot or place is held.
    """
    slots = Slots()
    known: set[str] = set()
    for entry in run.entries:
        rid = entry["rid"] if entry.event in ("leased", "lease_released", "started") else ""
        if entry.event == "lease_released" and slots.leases.get(entry["lease"], ("",))[0] != rid:
            raise CheckFailed("I21", "not leased to it", at=entry, rid=rid)
        if entry.event == "started" and slots.leases.get(entry["lease"], ("",))[0] != rid:
            raise CheckFailed("I21", "started without its lease", at=entry, rid=rid)
        slots.apply(entry)
        if entry.event == "planned":
            known = {rid for rid, _ in slots.leases.values()}
            for active in slots.active:
                if active not in known:
                    raise CheckFailed("I21", "runs without a lease", at=entry, rid=active)
    for _, entry in run.having("probe"):
        if entry["name"] == "idle" and any(count for _, count in entry["value"]):
            raise CheckFailed("I21", "something is still held", at=entry)


def steps_within_budget(run: Run) -> None:
    """I22: a step's tokens add up and stay within its bounds; prefill covers prompts once.

    What a sequence begins with counts as covered; one that was preempted begins anew, with what it
    had generated.
    """
    prefilled: dict[str, int] = {}
    accepted = {e["rid"]: int(e["prompt_tokens"]) for _, e in run.having("accepted")}
    for _, entry in run.having("planned", "prefix", "preempted"):
        if entry.event == "prefix":
            prefilled[entry["rid"]] = entry["tokens"]
            continue
        if entry.event == "preempted":
            accepted[entry["rid"]] = entry["tokens"]
            prefilled[entry["rid"]] = 0
            continue
        _check_widths(run, entry)
        tokens = len(entry["decode"]) + sum(count for _, count in entry["prefill"])
        if tokens != entry["tokens"] or not 0 <= tokens <= run.limits.step_tokens:
            raise CheckFailed("I22", f"{tokens} tokens planned", at=entry)
        if len(set(entry["decode"])) != len(entry["decode"]):
            raise CheckFailed("I22", "a sequence is planned twice", at=entry)
        for rid in entry["decode"]:
            if prefilled.get(rid, 0) != accepted[rid]:
                raise CheckFailed("I22", "decodes before its prompt ends", at=entry, rid=rid)
        for rid, count in entry["prefill"]:
            prefilled[rid] = prefilled.get(rid, 0) + count
            if count < 1 or prefilled[rid] > accepted[rid]:
                raise CheckFailed("I22", f"prompt position {prefilled[rid]}", at=entry, rid=rid)


def _check_widths(run: Run, entry: Entry) -> None:
    limits = run.limits
    if limits.max_batch is not None and len(entry["decode"]) > limits.max_batch:
        raise CheckFailed("I22", "too many rows decode", at=entry)
    counts = [count for _, count in entry["prefill"]]
    if len(counts) > limits.max_batch_prefill:
        raise CheckFailed("I22", "too many prompts", at=entry)
    if len(counts) > 1 and len(counts) * max(counts) > limits.max_batch_prefill_tokens:
        raise CheckFailed("I22", "too many padded tokens", at=entry)


def parked_rests(run: Run) -> None:
    """I23: a parked sequence is in no plan, and is resumed or over within ``stall_s`` + one step.

    It is ended as slow only if its client has read nothing in all that time.
    """
    parked: dict[str, Entry] = {}
    read_s: dict[str, float] = {}
    bound_s = run.limits.stall_s + run.max_step_s + run.limits.poll_s + EPSILON_S
    for entry in run.entries:
        for rid, since in parked.items():
            if entry.time_s > since.time_s + bound_s:
                raise CheckFailed("I23", f"parked since {since.time_s}", at=entry, rid=rid)
        match entry.event:
            case "client_event":
                read_s[entry["rid"]] = entry.time_s
            case "parked":
                parked[entry["rid"]] = entry
            case "terminal" if entry["detail"] == "slow_client":
                rid = entry["rid"]
                since_s = parked.pop(rid).time_s if rid in parked else entry.time_s
                if entry.time_s < since_s + run.limits.stall_s - EPSILON_S:
                    raise CheckFailed("I23", f"parked since {since_s}", at=entry, rid=rid)
                if since_s + EPSILON_S < read_s.get(rid, since_s) < entry.time_s - EPSILON_S:
                    raise CheckFailed("I23", f"it read at {read_s[rid]}", at=entry, rid=rid)
            case "resumed" | "slot_freed" | "terminal":
                parked.pop(entry["rid"], None)
            case "crashed" if entry["child"] in PIPELINE:
                parked.clear()
            case "ended":
                parked.clear()
            case "planned":
                for rid in entry["decode"]:
                    if rid in parked:
                        raise CheckFailed("I23", "planned while parked", at=entry, rid=rid)
            case _:
                pass


class _Rows:
    """Which active sequences must be computed in the next step."""

    def __init__(self, run: Run) -> None:
        self.run = run
        self.slots = Slots()
        self.prompts = {e["rid"]: int(e["prompt_tokens"]) for _, e in run.having("accepted")}
        self.draws: dict[str, int] = {}
        self.left: set[str] = set()
        self.waits: set[str] = set()  # for cache or for another choice: cannot be computed
        self.again: dict[str, int] = {}  # drawn before it was preempted

    def apply(self, entry: Entry) -> None:
        self.slots.apply(entry)
        match entry.event:
            case "starved" | "fork_wait":
                self.waits.add(entry["rid"])
            case "preempted":
                rid = entry["rid"]
                self.waits.add(rid)
                self.again[rid] = entry["tokens"] - self.run.requests[rid].prompt_tokens
                self.prompts[rid] = entry["tokens"]
                self.draws.pop(rid, None)
            case "prefix":
                self.waits.discard(entry["rid"])
                self.prompts[entry["rid"]] -= entry["tokens"]
            case "grew" | "returned":
                self.waits.discard(entry["rid"])
            case "fork_lost":
                self.waits -= {rid for rid in self.waits if self._forked(rid, entry["rid"])}
            case _:
                self._count(entry)

    @staticmethod
    def _forked(rid: str, leader: str) -> bool:
        return rid.partition("#")[0] == leader.partition("#")[0]

    def _count(self, entry: Entry) -> None:
        if entry.event == "planned":
            for rid, count in entry["prefill"]:
                self.prompts[rid] -= count
                if self.prompts[rid] == 0:
                    self.draws[rid] = 1 + self.again.get(rid, 0)
            for rid in entry["decode"]:
                self.draws[rid] = self.draws.get(rid, 0) + 1
        elif entry.event in ("client_closed", "terminal"):
            self.left.add(entry["rid"])

    def runnable(self, now_s: float) -> list[str]:
        found = []
        for rid in self.slots.active:
            facts = self.run.requests.get(rid)
            held_up = rid in self.slots.parked or rid in self.waits
            if rid in self.left or held_up or facts is None:
                continue
            if now_s < facts.deadline_s - EPSILON_S and self.draws.get(rid, 0) < len(facts.tokens):
                found.append(rid)
        return found

    def decoding(self, now_s: float) -> list[str]:
        return [rid for rid in self.runnable(now_s) if rid in self.draws]


def parked_slows_nobody(run: Run) -> None:
    """I24: whoever can decode is in every step, and no time passes between two steps meanwhile."""
    rows = _Rows(run)
    in_flight = False
    idle_since_s = 0.0
    waiting: list[str] = []
    for entry in run.entries:
        if not in_flight and waiting and entry.time_s > idle_since_s + EPSILON_S:
            raise CheckFailed("I24", f"idle since {idle_since_s}", at=entry, rid=waiting[0])
        if entry.event == "planned":
            full = len(entry["decode"]) == run.limits.max_batch
            for rid in rows.decoding(entry.time_s):
                if rid not in entry["decode"] and not full:
                    raise CheckFailed("I24", "left out of a step", at=entry, rid=rid)
            in_flight = True
        elif entry.event in ("stepped", "engine_fault") or (
            entry.event in ("crashed", "restarted") and entry["child"] in PIPELINE
        ):
            in_flight = False
        rows.apply(entry)
        idle_since_s = entry.time_s
        waiting = [] if in_flight else rows.runnable(entry.time_s)
