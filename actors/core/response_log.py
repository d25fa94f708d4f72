"""Stored responses: a time to live, bounds on entries and bytes, least recently used first out."""

from __future__ import annotations

import math
from collections import OrderedDict
from dataclasses import dataclass

#: What one entry costs beside its body: keys, times and the two indexes.
ENTRY_OVERHEAD_BYTES = 512

Key = tuple[str, str]  # owner, response id: owners cannot see or replace each other's entries


@dataclass(frozen=True, slots=True, kw_only=True)
class _Entry:
    body: bytes
    size_bytes: int
    expires_s: float


class ResponseLog:
    """Pure: every call is told the time ``now`` in seconds, which never goes back."""

    def __init__(self, *, max_entries: int, max_bytes: int, ttl_s: float) -> None:
        self._max_entries = max_entries
        self._max_bytes = max_bytes
        self._ttl_s = ttl_s
        self._used: OrderedDict[Key, _Entry] = OrderedDict()  # least recently used first
        self._born: OrderedDict[Key, float] = OrderedDict()  # oldest first; all live equally long
        self._bytes = 0

    def __len__(self) -> int:
        return len(self._used)

    @property
    def size_bytes(self) -> int:
        return self._bytes

    def next_expiry_s(self) -> float:
        """When the oldest entry expires; infinity if there is none."""
        return next(iter(self._born.values()), math.inf)

    def put(self, *, response_id: str, owner: str, body: bytes, now: float) -> bool:
        """Store or replace, evicting what was used least recently.

        False if it could never fit; an older body under the same key is removed all the same.
        """
        self.expire(now)
        key = (owner, response_id)
        self._remove(key)
        size = len(body) + ENTRY_OVERHEAD_BYTES
        if size > self._max_bytes or self._max_entries < 1:
            return False
        while len(self._used) >= self._max_entries or self._bytes + size > self._max_bytes:
            self._remove(next(iter(self._used)))
        expires_s = now + self._ttl_s
        self._used[key] = _Entry(body=body, size_bytes=size, expires_s=expires_s)
        self._born[key] = expires_s
        self._bytes += size
        return True

    def get(self, *, response_id: str, owner: str, now: float) -> bytes | None:
        """The body, now the most recently used; None if unknown, expired or another owner's."""
        self.expire(now)
        key = (owner, response_id)
        entry = self._used.get(key)
        if entry is None:
            return None
        assert entry.expires_s > now
        self._used.move_to_end(key)
        return entry.body

    def delete(self, *, response_id: str, owner: str, now: float) -> bool:
        """Whether it was there."""
        self.expire(now)
        return self._remove((owner, response_id))

    def expire(self, now: float) -> int:
        """Remove everything whose time is over; returns how many."""
        count = 0
        while self.next_expiry_s() <= now:
            self._remove(next(iter(self._born)))
            count += 1
        return count

    def _remove(self, key: Key) -> bool:
        entry = self._used.pop(key, None)
        if entry is None:
            return False
        del self._born[key]
        self._bytes -= entry.size_bytes
        return True
