"""The token budget of the KV cache: who holds how much of it.

A lease covers a sequence's prompt and everything it may generate, so a running sequence never has
to wait for room.
"""

from __future__ import annotations


class CacheBook:
    """Leases by id.  ``leased_tokens`` + ``free_tokens`` == ``budget_tokens`` at all times."""

    def __init__(self, *, budget_tokens: int) -> None:
        self.budget_tokens = budget_tokens
        self._leases: dict[int, int] = {}
        self._leased = 0
        self._next_id = 1

    @property
    def leases(self) -> int:
        return len(self._leases)

    @property
    def leased_tokens(self) -> int:
        return self._leased

    @property
    def free_tokens(self) -> int:
        return self.budget_tokens - self._leased

    def reserve(self, tokens: int) -> int | None:
        """The id of a new lease, or None if ``tokens`` do not fit now."""
        assert tokens > 0, tokens
        if tokens > self.free_tokens:
            return None
        lease_id = self._next_id
        self._next_id += 1
        self._leases[lease_id] = tokens
        self._leased += tokens
        return lease_id

    def release(self, lease_id: int) -> int:
        """Give a lease back; returns its tokens.  An unknown id is a bug: KeyError."""
        tokens = self._leases.pop(lease_id)
        self._leased -= tokens
        return tokens
