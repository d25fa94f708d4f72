"""Who is next: one FIFO per lane, highest lane first, and a skip rule so that no lane starves.

Every start adds one to the skip count of each other lane in which someone waits.  Once a lane's
count has reached ``max_skips`` that lane goes next (the largest count first, then the higher lane),
so the head of a lane sees at most ``max_skips + lanes - 1`` starts of other lanes.  ``max_skips`` 0
switches the rule off: strict lanes.

A pick is held *in hand* until it is committed (it started) or put back to the front of its lane.
Only committed picks count as starts, so a request that the cache refuses loses nothing by it.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Generic, TypeVar

T = TypeVar("T")


@dataclass(frozen=True, slots=True, kw_only=True)
class Picked(Generic[T]):
    item: T
    lane: int
    by_skip: bool  # the skip rule chose it although a higher lane waits


class WaitingRoom(Generic[T]):
    """``lanes`` are numbered from 0, the highest.  ``bound`` is for all lanes together."""

    def __init__(self, *, lanes: int, bound: int, max_skips: int) -> None:
        self._lanes: tuple[deque[T], ...] = tuple(deque() for _ in range(lanes))
        self._skips = [0] * lanes
        self._bound = bound
        self._max_skips = max_skips
        self._in_hand: Picked[T] | None = None

    def __len__(self) -> int:
        """Everyone inside, with the one in hand."""
        return sum(map(len, self._lanes)) + (self._in_hand is not None)

    @property
    def in_hand(self) -> Picked[T] | None:
        return self._in_hand

    def depths(self) -> tuple[int, ...]:
        return tuple(map(len, self._lanes))

    def skips(self) -> tuple[int, ...]:
        return tuple(self._skips)

    def put(self, lane: int, item: T) -> None:
        """A newcomer joins the end of its lane.  A full room is a bug: everyone holds a place."""
        assert len(self) < self._bound, "the waiting room is full"
        self._lanes[lane].append(item)

    def put_front(self, lane: int, items: Sequence[T]) -> None:
        """``items`` were taken out in this order, but did not run: they go first again."""
        self._lanes[lane].extendleft(reversed(items))
        assert len(self) <= self._bound, "the waiting room is full"

    def pick(self) -> Picked[T] | None:
        """Take the next one in hand; None if nobody waits."""
        assert self._in_hand is None, "two picks at once"
        waiting = [lane for lane, queue in enumerate(self._lanes) if queue]
        if not waiting:
            return None
        lane = self._due(waiting)
        self._in_hand = Picked(
            item=self._lanes[lane].popleft(), lane=lane, by_skip=lane != waiting[0]
        )
        return self._in_hand

    def _due(self, waiting: list[int]) -> int:
        overdue = [lane for lane in waiting if self._skips[lane] >= self._max_skips > 0]
        if not overdue:
            return waiting[0]
        return min(overdue, key=lambda lane: (-self._skips[lane], lane))

    def commit(self) -> T:
        """The one in hand started.  Returns it."""
        picked = self._in_hand
        assert picked is not None, "nothing is in hand"
        self._in_hand = None
        for lane, queue in enumerate(self._lanes):
            if lane == picked.lane or not queue:
                self._skips[lane] = 0
            else:
                self._skips[lane] += 1
        return picked.item

    def put_back(self) -> T:
        """The one in hand could not start: it goes back to the front of its lane."""
        picked = self._in_hand
        assert picked is not None, "nothing is in hand"
        self._in_hand = None
        self._lanes[picked.lane].appendleft(picked.item)
        return picked.item

    def sweep(self, why_leave: Callable[[T], str | None]) -> list[tuple[T, str]]:
        """Take out everyone for whom ``why_leave`` names a reason; the one in hand stays."""
        left: list[tuple[T, str]] = []
        for lane, queue in enumerate(self._lanes):
            reasons = [(item, why_leave(item)) for item in queue]
            gone = [(item, why) for item, why in reasons if why is not None]
            if not gone:
                continue
            left += gone
            queue.clear()
            queue.extend(item for item, why in reasons if why is None)
            if not queue and (self._in_hand is None or self._in_hand.lane != lane):
                self._skips[lane] = 0
        return left

    def clear(self) -> list[T]:
        """Everyone, also the one in hand, leaves; highest lane first."""
        everyone = [] if self._in_hand is None else [self._in_hand.item]
        self._in_hand = None
        for queue in self._lanes:
            everyone += queue
            queue.clear()
        self._skips = [0] * len(self._lanes)
        return everyone
