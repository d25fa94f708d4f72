from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from actors.core.thinking_budget import ThinkingBudget
from models.scripted_text import END_THINK_ID, THINK_ID, ScriptedTextModel
from models.thinking import ThinkingMarkers, find_markers

OPEN, CLOSE = 100, 101


def run(
    drawn: list[int],
    budget: int,
    *,
    starts_open: bool = False,
    open_ids: tuple[int, ...] = (OPEN,),
    close_ids: tuple[int, ...] = (CLOSE,),
) -> list[int]:
    """What comes out when ``drawn`` would be drawn, a forced token taking the place of one."""
    thinking = ThinkingBudget(
        open_ids=open_ids, close_ids=close_ids, budget=budget, starts_open=starts_open
    )
    out = []
    for token in drawn:
        forced = thinking.forced
        out.append(token if forced is None else forced)
        thinking.push(out[-1])
    return out


@pytest.mark.parametrize(
    ("drawn", "budget", "out"),
    [
        ([OPEN, 1, 2, 3, 4], 2, [OPEN, 1, 2, CLOSE, 4]),
        ([OPEN, 1, 2, 3], 0, [OPEN, CLOSE, 2, 3]),
        ([OPEN, 1, CLOSE, 3, 4, 5], 2, [OPEN, 1, CLOSE, 3, 4, 5]),
        ([1, 2, 3, 4], 1, [1, 2, 3, 4]),
        ([OPEN, 1, 2, OPEN, 4, 5], 1, [OPEN, 1, CLOSE, OPEN, 4, CLOSE]),
    ],
)
def test_the_end_is_forced(drawn: list[int], budget: int, out: list[int]) -> None:
    assert run(drawn, budget) == out


def test_a_prompt_may_have_opened_the_block() -> None:
    assert run([1, 2, 3], 2, starts_open=True) == [1, 2, CLOSE]
    assert run([1, 2], 0, starts_open=True) == [CLOSE, 2]


def test_markers_of_several_tokens_come_one_after_the_other() -> None:
    markers = {"open_ids": (7, 8), "close_ids": (8, 9)}
    assert run([7, 8, 1, 2, 3, 4], 1, **markers) == [7, 8, 1, 8, 9, 4]
    # The drawn 8 is the beginning of the end already.
    assert run([7, 8, 8, 5, 6], 1, **markers) == [7, 8, 8, 9, 6]
    # What only began like a marker is none.
    assert run([7, 7, 8, 1, 2, 3], 1, **markers) == [7, 7, 8, 1, 8, 9]


@given(
    drawn=st.lists(st.sampled_from([1, 2, OPEN, CLOSE]), max_size=40),
    budget=st.integers(0, 5),
    starts_open=st.booleans(),
)
@settings(max_examples=200, deadline=None)
def test_no_block_is_longer_than_its_budget(
    drawn: list[int], budget: int, starts_open: bool
) -> None:
    inside, used = starts_open, 0
    for token in run(drawn, budget, starts_open=starts_open):
        if not inside:
            inside, used = token == OPEN, 0
        elif token == CLOSE:
            inside = False
        else:
            used += 1
            assert used <= budget


def test_the_first_pair_of_the_vocabulary_counts() -> None:
    ids = {"<|channel>": 3, "<channel|>": 4, "<think>": 5}
    markers = find_markers(ids.get, frozenset({10}))
    assert markers is not None
    assert (markers.open_ids, markers.close_ids) == ((3,), (4,))
    assert find_markers({"<think>": 5}.get, frozenset()) is None
    scripted = ScriptedTextModel().thinking
    assert scripted is not None
    assert (scripted.open_ids, scripted.close_ids) == ((THINK_ID,), (END_THINK_ID,))


@pytest.mark.parametrize(
    ("prompt", "opened"),
    [
        ((1, OPEN), True),
        ((OPEN, 10), True),
        ((OPEN, 10, 10), False),
        ((OPEN, 1), False),
        ((), False),
    ],
)
def test_a_prompt_that_ends_with_the_marker_opens_the_block(
    prompt: tuple[int, ...], opened: bool
) -> None:
    markers = ThinkingMarkers(open_ids=(OPEN,), close_ids=(CLOSE,), newline_ids=frozenset({10}))
    assert markers.opened_by(prompt) is opened
