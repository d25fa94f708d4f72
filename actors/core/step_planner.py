"""What the next engine step does: the rows that can decode, and prompt chunks within a budget."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from actors.core.cost_model import CostModel
from actors.limits import Limits


@dataclass(frozen=True, slots=True, kw_only=True)
class PrefillNeed:
    """``remaining_tokens`` are the most that the next chunk of ``sequence_id`` may have."""

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


class StepPlanner:
    """Remembers whose turn it is when not everybody fits into a decode step, and when the last
    chunk was granted beside decoding rows."""

    def __init__(self, limits: Limits) -> None:
        self._limits = limits
        self._latest = 0  # the last sequence of the last decode batch that left somebody out
        self._since_chunk = limits.prefill_grant_interval  # decode steps

    def plan(
        self, *, decode: Sequence[int], prefill: Sequence[PrefillNeed], cost: CostModel
    ) -> StepShape:
        """``decode``: ids that are ready, ascending.  See :func:`plan_step`."""
        chosen = self._rotate(decode)
        if chosen:
            self._since_chunk += 1
            interval = self._limits.prefill_grant_interval
            if interval == 0 or self._since_chunk < interval:
                return StepShape(decode=chosen, prefill=())
        shape = plan_step(decode=chosen, prefill=prefill, limits=self._limits, cost=cost)
        if shape.prefill:
            self._since_chunk = 0
        return shape

    def _rotate(self, ready: Sequence[int]) -> tuple[int, ...]:
        """At most ``max_batch`` of them: those after the last one, then from the start again."""
        width = self._limits.max_batch
        if width is None or len(ready) <= width:
            return tuple(ready)
        after = [sid for sid in ready if sid > self._latest]
        chosen = (after + [sid for sid in ready if sid <= self._latest])[:width]
        self._latest = chosen[-1]
        return tuple(sorted(chosen))


def plan_step(
    *, decode: Sequence[int], prefill: Sequence[PrefillNeed], limits: Limits, cost: CostModel
) -> StepShape:
    """``prefill`` comes in start order and is served in that order.

    Several prompts share the budget, but nobody is given a crumb: a later prompt gets a part of
    itself only if at least ``prefill_chunk_min_tokens`` of the budget are left for it.  Prompts
    that share a step may run as one batch, padded to the longest chunk: at most
    ``max_batch_prefill`` of them with ``max_batch_prefill_tokens`` padded tokens.
    """
    assert len(decode) <= limits.max_slots
    budget = 0
    if prefill:
        budget = min(
            cost.chunk_tokens(limits, decoding=bool(decode)), limits.step_tokens - len(decode)
        )
    chunks: list[tuple[int, int]] = []
    longest = 0
    for need in prefill[: limits.max_batch_prefill]:
        assert need.remaining_tokens > 0, need
        count = min(need.remaining_tokens, budget)
        if chunks:
            widest = limits.max_batch_prefill_tokens // (len(chunks) + 1)
            count = min(count, widest)
            crumb = count < need.remaining_tokens and count < limits.prefill_chunk_min_tokens
            if crumb or longest > widest:
                break
        if count == 0:
            break
        chunks.append((need.sequence_id, count))
        longest = max(longest, count)
        budget -= count
    return StepShape(decode=tuple(decode), prefill=tuple(chunks))
