from __future__ import annotations

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from actors.core.cache_book import CacheBook


def book(budget: int = 100, quantum: int = 10) -> CacheBook:
    return CacheBook(budget_tokens=budget, quantum_tokens=quantum)


def test_a_lease_starts_with_the_prompt_and_a_quantum_and_never_above_what_it_may_need() -> None:
    one = book()
    first, short = one.reserve(20, 80), one.reserve(20, 25)
    assert first is not None
    assert short is not None
    assert one.tokens_of(first) == 30
    assert one.tokens_of(short) == 25
    assert one.free_tokens == 45


def test_refuses_what_does_not_fit_and_takes_it_after_a_release() -> None:
    one = book(budget=50)
    first = one.reserve(30, 40)
    assert first is not None
    assert one.reserve(10, 40) is None
    assert one.release(first) == 40
    assert one.reserve(40, 60) is not None


def test_growth_comes_in_quanta_as_far_as_there_is_room() -> None:
    one = book(budget=57)
    lease = one.reserve(20, 90)
    assert lease is not None
    assert one.grow(lease, 31) == 40
    assert one.grow(lease, 35) == 40
    assert one.grow(lease, 55) == 55  # a whole quantum more does not fit
    assert one.grow(lease, 58) is None
    assert one.starving


def test_nobody_starts_while_a_running_sequence_has_to_grow() -> None:
    one = book(budget=60)
    a, b = one.reserve(20, 90), one.reserve(10, 30)
    assert a is not None
    assert b is not None
    assert one.grow(a, 50) is None
    assert one.reserve(1, 1) is None
    one.release(b)
    assert one.reserve(1, 1) is None
    assert one.grow(a, 50) == 50
    assert one.reserve(1, 1) is not None


def test_a_shrunk_lease_comes_back() -> None:
    one = book(budget=60)
    lease = one.reserve(20, 90)
    assert lease is not None
    assert one.shrink(lease) == 30
    assert one.free_tokens == 60
    assert one.grow(lease, 25) == 30
    assert one.release(lease) == 30


def test_a_lease_is_released_once() -> None:
    one = book()
    lease = one.reserve(1, 1)
    assert lease is not None
    one.release(lease)
    with pytest.raises(KeyError):
        one.release(lease)


def test_evicts_only_when_that_is_enough() -> None:
    kept = [40]
    evicted: list[int] = []

    def evict(tokens: int) -> int:
        evicted.append(tokens)
        kept[0] -= tokens
        return tokens

    one = CacheBook(
        budget_tokens=100,
        quantum_tokens=10,
        kept=lambda: kept[0],
        evictable=lambda: 30,
        evict=evict,
    )
    assert one.reserve(91, 91) is None
    assert evicted == []
    assert one.reserve(60, 60) is not None
    assert evicted == []
    assert one.reserve(25, 25) is not None
    assert evicted == [25]


class BookMachine(RuleBasedStateMachine):
    """Against the plain rule: leases and kept tokens never exceed the budget."""

    def __init__(self) -> None:
        super().__init__()
        self.kept = 0
        self.pinned = 0
        self.book = CacheBook(
            budget_tokens=50,
            quantum_tokens=4,
            kept=lambda: self.kept,
            evictable=lambda: self.kept - self.pinned,
            evict=self.evict,
        )
        self.held: dict[int, tuple[int, int]] = {}
        self.hungry: set[int] = set()

    def evict(self, tokens: int) -> int:
        assert 0 < tokens <= self.kept - self.pinned
        self.kept -= tokens
        return tokens

    @rule(tokens=st.integers(1, 20), pinned=st.integers(0, 5))
    def keep(self, tokens: int, pinned: int) -> None:
        if tokens <= self.book.free_tokens:
            self.kept += tokens
            self.pinned += min(pinned, tokens)

    @rule(prompt=st.integers(1, 30), more=st.integers(0, 30))
    def reserve(self, prompt: int, more: int) -> None:
        tokens = min(prompt + more, prompt + 4)
        fits = tokens <= 50 - self.leased - self.pinned and not self.hungry
        lease = self.book.reserve(prompt, prompt + more)
        assert (lease is not None) == fits
        if lease is not None:
            assert lease not in self.held
            self.held[lease] = (tokens, prompt + more)

    @property
    def leased(self) -> int:
        return sum(tokens for tokens, _ in self.held.values())

    @precondition(lambda self: self.held)
    @rule(data=st.data())
    def grow(self, data: st.DataObject) -> None:
        lease = data.draw(st.sampled_from(sorted(self.held)))
        tokens, most = self.held[lease]
        target = data.draw(st.integers(1, most))
        room = 50 - self.leased - self.pinned
        got = self.book.grow(lease, target)
        if target <= tokens:
            assert got == tokens
        elif target - tokens > room:
            assert got is None
            self.hungry.add(lease)
            return
        else:
            assert got is not None
            assert target <= got <= min(most, target + 3)
        self.held[lease] = (got, most)
        self.hungry.discard(lease)

    @precondition(lambda self: self.held)
    @rule(data=st.data(), shrink=st.booleans())
    def give_back(self, data: st.DataObject, shrink: bool) -> None:
        lease = data.draw(st.sampled_from(sorted(self.held)))
        tokens, most = self.held.pop(lease)
        self.hungry.discard(lease)
        if shrink:
            assert self.book.shrink(lease) == tokens
            self.held[lease] = (0, most)
        else:
            assert self.book.release(lease) == tokens

    @invariant()
    def adds_up(self) -> None:
        assert self.book.leases == len(self.held)
        assert self.book.leased_tokens == self.leased
        assert self.book.free_tokens == 50 - self.leased - self.kept >= 0
        assert self.book.starving == bool(self.hungry)


TestBook = BookMachine.TestCase
TestBook.settings = settings(max_examples=60, stateful_step_count=40, deadline=None)
