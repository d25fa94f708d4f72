"""I13-I16: who goes next."""

from __future__ import annotations

import math
from dataclasses import dataclass, field

from actors.kit.journal import Entry
from actors.limits import LANES
from actors.requests import Priority
from tests.sim.run import EPSILON_S, PIPELINE, CheckFailed, Run, Slots, lane_of


@dataclass(slots=True)
class _Waiting:
    rid: str
    lane: Priority
    order: int  # place in the lane; a requeued request keeps it
    passed: int = 0  # starts of others since it became the head of its lane
    refused: bool = False
    leased: bool = False


@dataclass(slots=True)
class Room:
    """Replays the waiting room from ``queued``, ``picked``, ``requeued`` and ``swept``.

    A pick counts as a start once the next one follows without a ``requeued`` in between.
    ``passed`` counts the starts that passed each lane and is never too low: a newcomer that came
    while a lease was being fetched counts as passed by that start.
    """

    run: Run
    waiting: dict[str, _Waiting] = field(default_factory=dict)
    orders: dict[str, _Waiting] = field(default_factory=dict)
    closed: set[str] = field(default_factory=set)
    passed: dict[Priority, int] = field(default_factory=lambda: dict.fromkeys(LANES, 0))
    in_hand: _Waiting | None = None
    heads: list[_Waiting] = field(default_factory=list)  # of the other lanes, when it was picked

    def apply(self, entry: Entry) -> None:
        match entry.event:
            case "queued":
                known = _Waiting(entry["rid"], lane_of(entry), len(self.orders))
                self.orders[known.rid] = self.waiting[known.rid] = known
            case "requeued":
                known = self.orders[entry["rid"]]
                known.refused = True
                self.waiting[known.rid] = known
                if self.in_hand is known and known.leased:
                    self.commit(sure=False)  # a crash: it may have counted as a start, or not
                elif self.in_hand is known:
                    self.in_hand = None
            case "leased" if self.in_hand is not None:
                self.in_hand.leased = True
            case "picked":
                self.commit()
                self.in_hand = self.orders[entry["rid"]]
                self.in_hand.leased = False
                self.waiting.pop(entry["rid"], None)
                lanes = [lane for lane in LANES if lane != self.in_hand.lane]
                self.heads = [head for lane in lanes for head in self.lane(lane)[:1]]
            case "swept" | "terminal":
                self.waiting.pop(entry["rid"], None)
            case "client_closed":
                self.closed.add(entry["rid"])
            case _:
                pass

    def commit(self, *, sure: bool = True) -> None:
        """The one picked last has started."""
        if self.in_hand is None:
            return
        for lane in LANES:
            if lane != self.in_hand.lane and self.lane(lane):
                self.passed[lane] += 1
            elif sure:
                self.passed[lane] = 0
        for head in self.heads if sure else ():
            head.passed += 1
        self.in_hand = None

    def alive(self, rid: str, now_s: float) -> bool:
        facts = self.run.requests.get(rid)
        deadline_s = math.inf if facts is None else facts.deadline_s
        return rid not in self.closed and now_s < deadline_s - EPSILON_S

    def lane(self, lane: Priority) -> list[_Waiting]:
        found = [w for w in self.waiting.values() if w.lane == lane]
        return sorted(found, key=lambda w: w.order)

    def live(self, lane: Priority, now_s: float) -> list[_Waiting]:
        return [w for w in self.lane(lane) if self.alive(w.rid, now_s)]


def fifo_in_lane(run: Run) -> None:
    """I13: inside a lane live requests are queued in the order sent and picked in that order."""
    room = Room(run)
    sent: dict[str, int] = {}
    newest: dict[Priority, int] = {}
    for index, entry in enumerate(run.entries):
        if entry.event == "client_sent":
            sent[entry["rid"]] = index
        elif entry.event == "queued" and entry["rid"] in sent:
            lane = lane_of(entry)
            if sent[entry["rid"]] < newest.get(lane, -1):
                raise CheckFailed("I13", "overtaken in admission", at=entry, rid=entry["rid"])
            newest[lane] = sent[entry["rid"]]
        elif entry.event == "picked":
            ahead = room.live(lane_of(entry), entry.time_s)
            if ahead and ahead[0].rid != entry["rid"] and room.alive(entry["rid"], entry.time_s):
                raise CheckFailed("I13", f"overtook {ahead[0].rid}", at=entry, rid=entry["rid"])
        room.apply(entry)


def lower_lane_only_by_skip(run: Run) -> None:
    """I14: a lower lane goes before a waiting higher one only through the skip rule."""
    room = Room(run)
    for entry in run.entries:
        if entry.event == "picked":
            room.commit()
            lane = lane_of(entry)
            higher = [w.rid for up in LANES if up < lane for w in room.live(up, entry.time_s)]
            if higher and not entry["by_skip"]:
                raise CheckFailed("I14", f"{higher[0]} was waiting", at=entry, rid=entry["rid"])
            limit = run.limits.priority_max_skips
            if entry["by_skip"] and (limit == 0 or room.passed[lane] < limit):
                detail = f"skip rule after {room.passed[lane]} of {limit}"
                raise CheckFailed("I14", detail, at=entry, rid=entry["rid"])
        room.apply(entry)


def head_waits_bounded(run: Run) -> None:
    """I15: a lane's head sees at most ``max_skips + lanes - 1`` starts of others.

    A head that the cache refused waits for tokens, not for its turn: I16 is about that.  And
    nobody waits for nothing: with a slot on offer, whoever is next is tried at once.
    """
    _slots_are_taken_up(run)
    limit = run.limits.priority_max_skips
    if limit == 0:
        return
    bound = limit + len(LANES) - 1
    room = Room(run)
    for entry in run.entries:
        room.apply(entry)
        for head in room.heads if entry.event == "picked" else ():
            if head.passed > bound and not head.refused:
                raise CheckFailed("I15", f"passed {head.passed} times", at=entry, rid=head.rid)


def _slots_are_taken_up(run: Run) -> None:
    """No time passes while a slot is on offer, someone waits, and nobody was refused since."""
    room = Room(run)
    slots = Slots()
    refused = False
    broken = False  # a crash or the end is under way
    free = 0  # slots on offer that no lease has been fetched for
    started: set[str] = set()
    before_s = 0.0
    for entry in run.entries:
        if entry.time_s > before_s + EPSILON_S and free > 0 and not (refused or broken):
            idle = [w.rid for lane in LANES for w in room.live(lane, before_s)]
            if idle:
                raise CheckFailed("I15", f"waits since {before_s}", at=entry, rid=idle[0])
        match entry.event:
            case "lease_refused":
                refused = True
            case "queued" | "granted":
                refused = False
            case "started":
                started.add(entry["rid"])
            case "fault_armed" if not entry["detail"].startswith(("admission", "store")):
                broken = True
            case "phase" | "escalated":
                broken = broken or entry.fields != ("ready",)
            case "restarted":
                broken = broken and entry["child"] not in PIPELINE
            case _:
                pass
        room.apply(entry)
        slots.apply(entry)
        starting = [rid for rid, _ in slots.leases.values() if rid not in started]
        free = len(slots.offered) - len(starting)
        before_s = entry.time_s


def refused_head_keeps_its_turn(run: Run) -> None:
    """I16: a head that the cache refused is picked again before anyone behind it in its lane."""
    room = Room(run)
    heads: dict[Priority, str] = {}
    refused = ""
    for entry in run.entries:
        if entry.event == "lease_refused":
            refused = entry["rid"]
        elif entry.event == "requeued" and entry["rid"] == refused:
            heads[lane_of(entry)] = entry["rid"]
        elif entry.event == "crashed" and entry["child"] in PIPELINE:
            heads.clear()  # those who were about to start come before them again
        elif entry.event in ("swept", "terminal", "client_closed"):
            heads = {lane: rid for lane, rid in heads.items() if rid != entry["rid"]}
        elif entry.event == "picked":
            head = heads.get(lane_of(entry))
            if head == entry["rid"]:
                del heads[lane_of(entry)]
            elif head is not None and room.alive(head, entry.time_s):
                raise CheckFailed("I16", f"overtook refused {head}", at=entry, rid=entry["rid"])
        room.apply(entry)
