from __future__ import annotations

from hypothesis import given, settings
from hypothesis import strategies as st

from actors.core.cost_model import CostModel
from actors.core.step_planner import PrefillNeed, plan_step
from actors.limits import Limits


def measured(decode_s: float = 0.01, token_s: float = 0.0001) -> CostModel:
    cost = CostModel()
    cost.note_decode(decode_s)
    cost.note_prefill(100, 100 * token_s)
    return cost


def needs(*counts: int) -> list[PrefillNeed]:
    return [
        PrefillNeed(sequence_id=10 + index, remaining_tokens=count)
        for index, count in enumerate(counts)
    ]


def test_nothing_to_do_is_an_empty_shape() -> None:
    shape = plan_step(decode=[], prefill=[], limits=Limits(), cost=CostModel())
    assert (shape.decode, shape.prefill, shape.tokens) == ((), (), 0)


def test_with_nobody_decoding_the_largest_chunk_runs() -> None:
    limits = Limits(prefill_chunk_max_tokens=512)
    shape = plan_step(decode=[], prefill=needs(2000), limits=limits, cost=measured())
    assert shape.prefill == ((10, 512),)


def test_an_automatic_chunk_takes_about_the_stated_number_of_decode_steps() -> None:
    limits = Limits(prefill_chunk_steps=3.0)
    cost = measured(decode_s=0.01, token_s=0.0001)
    shape = plan_step(decode=[1, 2], prefill=needs(2000), limits=limits, cost=cost)
    ((_, count),) = shape.prefill
    assert abs(count - 300) <= 1


def test_an_automatic_chunk_stays_within_its_bounds() -> None:
    limits = Limits(prefill_chunk_min_tokens=16, prefill_chunk_max_tokens=512)
    slow = plan_step(decode=[1], prefill=needs(999), limits=limits, cost=measured(0.001, 1.0))
    fast = plan_step(decode=[1], prefill=needs(999), limits=limits, cost=measured(1.0, 0.00001))
    unknown = plan_step(decode=[1], prefill=needs(999), limits=limits, cost=CostModel())
    assert [shape.prefill[0][1] for shape in (slow, fast, unknown)] == [16, 512, 16]


def test_a_fixed_chunk_size_wins() -> None:
    limits = Limits(prefill_chunk_tokens=100)
    for decode in ([], [1]):
        shape = plan_step(decode=decode, prefill=needs(999), limits=limits, cost=measured())
        assert shape.prefill == ((10, 100),)


def test_short_prompts_share_the_budget_in_start_order() -> None:
    limits = Limits(prefill_chunk_tokens=100)
    shape = plan_step(decode=[], prefill=needs(30, 30, 80), limits=limits, cost=CostModel())
    assert shape.prefill == ((10, 30), (11, 30), (12, 40))


def test_a_later_prompt_gets_no_crumb_but_may_be_finished() -> None:
    limits = Limits(prefill_chunk_tokens=100, prefill_chunk_min_tokens=16)
    crumb = plan_step(decode=[], prefill=needs(90, 80), limits=limits, cost=CostModel())
    whole = plan_step(decode=[], prefill=needs(90, 10), limits=limits, cost=CostModel())
    assert crumb.prefill == ((10, 90),)
    assert whole.prefill == ((10, 90), (11, 10))


def test_the_averages_follow_a_change_of_load() -> None:
    cost = measured(decode_s=0.01)
    for _ in range(40):
        cost.note_decode(0.02)
    assert cost.snapshot()["decode_step_s"] > 0.0199


@given(
    decode=st.integers(0, 4),
    counts=st.lists(st.integers(1, 3000), max_size=4),
    decode_s=st.floats(1e-5, 1.0),
    token_s=st.floats(1e-7, 1.0),
    fixed=st.none() | st.integers(1, 4096),
)
@settings(max_examples=150, deadline=None)
def test_every_plan_is_bounded_and_moves_on(
    decode: int, counts: list[int], decode_s: float, token_s: float, fixed: int | None
) -> None:
    limits = Limits(step_tokens=600, prefill_chunk_tokens=fixed)
    shape = plan_step(
        decode=range(decode),
        prefill=needs(*counts),
        limits=limits,
        cost=measured(decode_s, token_s),
    )
    assert shape.decode == tuple(range(decode))
    assert shape.tokens <= limits.step_tokens
    assert bool(shape.prefill) == bool(counts)
    # First come, first served: all but the last chunk end their prompt.
    assert [sid for sid, _ in shape.prefill] == list(range(10, 10 + len(shape.prefill)))
    for (_, count), remaining in zip(shape.prefill[:-1], counts, strict=False):
        assert count == remaining
    for (_, count), remaining in zip(shape.prefill, counts, strict=False):
        assert 0 < count <= remaining
