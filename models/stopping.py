"""Stop strings over a stream of text pieces: exact across the borders of the pieces."""

from __future__ import annotations


def _failure_table(pattern: str) -> tuple[int, ...]:
    """Knuth-Morris-Pratt: for each prefix, the length of its longest proper border."""
    table = [0] * len(pattern)
    length = 0
    for index in range(1, len(pattern)):
        while length and pattern[index] != pattern[length]:
            length = table[length - 1]
        if pattern[index] == pattern[length]:
            length += 1
        table[index] = length
    return tuple(table)


class StopMatcher:
    """Cuts the text before the first stop string that is completed; one object per sequence.

    The match that ends first wins, so a generation ends with the very character that completes a
    stop string.  Of several that end with the same character the longest wins (the one that starts
    first); equal strings count as the earlier one in the list.

    Text is held back only while its tail is the beginning of a stop string.  The cost is linear in
    the text for any stop strings, and a piece without the first character of any of them costs one
    set operation.
    """

    __slots__ = ("_firsts", "_held", "_matched", "_states", "_stops", "_tables")

    def __init__(self, stops: tuple[str, ...]) -> None:
        if not all(stops):
            raise ValueError("a stop string must not be empty")
        self._stops = stops
        self._tables = tuple(_failure_table(stop) for stop in stops)
        self._firsts = frozenset(stop[0] for stop in stops)
        self._states = [0] * len(stops)  # how much of each stop string the text ends with
        self._held = ""  # as long as the largest state
        self._matched: str | None = None

    @property
    def matched(self) -> str | None:
        """The stop string that ended the text."""
        return self._matched

    def push(self, text: str) -> tuple[str, str | None]:
        """Text that may be sent on, and the stop string if one was completed.

        Once a stop string has been completed, everything that follows is dropped.
        """
        if self._matched is not None:
            return "", self._matched
        if not self._held and self._firsts.isdisjoint(text):
            return text, None
        start = len(self._held)
        buffer = self._held + text
        for position in range(start, len(buffer)):
            stop = self._advance(buffer[position])
            if stop is not None:
                self._matched = stop
                self._held = ""
                return buffer[: position + 1 - len(stop)], stop
        keep = len(buffer) - max(self._states)
        self._held = buffer[keep:]
        return buffer[:keep], None

    def flush(self) -> str:
        """The end of the text: what was held back, since nothing can complete it any more."""
        held, self._held = self._held, ""
        self._states = [0] * len(self._stops)
        return held

    def _advance(self, char: str) -> str | None:
        """Move every automaton by one character; the longest stop string completed by it."""
        best: str | None = None
        for index, stop in enumerate(self._stops):
            table = self._tables[index]
            state = self._states[index]
            while state and stop[state] != char:
                state = table[state - 1]
            if stop[state] == char:
                state += 1
            if state == len(stop):
                if best is None or len(stop) > len(best):
                    best = stop
                state = table[state - 1]
            self._states[index] = state
        return best
