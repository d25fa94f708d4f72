"""Ends a reasoning block that has become too long."""

from __future__ import annotations

Ids = tuple[int, ...]


class ThinkingBudget:
    """Told every token of one sequence, it says which one has to come next, if any.

    At most ``budget`` tokens are drawn between the opening and the closing marker; then the closing
    marker is forced, token by token.  A part of it that was drawn already is not repeated.  Every
    block of the sequence has the whole budget.
    """

    __slots__ = ("_budget", "_closed", "_closing", "_inside", "_opened", "_used", "close", "open")

    def __init__(self, *, open_ids: Ids, close_ids: Ids, budget: int, starts_open: bool) -> None:
        assert open_ids, "no opening marker"
        assert close_ids, "no closing marker"
        self.open = open_ids
        self.close = close_ids
        self._budget = budget
        self._opened: Ids = ()  # the part of the opening marker that the tokens end with
        self._closed: Ids = ()  # that of the closing marker
        self._used = 0
        self._inside = starts_open
        self._closing = starts_open and budget == 0

    @property
    def forced(self) -> int | None:
        """The token that has to come next."""
        return self.close[len(self._closed)] if self._closing else None

    def push(self, token_id: int) -> None:
        if not self._inside:
            self._opened = _advance(self.open, self._opened, token_id)
            if self._opened == self.open:
                self._opened = ()
                self._enter()
            return
        self._closed = _advance(self.close, self._closed, token_id)
        if self._closed == self.close:
            self._inside = self._closing = False
            self._closed = ()
            return
        self._used += 1
        self._closing = self._closing or self._used >= self._budget

    def _enter(self) -> None:
        self._inside = True
        self._used = 0
        self._closing = self._budget == 0


def _advance(marker: Ids, matched: Ids, token_id: int) -> Ids:
    """The longest beginning of ``marker`` that ``matched`` + ``token_id`` ends with."""
    tail = (*matched, token_id)
    for start in range(len(tail)):
        if marker[: len(tail) - start] == tail[start:]:
            return tail[start:]
    return ()
