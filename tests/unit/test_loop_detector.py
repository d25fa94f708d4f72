from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from actors.core.loop_detector import LoopDetector
from actors.requests import LoopRule


def naive(tokens: list[int], rule: LoopRule) -> bool:
    """The definition, over the whole text."""
    if rule.count < 2:
        return False
    for size in range(max(1, rule.min_size), rule.max_size + 1):
        tail = tokens[-size * rule.count :]
        if len(tail) == size * rule.count and tail == tail[:size] * rule.count:
            return True
    return False


def ends_at(tokens: list[int], rule: LoopRule) -> int | None:
    """How many tokens it takes until the detector speaks."""
    detector = LoopDetector(rule)
    return next((n for n, token in enumerate(tokens, 1) if detector.push(token)), None)


@pytest.mark.parametrize(
    ("tokens", "rule", "end"),
    [
        ([5, 5, 5, 5], (1, 20, 4), 4),
        ([9, 5, 5, 5, 5], (1, 20, 4), 5),
        ([1, 2, 1, 2, 1, 2], (2, 2, 3), 6),
        ([1, 1, 1, 1], (2, 2, 2), 4),  # one token over and over is also a block of two
        ([1, 2, 1, 2, 1, 2], (1, 1, 2), None),
        ([1, 2, 3, 1, 2, 3], (1, 2, 2), None),
        ([5, 5], (0, 1, 2), 2),
        ([5] * 9, (1, 0, 2), None),
        ([5] * 9, (1, 5, 1), None),
    ],
)
def test_where_it_speaks(tokens: list[int], rule: tuple[int, int, int], end: int | None) -> None:
    assert ends_at(tokens, LoopRule(min_size=rule[0], max_size=rule[1], count=rule[2])) == end


@given(
    tokens=st.lists(st.integers(0, 2), max_size=60),
    low=st.integers(0, 4),
    high=st.integers(0, 6),
    count=st.integers(0, 4),
)
@settings(max_examples=300, deadline=None)
def test_it_agrees_with_the_definition_after_every_token(
    tokens: list[int], low: int, high: int, count: int
) -> None:
    rule = LoopRule(min_size=low, max_size=high, count=count)
    detector = LoopDetector(rule)
    for end, token in enumerate(tokens, 1):
        assert detector.push(token) == naive(tokens[:end], rule)
