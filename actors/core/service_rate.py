"""How soon a place is likely to be free, from how long requests have been taking."""

from __future__ import annotations

SMOOTHING = 0.2
SHORTEST_S = 1.0
LONGEST_S = 120.0


class ServiceRate:
    """Moving average of the seconds that one request occupies a slot."""

    def __init__(self, *, slots: int) -> None:
        self._slots = slots
        self._mean_s: float | None = None

    def note(self, seconds: float) -> None:
        """A request left its slot after ``seconds``."""
        if self._mean_s is None:
            self._mean_s = seconds
        else:
            self._mean_s += SMOOTHING * (seconds - self._mean_s)

    def retry_after_s(self) -> float:
        """With all slots busy, the next completion is about this far away; at least 1.0."""
        if self._mean_s is None:
            return SHORTEST_S
        return min(max(self._mean_s / self._slots, SHORTEST_S), LONGEST_S)
