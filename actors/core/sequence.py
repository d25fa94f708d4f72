"""Bookkeeping of one sequence in a slot: what was evaluated, what was drawn, when it ends."""

from __future__ import annotations

import enum
from dataclasses import dataclass, field

from actors.core.loop_detector import LoopDetector
from actors.core.thinking_budget import ThinkingBudget
from actors.events import FinishReason
from models.engine import KeptPrefix, PrefillChunk
from models.sampling import SamplingParams


class SequencePhase(enum.Enum):
    FORKED = "forked"  # waits for another choice of its request to evaluate their prompt
    PREFILL = "prefill"
    DECODE = "decode"
    PREEMPTED = "preempted"  # its cache was taken away; it will be computed anew
    ENDING = "ending"  # its last token was drawn; the terminal event is still to be sent
    GONE = "gone"  # slot, lease and place are free


@dataclass(slots=True, kw_only=True)
class Sequence:
    """``generated`` are the drawn tokens, an end token excepted.  ``max_tokens`` is at least 1.

    ``source`` is what has to be prefilled: the prompt, or, of a sequence that is computed anew,
    the prompt and what it had generated.  ``held`` tokens of prompt + ``generated`` are surely in
    the engine.  ``prefix``: what it is opened from.  ``keep_as``: keep a snapshot under this handle
    when all but the last token of the prompt are evaluated.
    """

    sequence_id: int
    request_id: str
    slot: int
    prompt_ids: tuple[int, ...]
    max_tokens: int
    sampling: SamplingParams
    eos_ids: frozenset[int]  # empty: end tokens are ordinary tokens
    started_s: float
    min_tokens: int = 0  # end tokens before are ordinary tokens
    loop: LoopDetector | None = None
    thinking: ThinkingBudget | None = None
    phase: SequencePhase = SequencePhase.PREFILL
    source: tuple[int, ...] = field(init=False)
    prefilled: int = 0
    held: int = 0
    generated: list[int] = field(default_factory=list)
    prefix: KeptPrefix | None = None
    keep_as: int | None = None
    parked_since_s: float | None = None
    in_engine: bool = False  # the engine holds a cache for it

    def __post_init__(self) -> None:
        self.source = self.prompt_ids

    @property
    def drawn(self) -> int:
        return len(self.generated)

    @property
    def tokens(self) -> int:
        """Its length, and what the engine holds of it once the next token is drawn."""
        return len(self.prompt_ids) + len(self.generated)

    @property
    def remaining_prompt(self) -> int:
        return len(self.source) - self.prefilled

    @property
    def next_chunk(self) -> int:
        """The most tokens that its next chunk may have: a snapshot is taken between two chunks."""
        before_last = len(self.prompt_ids) - 1
        if self.keep_as is not None and self.prefilled < before_last:
            return before_last - self.prefilled
        return self.remaining_prompt

    def open_from(self, prefix: KeptPrefix | None) -> None:
        """The first ``prefix.tokens`` tokens are not evaluated, but taken over."""
        assert not self.in_engine
        assert prefix is None or 0 < prefix.tokens < len(self.source), prefix
        self.prefix = prefix
        self.prefilled = 0 if prefix is None else prefix.tokens

    def chunk(self, count: int) -> PrefillChunk:
        """The next ``count`` tokens; the chunk that ends the source carries ``sampling``."""
        assert self.phase is SequencePhase.PREFILL
        assert 0 < count <= self.next_chunk, (count, self.next_chunk)
        end = self.prefilled + count
        last = end == len(self.source)
        keeps = self.keep_as is not None and end == len(self.prompt_ids) - 1
        return PrefillChunk(
            sequence_id=self.sequence_id,
            tokens=self.source[self.prefilled : end],
            start=self.prefilled,
            prefix=None if self.in_engine else self.prefix,
            sampling=self.sampling if last else None,
            generated=len(self.source) - len(self.prompt_ids) if last else 0,
            history=self.source if last and self.sampling.reads_history else (),
            keep_as=self.keep_as if keeps else None,
        )

    def ends_with(self, count: int) -> bool:
        """Whether a chunk of ``count`` tokens ends the source, so that a token is drawn."""
        return count == self.remaining_prompt

    def evaluated(self, count: int) -> bool:
        """``count`` more tokens are in the cache.  True if the snapshot was taken with them."""
        self.prefilled += count
        self.held = self.prefilled
        assert self.prefilled <= len(self.source)
        if self.remaining_prompt == 0:
            self.phase = SequencePhase.DECODE
        return self.keep_as is not None and self.prefilled == len(self.prompt_ids) - 1

    def decoded(self) -> None:
        """A step took its latest token as input."""
        self.held += 1
        assert self.held <= self.tokens, (self.held, self.tokens)

    def draw(self, token_id: int) -> FinishReason | None:
        """Account one drawn token.  A reason means that nothing more is to be computed.

        STOP: the token is an end token and no part of the answer.
        """
        assert self.phase is SequencePhase.DECODE, self.phase
        if token_id in self.eos_ids and len(self.generated) >= self.min_tokens:
            self.phase = SequencePhase.ENDING
            return FinishReason.STOP
        self.generated.append(token_id)
        if self.thinking is not None:
            self.thinking.push(token_id)
        reason = None
        if self.loop is not None and self.loop.push(token_id):
            reason = FinishReason.LOOP
        elif len(self.generated) >= self.max_tokens:
            reason = FinishReason.LENGTH
        if reason is not None:
            self.phase = SequencePhase.ENDING
        return reason

    def preempt(self) -> None:
        """Its cache is gone: everything has to be computed anew, what was generated included."""
        assert self.phase in (SequencePhase.PREFILL, SequencePhase.DECODE), self.phase
        self.phase = SequencePhase.PREEMPTED
        self.source = (*self.prompt_ids, *self.generated)
        self.prefilled = self.held = 0
        self.prefix = None
        self.keep_as = None
        self.in_engine = False

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
