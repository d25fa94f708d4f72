"""One simulated run as the checkers see it: the journal, and what the world knows beforehand."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property

from actors.kit.journal import Entry
from actors.limits import Limits
from actors.requests import Priority

#: Children whose crash takes the whole pipeline (queue, decode loop, cache manager) with it.
PIPELINE = frozenset({"pipeline"})
EPSILON_S = 1e-6


class CheckFailed(AssertionError):
    """An invariant does not hold; the message names it, the virtual time and the request."""

    def __init__(
        self, invariant: str, detail: str, *, at: Entry | None = None, rid: str = ""
    ) -> None:
        where = f" t={at.time_s:.6f} {at.actor} {at.event}{at.fields!r}" if at else ""
        who = f" [{rid}]" if rid else ""
        super().__init__(f"{invariant}{who}: {detail}{where}")
        self.invariant = invariant


@dataclass(frozen=True, slots=True, kw_only=True)
class RequestFacts:
    """What must come out of one request if nothing ends it early, computed without the actors."""

    rid: str
    lane: Priority = Priority.NORMAL
    prompt_tokens: int
    prompt: tuple[int, ...] = ()
    max_tokens: int
    tokens: tuple[int, ...]  # what is delivered, in order; an end token is not
    text: str
    reason: str  # value of a FinishReason
    deadline_s: float = math.inf
    patient: bool = True  # reads to the end and never leaves
    valid: bool = True  # False: admission has to refuse it


@dataclass(frozen=True, kw_only=True)
class Run:
    """``max_step_s``: the longest step the engine can take; ``faults``: how many were planned."""

    entries: Sequence[Entry]
    limits: Limits
    requests: Mapping[str, RequestFacts] = field(default_factory=dict)
    max_step_s: float = 1.0
    faults: int = 0

    def having(self, *events: str) -> Iterator[tuple[int, Entry]]:
        """Entries of these kinds with their place in the journal."""
        for index, entry in enumerate(self.entries):
            if entry.event in events:
                yield index, entry

    @cached_property
    def by_rid(self) -> dict[str, list[tuple[int, Entry]]]:
        """The entries of each request, in the order in which requests first appear."""
        found: dict[str, list[tuple[int, Entry]]] = {}
        for index, entry in enumerate(self.entries):
            for rid in rids_of(entry):
                found.setdefault(rid, []).append((index, entry))
        return found

    def first(self, rid: str, *events: str) -> tuple[int, Entry] | None:
        return next((pair for pair in self.by_rid.get(rid, []) if pair[1].event in events), None)

    def index_of(self, rid: str, *events: str) -> float:
        """Place of the first such entry of ``rid``; infinity when there is none."""
        found = self.first(rid, *events)
        return math.inf if found is None else found[0]

    @cached_property
    def ended(self) -> bool:
        return any(True for _ in self.having("ended"))

    @cached_property
    def outages(self) -> list[tuple[float, float]]:
        """Times (from, to) in which the pipeline waited for a restart; to may be infinity."""
        spans: list[tuple[float, float]] = []
        for _, entry in self.having("crashed", "restarted"):
            if entry["child"] not in PIPELINE:
                continue
            if entry.event == "crashed" and (not spans or spans[-1][1] < math.inf):
                spans.append((entry.time_s, math.inf))
            elif entry.event == "restarted" and spans:
                spans[-1] = (spans[-1][0], entry.time_s)
        return spans

    def downtime(self, since_s: float, until_s: float) -> float:
        """Seconds of outage between two times."""
        return sum(
            max(0.0, min(until_s, stop) - max(since_s, start)) for start, stop in self.outages
        )

    @cached_property
    def drain_s(self) -> float:
        """When draining began; infinity if it never did."""
        times = (e.time_s for _, e in self.having("phase") if e["phase"] == "draining")
        return next(times, math.inf)


def rids_of(entry: Entry) -> tuple[str, ...]:
    """The requests that an entry is about."""
    if entry.event == "planned":
        return (*entry["decode"], *(rid for rid, _ in entry["prefill"]))
    try:
        return (entry["rid"],)
    except ValueError:
        return ()


def lane_of(entry: Entry) -> Priority:
    value = entry["lane"]
    return Priority(value) if isinstance(value, int) else Priority[str(value).upper()]


class Slots:
    """Replays grants, starts, slots and leases; starts afresh when the pipeline does."""

    def __init__(self) -> None:
        self.offered: set[int] = set()  # granted and not yet started on
        self.active: dict[str, int] = {}  # rid -> slot
        self.leases: dict[int, tuple[str, int]] = {}  # lease -> (rid, tokens)
        self.parked: set[str] = set()
        self.withheld: set[int] = set()  # free, but not offered
        self.incarnation = 0

    def apply(self, entry: Entry) -> None:
        match entry.event:
            case "granted":
                self.offered.add(entry["slot"])
                self.withheld.discard(entry["slot"])
            case "withheld":
                self.withheld.add(entry["slot"])
            case "started":
                self.offered.discard(entry["slot"])
                self.active[entry["rid"]] = entry["slot"]
            case "slot_freed":
                self.active.pop(entry["rid"], None)
                self.parked.discard(entry["rid"])
            case "leased" | "lease_changed":
                self.leases[entry["lease"]] = (entry["rid"], entry["tokens"])
            case "lease_released":
                self.leases.pop(entry["lease"], None)
            case "parked":
                self.parked.add(entry["rid"])
            case "resumed":
                self.parked.discard(entry["rid"])
            case "crashed" | "restarted" if entry["child"] in PIPELINE:
                self.__init__()  # type: ignore[misc]
            case _:
                pass
