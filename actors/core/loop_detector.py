"""Finds out when a generation has begun to repeat itself."""

from __future__ import annotations

from collections import deque

from actors.requests import LoopRule


class LoopDetector:
    """A block of p tokens that came c times in a row means that the last p * (c - 1) tokens are
    each equal to the one p places before it.  So one counter per p, of how long that has been so,
    decides; the cost is O(``max_size``) per token, and only ``max_size`` tokens are kept.
    """

    __slots__ = ("_latest", "_needed", "_runs")

    def __init__(self, rule: LoopRule) -> None:
        sizes = range(max(1, rule.min_size), rule.max_size + 1) if rule.count > 1 else range(0)
        self._runs = dict.fromkeys(sizes, 0)
        self._needed = rule.count - 1
        self._latest: deque[int] = deque(maxlen=max(1, rule.max_size))

    def push(self, token_id: int) -> bool:
        """True once the tokens so far end with enough equal blocks."""
        found = False
        latest = self._latest
        for size, run in self._runs.items():
            if size > len(latest):
                break  # sizes grow
            if latest[-size] == token_id:
                self._runs[size] = run + 1
                found = found or run + 1 >= size * self._needed
            else:
                self._runs[size] = 0
        latest.append(token_id)
        return found
