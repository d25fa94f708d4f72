"""What the next engine step does: every row that can decode, and prompt chunks within a budget."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from actors.core.cost_model import CostModel
from actors.limits import Limits


@dataclass(frozen=True, slots=True, kw_only=True)
class PrefillNeed:
    """``remaining_tokens`` of the prompt of ``sequence_id`` are still to be evaluated."""

    sequence_id: int
    remaining_tokens: int


@dataclass(frozen=True, slots=True, kw_only=True)
class StepShape:
    """``prefill`` holds (sequence id, tokens) in the order in which they are to run."""

    decode: tuple[int, ...]
    prefill: tuple[tuple[int, int], ...]

    @property
    def tokens(self) -> int:
        return len(self.decode) + sum(count for _, count in self.prefill)


def plan_step(
    *, decode: Sequence[int], prefill: Sequence[PrefillNeed], limits: Limits, cost: CostModel
) -> StepShape:
    """``prefill`` comes in start order and is served in that order.

    Several prompts share the budget, but nobody is given a crumb: a later prompt gets a part of
    itself only if at least ``prefill_chunk_min_tokens`` of the budget are left for it.
    """
    assert len(decode) <= limits.max_slots
    budget = 0
    if prefill:
        budget = min(
            cost.chunk_tokens(limits, decoding=bool(decode)), limits.step_tokens - len(decode)
        )
    chunks: list[tuple[int, int]] = []
    for need in prefill:
        assert need.remaining_tokens > 0, need
        count = min(need.remaining_tokens, budget)
        crumb = count < need.remaining_tokens and count < limits.prefill_chunk_min_tokens
        if count == 0 or (crumb and chunks):
            break
        chunks.append((need.sequence_id, count))
        budget -= count
    return StepShape(decode=tuple(decode), prefill=tuple(chunks))
