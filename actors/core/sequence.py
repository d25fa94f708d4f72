"""Bookkeeping of one sequence in a slot: what was evaluated, what was drawn, when it ends."""

from __future__ import annotations

import enum
from dataclasses import dataclass

from actors.events import FinishReason
from models.engine import PrefillChunk
from models.sampling import SamplingParams


class SequencePhase(enum.Enum):
    PREFILL = "prefill"
    DECODE = "decode"
    ENDING = "ending"  # its last token was drawn; the terminal event is still to be sent
    GONE = "gone"  # slot, lease and place are free


@dataclass(slots=True, kw_only=True)
class Sequence:
    """``drawn`` counts generated tokens, an end token excepted.  ``max_tokens`` is at least 1."""

    sequence_id: int
    request_id: str
    slot: int
    prompt_ids: tuple[int, ...]
    max_tokens: int
    sampling: SamplingParams
    eos_ids: frozenset[int]  # empty: end tokens are ordinary tokens
    started_s: float
    phase: SequencePhase = SequencePhase.PREFILL
    prefilled: int = 0
    drawn: int = 0
    parked_since_s: float | None = None
    in_engine: bool = False  # the engine holds a cache for it

    @property
    def remaining_prompt(self) -> int:
        return len(self.prompt_ids) - self.prefilled

    def chunk(self, count: int) -> PrefillChunk:
        """The next ``count`` prompt tokens; the one that ends the prompt carries ``sampling``."""
        assert self.phase is SequencePhase.PREFILL
        assert 0 < count <= self.remaining_prompt, (count, self.remaining_prompt)
        end = self.prefilled + count
        return PrefillChunk(
            sequence_id=self.sequence_id,
            tokens=self.prompt_ids[self.prefilled : end],
            start=self.prefilled,
            sampling=self.sampling if end == len(self.prompt_ids) else None,
        )

    def evaluated(self, count: int) -> None:
        """``count`` more prompt tokens are in the cache."""
        self.prefilled += count
        assert self.prefilled <= len(self.prompt_ids)
        if self.remaining_prompt == 0:
            self.phase = SequencePhase.DECODE

    def draw(self, token_id: int) -> FinishReason | None:
        """Account one drawn token.  A reason means that nothing more is to be computed."""
        assert self.phase is SequencePhase.DECODE, self.phase
        if token_id in self.eos_ids:
            self.phase = SequencePhase.ENDING
            return FinishReason.STOP
        self.drawn += 1
        if self.drawn < self.max_tokens:
            return None
        self.phase = SequencePhase.ENDING
        return FinishReason.LENGTH

    def park(self, now: float) -> bool:
        """No room in its channel.  True if it was not parked before."""
        if self.parked_since_s is not None:
            return False
        self.parked_since_s = now
        return True

    def resume(self) -> bool:
        """There is room.  True if it was parked."""
        was_parked = self.parked_since_s is not None
        self.parked_since_s = None
        return was_parked
