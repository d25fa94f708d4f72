"""From drawn tokens to what the requester reads: detokenise, match stop strings, build the events.

Pure apart from the ``TextModel`` objects: no channels, no clock.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from actors.events import Chances, Finished, FinishReason, TextDelta, Timings, TokenChance, Usage
from models.engine import TokenLogprobs
from models.stopping import StopMatcher
from models.text_model import IncrementalDecoder

TokenBytes = Callable[[int], bytes]


@dataclass(frozen=True, slots=True)
class Drawn:
    """One drawn token: ``token_id`` None for an end token, ``reason`` set for the last one."""

    token_id: int | None
    reason: FinishReason | None
    logprobs: TokenLogprobs | None = None


def chances_of(token_id: int, logprobs: TokenLogprobs, token_bytes: TokenBytes) -> Chances:
    """What was drawn, and what else was likely, with the tokens as bytes."""
    return Chances(
        drawn=TokenChance(token_id, token_bytes(token_id), logprobs.logprob),
        top=tuple(TokenChance(one, token_bytes(one), value) for one, value in logprobs.top),
    )


class Transcript:
    """The text of one sequence.  ``position`` is that of the next token to be delivered."""

    __slots__ = ("_decoder", "_matcher", "position", "stop_string", "tail")

    def __init__(self, decoder: IncrementalDecoder, stop: tuple[str, ...]) -> None:
        self._decoder = decoder
        self._matcher = StopMatcher(stop) if stop else None
        self.position = 0
        self.stop_string: str | None = None
        self.tail = ""

    def add(self, token_id: int, chances: Chances | None = None) -> TextDelta:
        """The event for one token; ``stop_string`` is set if a stop string was completed by it."""
        text = self._match(self._decoder.push(token_id))
        delta = TextDelta(self.position, token_id, text, chances)
        self.position += 1
        return delta

    def end(self) -> None:
        """No more tokens: ``tail`` becomes the text that was held back."""
        self.tail = self._match(self._decoder.flush())
        if self._matcher is not None and self.stop_string is None:
            self.tail += self._matcher.flush()

    def finished(
        self, reason: FinishReason, prompt_tokens: int, timings: Timings, cached_tokens: int = 0
    ) -> Finished:
        """The terminal event; a matched stop string takes precedence over ``reason``."""
        if self.stop_string is not None:
            reason = FinishReason.STOP_STRING
        return Finished(
            reason=reason,
            usage=Usage(
                prompt_tokens=prompt_tokens,
                completion_tokens=self.position,
                cached_tokens=cached_tokens,
            ),
            timings=timings,
            text=self.tail,
            stop_string=self.stop_string,
        )

    def _match(self, text: str) -> str:
        if self._matcher is None:
            return text
        emit, self.stop_string = self._matcher.push(text)
        return emit
