"""The only object the HTTP layer gets: send ends, a status snapshot, the phase, the seams."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

import trio

from actors.core.cache_stats import CacheStats
from actors.kit.seams import Seams
from actors.limits import Limits
from actors.messages import CacheCleared, StoreMessage, Submit
from actors.phase import Phase, PhaseCell
from actors.requests import Priority


@dataclass(frozen=True, slots=True, kw_only=True)
class SlotStatus:
    slot: int
    request_id: str | None  # None: idle
    state: str  # "idle" | "prefill" | "decode"


@dataclass(frozen=True, slots=True, kw_only=True)
class RuntimeStatus:
    """A consistent snapshot, taken without awaiting.

    ``engine_alive`` is False while no step can run (dead, or its pipeline is being restarted).
    """

    phase: Phase
    engine_alive: bool
    slots: tuple[SlotStatus, ...]
    queue_depth: int  # accepted and waiting for a slot
    leases: int
    leased_tokens: int
    sequences_started: int
    sequences_completed: int
    sequences_cancelled: int
    prefill_tokens: int  # really computed
    decode_tokens: int
    decode_steps: int
    prefill_chunks: int
    requests_refused: int
    restarts: Mapping[str, int]  # supervised child -> restarts so far
    store_entries: int = 0
    store_bytes: int = 0
    step_cost: Mapping[str, float] = field(default_factory=dict)  # measured seconds, for /props

    @property
    def active(self) -> int:
        return sum(1 for slot in self.slots if slot.request_id is not None)


@dataclass(frozen=True, slots=True, kw_only=True)
class ServedModel:
    """What the routes show of the loaded model."""

    name: str
    context_length: int  # per slot
    vocab_size: int
    has_chat_template: bool
    supports_tools: bool
    created_s: int  # wall-clock seconds at load
    notes: Mapping[str, Any] = field(default_factory=dict)


class Places:
    """Permits to be inside the server.  Taken before any work is done for a request."""

    def __init__(self, count: int) -> None:
        self._free = count
        self._count = count

    @property
    def free(self) -> int:
        return self._free

    @property
    def count(self) -> int:
        return self._count

    def resize(self, count: int) -> None:
        """Change the number of permits; only while none is taken (before the server is ready)."""
        assert self._free == self._count, "places are in use"
        self._free = self._count = count

    def take(self) -> Callable[[], None] | None:
        """A release function that works once, or None when the server is full."""
        taken = self.take_many(1)
        return None if taken is None else taken[0]

    def take_many(self, count: int) -> list[Callable[[], None]] | None:
        """``count`` places, each with a release function of its own; all of them or none."""
        if self._free < count:
            return None
        self._free -= count
        return [self._releaser() for _ in range(count)]

    def _releaser(self) -> Callable[[], None]:
        held = True

        def release() -> None:
            nonlocal held
            if held:
                held = False
                self._free += 1

        return release


async def nothing_cleared() -> CacheCleared:
    await trio.lowlevel.checkpoint()
    return CacheCleared(freed_bytes=0, freed_entries=0)


@dataclass(frozen=True, slots=True, kw_only=True)
class Ports:
    phase: PhaseCell
    places: Places
    submit: Mapping[Priority, trio.MemorySendChannel[Submit]]
    store: trio.MemorySendChannel[StoreMessage]
    status: Callable[[], RuntimeStatus]
    model: Callable[[], ServedModel | None]  # None while loading
    note_refusal: Callable[[str], None]  # counts refusals made on the caller's side, by code value
    retry_after_s: Callable[[], float]  # estimate from the measured service rate, at least 1.0
    seams: Seams
    limits: Limits
    cache_stats: Callable[[], CacheStats | None] = lambda: None  # None while loading
    clear_cache: Callable[[], Awaitable[CacheCleared]] = nothing_cleared
    loop_lag: Callable[[], Mapping[str, float]] = dict  # milliseconds; empty when not measured
