"""What happened, in order.  Actors record facts; simulations and ``tools/trace.py`` read them.

The vocabulary is closed (``EVENTS``): a checker can rely on it, and a typo fails at once.
Fields are ints, strings, or tuples of them, so a journal compares equal across processes.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any, Protocol

#: event -> its fields.  ``rid`` is a request id, ``seq`` the engine's sequence id.
EVENTS: dict[str, tuple[str, ...]] = {
    # admission
    "submitted": ("rid", "lane"),  # Admission took it in hand
    "accepted": ("rid", "prompt_tokens"),
    "refused": ("rid", "code"),  # terminal before the waiting room (places, validation, drain)
    # waiting room
    "queued": ("rid", "lane", "total_tokens"),  # entered the waiting room
    "picked": ("rid", "lane", "by_skip"),  # left it for a reservation
    "requeued": ("rid", "lane"),  # the cache refused, or the pipeline restarted: back to the front
    "swept": ("rid", "why"),  # left the room: "cancelled" or "deadline"
    # cache
    "leased": ("rid", "lease", "tokens", "leased_tokens"),  # last field: sum over all leases
    "lease_refused": ("rid", "tokens", "free_tokens"),
    "grow_refused": ("rid", "lease"),
    "lease_changed": ("rid", "lease", "tokens", "leased_tokens"),  # it has grown or shrunk
    "lease_released": ("rid", "lease", "leased_tokens"),
    "prefix_hit": ("rid", "handles", "tokens"),  # the lease opens from these
    "kept": ("rid", "handles"),  # the released sequence leaves these to the engine
    "forgotten": ("handles",),  # the engine has to free these
    "cleared": ("entries",),
    # decode loop
    "granted": ("slot",),  # a free slot was offered to the queue
    "started": ("rid", "seq", "slot", "lease"),
    "planned": ("step", "decode", "prefill", "tokens"),  # rids; (rid, n) pairs; sum of tokens
    "stepped": ("step",),  # the step ended and its result is here
    "token": ("rid", "position", "token_id"),  # sent to the requester
    "prefix": ("rid", "tokens"),  # so much of its prompt is taken over from what was kept
    "fork_wait": ("rid",),  # another choice of its request evaluates their prompt
    "fork_lost": ("rid",),  # others waited for this one in vain: the next of them goes on
    "starved": ("rid",),  # it cannot go on before its lease grows
    "grew": ("rid", "tokens"),  # the lease covers so many tokens now
    "preempted": ("rid", "tokens", "held"),  # to be computed anew; taken from the engine
    "returned": ("rid",),  # a preempted one has a lease again
    "withheld": ("slot",),  # a free slot is not offered: somebody waits for cache
    "parked": ("rid",),
    "resumed": ("rid",),
    "cancel_seen": ("rid", "where"),  # "admission" | "queued" | "prefill" | "decode"
    "slot_freed": ("slot", "rid"),
    "terminal": ("rid", "kind", "detail"),  # "finished"/"failed", reason or code
    "engine_fault": ("step",),
    # supervision and life
    "crashed": ("child",),
    "restarted": ("child", "count"),
    "escalated": ("child",),
    "phase": ("phase",),
    "ended": (),  # the root nursery is closed
    # written by the simulated world, never by actors
    "client_sent": ("rid", "lane"),
    "client_event": ("rid", "kind", "text"),
    "client_closed": ("rid",),  # the receive end was closed before a terminal event
    "fault_armed": ("kind", "detail"),
    "engine_kept": ("handle", "tokens"),  # what the engine keeps under a handle
    "engine_forgot": ("handle",),
    "engine_opened": ("seq", "handles", "tokens"),  # a sequence began with these tokens
    "probe": ("name", "value"),
}


@dataclass(frozen=True, slots=True)
class Entry:
    time_s: float
    actor: str
    event: str
    fields: tuple[Any, ...]

    def __getitem__(self, name: str) -> Any:
        return self.fields[EVENTS[self.event].index(name)]


class Journal(Protocol):
    def record(self, actor: str, event: str, *fields: Any) -> None:
        """``fields`` in the order of ``EVENTS[event]``."""
        ...

    @property
    def enabled(self) -> bool:
        """False lets hot paths skip the building of fields."""
        ...


class NullJournal:
    """Keeps nothing."""

    enabled = False

    def record(self, actor: str, event: str, *fields: Any) -> None:
        del actor, event, fields


class RingJournal:
    """Keeps the last ``capacity`` entries; ``clock`` is ``trio.current_time`` in practice."""

    enabled = True

    def __init__(self, clock: Callable[[], float], capacity: int = 1_000_000) -> None:
        self._clock = clock
        self._entries: deque[Entry] = deque(maxlen=capacity)

    def record(self, actor: str, event: str, *fields: Any) -> None:
        assert len(fields) == len(EVENTS[event]), (event, fields)
        self._entries.append(Entry(self._clock(), actor, event, fields))

    def __iter__(self) -> Iterator[Entry]:
        return iter(self._entries)

    def __len__(self) -> int:
        return len(self._entries)
