"""One face for both kinds of prefix indices, and what a lease holds of them."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Literal

from actors.core.cache_stats import CacheStats, PrefixCounters
from actors.core.prefix_index import Block, NewBlock, PrefixIndex
from actors.core.snapshot_index import Snapshot, SnapshotIndex
from actors.limits import PromptCacheLimits
from models.engine import KeptPrefix

Mode = Literal["blocks", "snapshots", "none"]


@dataclass(slots=True)
class CacheMemory:
    """What outlives a restart of the pipeline: lifetime counters, and handles never used twice."""

    blocks: PrefixCounters = field(default_factory=PrefixCounters)
    snapshots: PrefixCounters = field(default_factory=PrefixCounters)
    last_handle: int = 0
    looked_up: str = ""  # the request whose lookup was counted last: a retry counts once

    def new_handle(self) -> int:
        self.last_handle += 1
        return self.last_handle


@dataclass(slots=True)
class Held:
    """What one lease uses; ``handle`` is that of the snapshot which its sequence is to leave."""

    root: bytes | None = None
    prompt: tuple[int, ...] = ()
    blocks: tuple[Block, ...] = ()
    snapshot: Snapshot | None = None
    handle: int | None = None


class PrefixCache:
    """``mode`` is the engine's; "none" and a disabled cache never find or keep anything."""

    def __init__(
        self,
        *,
        limits: PromptCacheLimits,
        mode: Mode,
        bytes_per_token: int,
        state_bytes: int,
        memory: CacheMemory,
        room: Callable[[], int],
    ) -> None:
        self._limits = limits
        self._mode: Mode = mode if limits.enabled else "none"
        self._memory = memory
        self._room = room
        self.index = PrefixIndex(
            limits=limits,
            bytes_per_token=bytes_per_token,
            new_handle=memory.new_handle,
            counters=memory.blocks,
        )
        self.snapshots = SnapshotIndex(
            limits=limits,
            bytes_per_token=bytes_per_token,
            state_bytes=state_bytes,
            new_handle=memory.new_handle,
            counters=memory.snapshots,
        )

    @property
    def _counters(self) -> PrefixCounters:
        return self._memory.snapshots if self._mode == "snapshots" else self._memory.blocks

    def kept_tokens(self) -> int:
        return self.index.kept_tokens + self.snapshots.kept_tokens

    def evictable_tokens(self) -> int:
        return self.index.evictable_tokens + self.snapshots.evictable_tokens

    def evict(self, tokens: int) -> int:
        freed = self.index.evict_tokens(tokens)
        if freed < tokens:
            freed += self.snapshots.evict_tokens(tokens - freed)
        return freed

    def find(
        self, request_id: str, root: bytes | None, prompt: tuple[int, ...], now: float
    ) -> tuple[KeptPrefix | None, Held]:
        """The longest kept prefix of ``prompt``, pinned.  Give it back with :meth:`drop`."""
        if root is None or self._mode == "none":
            return None, Held()
        held = Held(root=root, prompt=prompt)
        prefix = None
        if self._mode == "blocks":
            match = self.index.match(root, prompt, now)
            if match is not None:
                held.blocks = match.blocks
                self.index.pin(match.blocks)
                handles = tuple(block.handle for block in match.blocks)
                prefix = KeptPrefix(handles=handles, tokens=match.tokens)
        else:
            one = self.snapshots.match(root, prompt, now)
            if one is not None:
                held.snapshot = one
                self.snapshots.pin(one)
                prefix = KeptPrefix(handles=(one.handle,), tokens=len(one.tokens))
        if self._memory.looked_up != request_id:
            self._memory.looked_up = request_id
            self._counters.lookups += 1
            self._counters.hits += prefix is not None
        return prefix, held

    def want_snapshot(self, held: Held) -> int | None:
        """The handle under which the sequence should keep all but the last token of its prompt."""
        if held.root is None or self._mode != "snapshots":
            return None
        held.handle = self.snapshots.wanted(held.root, held.prompt[:-1])
        return held.handle

    def drop(self, held: Held) -> None:
        """The lease does not use its prefix any more.  Idempotent."""
        blocks, held.blocks = held.blocks, ()
        self.index.unpin(blocks)
        one, held.snapshot = held.snapshot, None
        if one is not None:
            self.snapshots.unpin(one)

    def donate(self, held: Held, tokens: tuple[int, ...], now: float) -> list[NewBlock]:
        """A sequence ends with ``tokens`` in its cache; returns the blocks to be kept of it."""
        if held.root is None:
            return []
        if self._mode == "blocks":
            return self.index.donate(held.root, tokens, now, self._room)
        if held.handle is not None and len(tokens) >= len(held.prompt) - 1:
            self.snapshots.add(held.handle, held.root, held.prompt[:-1], now, self._room)
        return []

    def take_forgotten(self) -> tuple[int, ...]:
        """Handles that the engine has to free, each of them once."""
        handles = (*self.index.forgotten, *self.snapshots.forgotten)
        self.index.forgotten.clear()
        self.snapshots.forgotten.clear()
        return handles

    def clear(self) -> tuple[int, int]:
        """Forget everything that nobody uses; (bytes, entries) freed."""
        a, b = self.index.clear(), self.snapshots.clear()
        return a[0] + b[0], a[1] + b[1]

    def stats(self) -> CacheStats:
        return cache_stats(self._limits, self._memory, self)


def cache_stats(
    limits: PromptCacheLimits, memory: CacheMemory, cache: PrefixCache | None
) -> CacheStats:
    """``cache`` None: nothing is kept now (no pipeline runs), but the counters stand."""
    blocks, snapshots = memory.blocks, memory.snapshots
    if not limits.enabled:
        blocks = snapshots = PrefixCounters()
    lookups, hits = blocks.lookups + snapshots.lookups, blocks.hits + snapshots.hits
    index = None if cache is None else cache.index
    shots = None if cache is None else cache.snapshots
    return CacheStats(
        enabled=limits.enabled,
        apc_enabled=limits.apc,
        block_size=limits.block_tokens,
        hash=limits.hash_name,
        entries=0 if index is None or shots is None else index.entries + shots.entries,
        bytes=0 if index is None or shots is None else index.kept_bytes + shots.kept_bytes,
        capacity_bytes=limits.capacity_bytes,
        max_entries=limits.max_entries,
        hits=hits,
        lookups=lookups,
        hit_rate=hits / lookups if lookups else 0.0,
        inserts=blocks.inserts + snapshots.inserts,
        evictions_lru=blocks.evictions_lru + snapshots.evictions_lru,
        evictions_ttl=blocks.evictions_ttl + snapshots.evictions_ttl,
        rejections_oversized=blocks.rejections_oversized + snapshots.rejections_oversized,
        total_blocks_stored=0 if index is None else index.stored_blocks,
        unique_block_hashes=0 if index is None else index.blocks,
        apc_active_entries=index.entries if index is not None and limits.apc else 0,
        snapshot_entries=0 if shots is None else shots.entries,
        snapshot_bytes=0 if shots is None else shots.kept_bytes,
        snapshot_capacity_bytes=limits.snapshot_capacity_bytes,
        snapshot_max_entries=limits.snapshot_max_entries,
    )
