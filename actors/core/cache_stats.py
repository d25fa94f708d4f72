"""Numbers of the prompt cache, for people and monitoring."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import Any


@dataclass(slots=True)
class PrefixCounters:
    """Lifetime counters of one kind of prefixes; they outlive restarts of the pipeline."""

    lookups: int = 0
    hits: int = 0
    inserts: int = 0
    evictions_lru: int = 0
    evictions_ttl: int = 0
    rejections_oversized: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class CacheStats:
    """The body of GET /v1/cache/stats; the names are the contract's."""

    enabled: bool
    apc_enabled: bool
    block_size: int
    hash: str
    entries: int = 0
    bytes: int = 0
    capacity_bytes: int
    max_entries: int
    hits: int = 0
    lookups: int = 0
    hit_rate: float = 0.0
    inserts: int = 0
    evictions_lru: int = 0
    evictions_ttl: int = 0
    rejections_oversized: int = 0
    total_blocks_stored: int = 0
    unique_block_hashes: int = 0
    apc_active_entries: int = 0
    snapshot_entries: int = 0
    snapshot_bytes: int = 0
    snapshot_capacity_bytes: int = 0
    snapshot_max_entries: int = 0
    disk_blocks: int = 0
    disk_bytes: int = 0
    disk_hits: int = 0
    disk_writes: int = 0
    disk_dropped: int = 0

    def as_dict(self) -> dict[str, Any]:
        return asdict(self)
