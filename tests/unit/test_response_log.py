from __future__ import annotations

import math

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule

from actors.core.response_log import ENTRY_OVERHEAD_BYTES, ResponseLog


def log(entries: int = 3, body_bytes: int = 1000, ttl_s: float = 10.0) -> ResponseLog:
    return ResponseLog(
        max_entries=entries, max_bytes=body_bytes + entries * ENTRY_OVERHEAD_BYTES, ttl_s=ttl_s
    )


def test_an_expired_entry_is_not_returned_even_if_nobody_swept() -> None:
    store = log(ttl_s=10.0)
    assert store.put(response_id="a", owner="o", body=b"x", now=0.0)
    assert store.get(response_id="a", owner="o", now=9.9) == b"x"
    assert store.get(response_id="a", owner="o", now=10.0) is None
    assert (len(store), store.size_bytes) == (0, 0)


def test_reading_does_not_prolong_life() -> None:
    store = log(ttl_s=10.0)
    store.put(response_id="a", owner="o", body=b"x", now=0.0)
    store.get(response_id="a", owner="o", now=9.0)
    assert store.next_expiry_s() == 10.0
    assert store.expire(10.0) == 1
    assert store.next_expiry_s() == math.inf


def test_owners_do_not_see_each_other() -> None:
    store = log()
    store.put(response_id="a", owner="one", body=b"1", now=0.0)
    store.put(response_id="a", owner="two", body=b"2", now=0.0)
    assert store.get(response_id="a", owner="one", now=1.0) == b"1"
    assert not store.delete(response_id="a", owner="three", now=1.0)
    assert store.delete(response_id="a", owner="one", now=1.0)
    assert store.get(response_id="a", owner="two", now=1.0) == b"2"


def test_the_least_recently_used_leaves_first() -> None:
    store = log(entries=2)
    store.put(response_id="a", owner="o", body=b"a", now=0.0)
    store.put(response_id="b", owner="o", body=b"b", now=0.0)
    store.get(response_id="a", owner="o", now=1.0)
    store.put(response_id="c", owner="o", body=b"c", now=2.0)
    assert store.get(response_id="b", owner="o", now=2.0) is None
    assert store.get(response_id="a", owner="o", now=2.0) == b"a"


def test_what_can_never_fit_is_refused_and_the_old_body_is_gone() -> None:
    store = log(entries=1, body_bytes=10)
    assert store.put(response_id="a", owner="o", body=b"x", now=0.0)
    assert not store.put(response_id="a", owner="o", body=b"x" * 11, now=0.0)
    assert store.get(response_id="a", owner="o", now=0.0) is None


class LogMachine(RuleBasedStateMachine):
    """Against a list in order of use."""

    MAX_BYTES = 4 * ENTRY_OVERHEAD_BYTES

    def __init__(self) -> None:
        super().__init__()
        self.log = ResponseLog(max_entries=3, max_bytes=self.MAX_BYTES, ttl_s=5.0)
        self.now = 0.0
        self.model: list[tuple[tuple[str, str], bytes, float]] = []

    def prune(self) -> None:
        self.model = [entry for entry in self.model if entry[2] > self.now]

    def size(self) -> int:
        return sum(len(body) + ENTRY_OVERHEAD_BYTES for _, body, _ in self.model)

    keys = st.sampled_from([(o, i) for o in ("x", "y") for i in ("1", "2", "3")])

    @rule(seconds=st.sampled_from([0.0, 1.0, 2.5, 5.0]))
    def time_passes(self, seconds: float) -> None:
        self.now += seconds

    @rule(key=keys, length=st.sampled_from([0, 100, 700, 1500, 2000]))
    def put(self, key: tuple[str, str], length: int) -> None:
        body = bytes(length)
        stored = self.log.put(response_id=key[1], owner=key[0], body=body, now=self.now)
        self.prune()
        self.model = [entry for entry in self.model if entry[0] != key]
        assert stored == (length + ENTRY_OVERHEAD_BYTES <= self.MAX_BYTES)
        if stored:
            self.model.append((key, body, self.now + 5.0))
            while len(self.model) > 3 or self.size() > self.MAX_BYTES:
                self.model.pop(0)

    @rule(key=keys)
    def get(self, key: tuple[str, str]) -> None:
        self.prune()
        found = next((entry for entry in self.model if entry[0] == key), None)
        body = self.log.get(response_id=key[1], owner=key[0], now=self.now)
        assert body == (None if found is None else found[1])
        if found is not None:
            self.model.remove(found)
            self.model.append(found)

    @rule(key=keys)
    def delete(self, key: tuple[str, str]) -> None:
        self.prune()
        there = any(entry[0] == key for entry in self.model)
        assert self.log.delete(response_id=key[1], owner=key[0], now=self.now) == there
        self.model = [entry for entry in self.model if entry[0] != key]

    @rule()
    def expire(self) -> None:
        self.log.expire(self.now)
        self.prune()
        assert len(self.log) == len(self.model)
        assert self.log.size_bytes == self.size()

    @invariant()
    def bounded(self) -> None:
        assert len(self.log) <= 3
        assert 0 <= self.log.size_bytes <= self.MAX_BYTES


TestLogMachine = LogMachine.TestCase
TestLogMachine.settings = settings(max_examples=40, stateful_step_count=40, deadline=None)
