"""Which exact prefixes have a snapshot: for caches that cannot be cut to a range of tokens.

A snapshot serves a prompt only if all its tokens are the beginning of the prompt and at least one
token of the prompt is left.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from actors.core.cache_stats import PrefixCounters
from actors.limits import PromptCacheLimits

Bucket = tuple[bytes, tuple[int, ...]]


@dataclass(slots=True)
class Snapshot:
    handle: int
    bucket: Bucket
    tokens: tuple[int, ...]
    size_bytes: int
    hit_s: float
    pins: int = 0


class SnapshotIndex:
    """``forgotten`` collects handles that the engine has to free; whoever reads it clears it."""

    def __init__(
        self,
        *,
        limits: PromptCacheLimits,
        bytes_per_token: int,
        state_bytes: int,
        new_handle: Callable[[], int],
        counters: PrefixCounters | None = None,
    ) -> None:
        self._limits = limits
        self._bytes_per_token = bytes_per_token
        self._state_bytes = state_bytes
        self._new_handle = new_handle
        self._entries: OrderedDict[int, Snapshot] = OrderedDict()  # least recently hit first
        self._buckets: dict[Bucket, dict[tuple[int, ...], Snapshot]] = {}
        self.counters = counters or PrefixCounters()
        self.forgotten: list[int] = []

    @property
    def entries(self) -> int:
        return len(self._entries)

    @property
    def kept_bytes(self) -> int:
        return sum(one.size_bytes for one in self._entries.values())

    @property
    def kept_tokens(self) -> int:
        return sum(len(one.tokens) for one in self._entries.values())

    @property
    def evictable_tokens(self) -> int:
        return sum(len(one.tokens) for one in self._entries.values() if not one.pins)

    def _bucket(self, root: bytes, tokens: Sequence[int]) -> Bucket:
        """Whatever has the same first tokens; no snapshot is shorter than that."""
        return root, tuple(tokens[: self._limits.min_prefix])

    def match(self, root: bytes, prompt: Sequence[int], now: float) -> Snapshot | None:
        """The longest snapshot that the prompt goes on from."""
        self.expire(now)
        found = self._buckets.get(self._bucket(root, prompt), {})
        whole = tuple(prompt)
        for one in sorted(found.values(), key=lambda one: -len(one.tokens)):
            if len(one.tokens) < len(whole) and whole[: len(one.tokens)] == one.tokens:
                one.hit_s = now
                self._entries.move_to_end(one.handle)
                return one
        return None

    def wanted(self, root: bytes, tokens: tuple[int, ...]) -> int | None:
        """A handle under which a snapshot of ``tokens`` should be kept, if it is worth it."""
        if len(tokens) < self._limits.min_prefix:
            return None
        if self._bytes(tokens) > self._limits.snapshot_capacity_bytes:
            self.counters.rejections_oversized += 1
            return None
        if tokens in self._buckets.get(self._bucket(root, tokens), {}):
            return None
        return self._new_handle()

    def _bytes(self, tokens: Sequence[int]) -> int:
        return len(tokens) * self._bytes_per_token + self._state_bytes

    def add(
        self,
        handle: int,
        root: bytes,
        tokens: tuple[int, ...],
        now: float,
        room: Callable[[], int],
    ) -> None:
        """The engine keeps this snapshot.  If there is no room for it, it is forgotten at once."""
        self.expire(now)
        bucket = self._bucket(root, tokens)
        if tokens in self._buckets.get(bucket, {}) or not self._make_room(tokens, room):
            self.forgotten.append(handle)
            return
        one = Snapshot(handle, bucket, tokens, self._bytes(tokens), now)
        self._entries[handle] = one
        self._buckets.setdefault(bucket, {})[tokens] = one
        self.counters.inserts += 1

    def _make_room(self, tokens: tuple[int, ...], room: Callable[[], int]) -> bool:
        limits = self._limits
        while (
            room() < len(tokens)
            or self.kept_bytes + self._bytes(tokens) > limits.snapshot_capacity_bytes
            or len(self._entries) >= limits.snapshot_max_entries
        ):
            if not self._evict_one():
                return False
        return True

    def pin(self, one: Snapshot) -> None:
        one.pins += 1

    def unpin(self, one: Snapshot) -> None:
        assert one.pins > 0, "unpinned once too often"
        one.pins -= 1

    def evict_tokens(self, tokens: int) -> int:
        """Forget the least recently hit ones until ``tokens`` are free; how many really are."""
        before = self.kept_tokens
        while before - self.kept_tokens < tokens and self._evict_one():
            pass
        return before - self.kept_tokens

    def _evict_one(self) -> bool:
        for one in self._entries.values():
            if not one.pins:
                self.counters.evictions_lru += 1
                self._forget(one)
                return True
        return False

    def expire(self, now: float) -> None:
        """Forget what was not hit for too long."""
        late = [
            one
            for one in self._entries.values()
            if not one.pins and now - one.hit_s >= self._limits.snapshot_ttl_s
        ]
        for one in late:
            self.counters.evictions_ttl += 1
            self._forget(one)

    def clear(self) -> tuple[int, int]:
        """Forget everything that is not pinned; (bytes, entries) freed."""
        gone = [one for one in self._entries.values() if not one.pins]
        for one in gone:
            self._forget(one)
        return sum(one.size_bytes for one in gone), len(gone)

    def _forget(self, one: Snapshot) -> None:
        del self._entries[one.handle]
        del self._buckets[one.bucket][one.tokens]
        if not self._buckets[one.bucket]:
            del self._buckets[one.bucket]
        self.forgotten.append(one.handle)
