from __future__ import annotations

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from actors.core.cache_book import CacheBook


def test_refuses_what_does_not_fit_and_takes_it_after_a_release() -> None:
    book = CacheBook(budget_tokens=10)
    first = book.reserve(7)
    assert first is not None
    assert book.reserve(4) is None
    assert book.free_tokens == 3
    assert book.release(first) == 7
    assert book.reserve(10) is not None
    assert book.free_tokens == 0


def test_a_lease_is_released_once() -> None:
    book = CacheBook(budget_tokens=10)
    lease = book.reserve(1)
    assert lease is not None
    book.release(lease)
    with pytest.raises(KeyError):
        book.release(lease)


class BookMachine(RuleBasedStateMachine):
    def __init__(self) -> None:
        super().__init__()
        self.book = CacheBook(budget_tokens=50)
        self.held: dict[int, int] = {}
        self.seen: set[int] = set()

    @rule(tokens=st.integers(1, 60))
    def reserve(self, tokens: int) -> None:
        lease = self.book.reserve(tokens)
        assert (lease is not None) == (sum(self.held.values()) + tokens <= 50)
        if lease is not None:
            assert lease not in self.seen
            self.seen.add(lease)
            self.held[lease] = tokens

    @precondition(lambda self: self.held)
    @rule(data=st.data())
    def release(self, data: st.DataObject) -> None:
        lease = data.draw(st.sampled_from(sorted(self.held)))
        assert self.book.release(lease) == self.held.pop(lease)

    @invariant()
    def sums(self) -> None:
        assert self.book.leased_tokens == sum(self.held.values()) <= 50
        assert self.book.leased_tokens + self.book.free_tokens == 50
        assert self.book.leases == len(self.held)


TestBookMachine = BookMachine.TestCase
TestBookMachine.settings = settings(max_examples=30, stateful_step_count=30, deadline=None)
