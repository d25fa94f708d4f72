from __future__ import annotations

from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.stateful import (
    RuleBasedStateMachine,
    initialize,
    invariant,
    precondition,
    rule,
)

from actors.core.waiting_room import WaitingRoom

LANES = 3
HIGH, NORMAL, LOW = range(LANES)


def room(max_skips: int = 2, bound: int = 100) -> WaitingRoom[str]:
    return WaitingRoom(lanes=LANES, bound=bound, max_skips=max_skips)


def start(waiting: WaitingRoom[str]) -> str | None:
    return None if waiting.pick() is None else waiting.commit()


def test_highest_lane_first_and_fifo_inside_a_lane() -> None:
    waiting = room(max_skips=0)
    for lane, item in ((LOW, "l1"), (NORMAL, "n1"), (HIGH, "h1"), (NORMAL, "n2"), (HIGH, "h2")):
        waiting.put(lane, item)
    assert [start(waiting) for _ in range(6)] == ["h1", "h2", "n1", "n2", "l1", None]


def test_a_skipped_lane_goes_next() -> None:
    waiting = room(max_skips=2)
    for item in ("h1", "h2", "h3"):
        waiting.put(HIGH, item)
    waiting.put(LOW, "l1")
    assert [start(waiting) for _ in range(2)] == ["h1", "h2"]
    picked = waiting.pick()
    assert picked is not None
    assert (picked.item, picked.by_skip) == ("l1", True)


def test_a_pick_that_is_put_back_counts_for_nobody() -> None:
    waiting = room(max_skips=1)
    waiting.put(HIGH, "h1")
    waiting.put(LOW, "l1")
    for _ in range(5):
        picked = waiting.pick()
        assert picked is not None
        assert picked.item == "h1"
        assert len(waiting) == 2
        waiting.put_back()
    assert waiting.skips() == (0, 0, 0)


def test_put_front_keeps_the_order() -> None:
    waiting = room()
    waiting.put(NORMAL, "n3")
    waiting.put_front(NORMAL, ["n1", "n2"])
    assert [start(waiting) for _ in range(3)] == ["n1", "n2", "n3"]


def test_sweep_takes_out_only_those_with_a_reason() -> None:
    waiting = room()
    for item in ("a", "b", "c"):
        waiting.put(NORMAL, item)
    assert waiting.sweep(lambda item: "dead" if item == "b" else None) == [("b", "dead")]
    assert [start(waiting) for _ in range(2)] == ["a", "c"]


def test_clear_also_takes_the_one_in_hand() -> None:
    waiting = room()
    waiting.put(LOW, "l1")
    waiting.put(HIGH, "h1")
    waiting.pick()
    assert waiting.clear() == ["h1", "l1"]
    assert len(waiting) == 0
    assert waiting.in_hand is None


@given(
    max_skips=st.integers(1, 5),
    arrivals=st.lists(st.lists(st.integers(0, LANES - 1), max_size=4), max_size=60),
)
@settings(max_examples=60, deadline=None)
def test_the_head_of_a_lane_waits_a_bounded_number_of_starts(
    max_skips: int, arrivals: list[list[int]]
) -> None:
    waiting = room(max_skips=max_skips, bound=1000)
    waited: dict[int, int] = {}  # lane -> starts that its present head has seen
    for lanes in arrivals:
        for lane in lanes:
            waiting.put(lane, "x")
        for lane, depth in enumerate(waiting.depths()):
            if depth:
                waited.setdefault(lane, 0)
        picked = waiting.pick()
        if picked is None:
            continue
        waiting.commit()
        waited.pop(picked.lane)
        waited = {lane: count + 1 for lane, count in waited.items()}
        assert all(count <= max_skips + LANES - 1 for count in waited.values())


class RoomMachine(RuleBasedStateMachine):
    """Against plain lists: order, contents and the one in hand."""

    @initialize(max_skips=st.integers(0, 3))
    def build(self, max_skips: int) -> None:
        self.room = room(max_skips=max_skips, bound=12)
        self.lists: list[list[str]] = [[] for _ in range(LANES)]
        self.hand: tuple[int, str] | None = None
        self.count = 0

    def size(self) -> int:
        return sum(map(len, self.lists)) + (self.hand is not None)

    @precondition(lambda self: self.size() < 12)
    @rule(lane=st.integers(0, LANES - 1), front=st.booleans())
    def put(self, lane: int, front: bool) -> None:
        self.count += 1
        item = f"i{self.count}"
        if front:
            self.room.put_front(lane, [item])
            self.lists[lane].insert(0, item)
        else:
            self.room.put(lane, item)
            self.lists[lane].append(item)

    @precondition(lambda self: self.hand is None)
    @rule()
    def pick(self) -> None:
        picked = self.room.pick()
        if picked is None:
            assert not any(self.lists)
            return
        assert picked.item == self.lists[picked.lane].pop(0)
        higher = any(self.lists[lane] for lane in range(picked.lane))
        assert picked.by_skip == higher
        self.hand = (picked.lane, picked.item)

    @precondition(lambda self: self.hand is not None)
    @rule(starts=st.booleans())
    def settle(self, starts: bool) -> None:
        assert self.hand is not None
        lane, item = self.hand
        self.hand = None
        if starts:
            assert self.room.commit() == item
        else:
            assert self.room.put_back() == item
            self.lists[lane].insert(0, item)

    @rule(digit=st.sampled_from("0123456789"))
    def sweep(self, digit: str) -> None:
        gone = self.room.sweep(lambda item: digit if item.endswith(digit) else None)
        expected = [item for lane in self.lists for item in lane if item.endswith(digit)]
        assert [item for item, _ in gone] == expected
        self.lists = [[item for item in lane if not item.endswith(digit)] for lane in self.lists]

    @invariant()
    def same_contents(self) -> None:
        assert self.room.depths() == tuple(map(len, self.lists))
        assert len(self.room) == self.size()


TestRoomMachine = RoomMachine.TestCase
TestRoomMachine.settings = settings(max_examples=40, stateful_step_count=40, deadline=None)
