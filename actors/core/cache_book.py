"""The token budget of the KV cache: running sequences first, kept prefixes in what is left.

A lease starts with the prompt and one quantum and grows as its sequence does, since most clients
never say how long an answer may become.  A sequence that was opened from a kept prefix is charged
in full: it copies the prefix when it first writes behind it.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass


@dataclass(slots=True)
class Lease:
    """``tokens`` are held now, ``most`` is what the sequence may ever need."""

    tokens: int
    most: int


class CacheBook:
    """Leased, kept and free tokens add up to the budget at all times.

    ``kept`` tells how many tokens are kept, ``evictable`` how many of them nobody uses, and
    ``evict`` forgets at least so many of those (or all).
    """

    def __init__(
        self,
        *,
        budget_tokens: int,
        quantum_tokens: int,
        kept: Callable[[], int] = lambda: 0,
        evictable: Callable[[], int] = lambda: 0,
        evict: Callable[[int], int] = lambda _: 0,
    ) -> None:
        self.budget_tokens = budget_tokens
        self._quantum = quantum_tokens
        self._kept = kept
        self._evictable = evictable
        self._evict = evict
        self._leases: dict[int, Lease] = {}
        self._leased = 0
        self._next_id = 1
        self._starving: dict[int, None] = {}  # leases that were refused to grow, oldest first

    @property
    def leases(self) -> int:
        return len(self._leases)

    @property
    def leased_tokens(self) -> int:
        return self._leased

    @property
    def free_tokens(self) -> int:
        return self.budget_tokens - self._leased - self._kept()

    @property
    def starving(self) -> bool:
        """A running sequence was refused to grow and has not grown since."""
        return bool(self._starving)

    def first_tokens(self, prompt: int, most: int) -> int:
        """What a lease for so long a prompt starts with."""
        return min(most, prompt + self._quantum)

    def could_take(self, tokens: int) -> bool:
        return tokens <= self.free_tokens + self._evictable()

    def reserve(self, prompt: int, most: int) -> int | None:
        """The id of a new lease, or None if it does not fit, or others have to grow first."""
        assert 0 < prompt <= most, (prompt, most)
        tokens = self.first_tokens(prompt, most)
        if self._starving or not self._take(tokens):
            return None
        lease_id = self._next_id
        self._next_id += 1
        self._leases[lease_id] = Lease(tokens, most)
        self._leased += tokens
        return lease_id

    def tokens_of(self, lease_id: int) -> int:
        return self._leases[lease_id].tokens

    def grow(self, lease_id: int, tokens: int) -> int | None:
        """Let a lease cover at least ``tokens``; what it covers then, or None if that is too much.

        Whoever was refused before others keeps the right to what becomes free.
        """
        lease = self._leases[lease_id]
        assert tokens <= lease.most, (tokens, lease)
        if tokens <= lease.tokens:
            self._starving.pop(lease_id, None)
            return lease.tokens
        quanta = -(-(tokens - lease.tokens) // self._quantum)
        wanted = min(lease.most, lease.tokens + quanta * self._quantum)
        for target in (wanted, tokens):
            if self._take(target - lease.tokens):
                self._leased += target - lease.tokens
                lease.tokens = target
                self._starving.pop(lease_id, None)
                return target
        self._starving[lease_id] = None
        return None

    def shrink(self, lease_id: int) -> int:
        """The sequence holds nothing any more, but will be back; returns the tokens given back."""
        lease = self._leases[lease_id]
        tokens, lease.tokens = lease.tokens, 0
        self._leased -= tokens
        self._starving.pop(lease_id, None)
        return tokens

    def release(self, lease_id: int) -> int:
        """Give a lease back; returns its tokens.  An unknown id is a bug: KeyError."""
        lease = self._leases.pop(lease_id)
        self._leased -= lease.tokens
        self._starving.pop(lease_id, None)
        return lease.tokens

    def _take(self, tokens: int) -> bool:
        missing = tokens - self.free_tokens
        if missing <= 0:
            return True
        if missing > self._evictable():
            return False
        self._evict(missing)
        return self.free_tokens >= tokens
