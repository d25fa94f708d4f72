"""What the backend knows of each sequence, and giving up a step that nobody wants any more."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, Final

import mlx.core as mx

from models.engine import TokenLogprobs
from models.mlx.batching import Caches, arrays_of
from models.sampling import SamplingParams

# A step that is expected to take longer is evaluated a few layers at a time.
WORTH_ABANDONING_S: Final = 0.030
LAYERS_AT_ONCE: Final = 4
NOT_FINITE: Final = "the model's output is not a finite number"


class Abandoned(Exception):
    """Nobody wants the running step any more."""


@dataclass(slots=True, kw_only=True)
class Sequence:
    """``caches`` is None while the sequence is a row of the decode batch.

    ``length`` counts the cached tokens outside the batch.  ``token`` is the last drawn one, the
    input of the next decode; ``waiting`` is the same token while nobody has been told of it.
    ``sampling`` is set once the prompt is complete; then ``generated`` counts drawn tokens.
    ``tokens`` are all of them if ``sampling`` reads its history; otherwise it stays empty.
    """

    caches: Caches | None
    length: int = 0
    token: int = -1
    waiting: int | None = None
    logprobs: TokenLogprobs | None = None  # of the waiting token
    sampling: SamplingParams | None = None
    generated: int = 0
    tokens: list[int] = field(default_factory=list)

    def draw(self, token: int, logprobs: TokenLogprobs | None) -> None:
        self.token = self.waiting = token
        self.logprobs = logprobs
        self.generated += 1
        if self.sampling is not None and self.sampling.reads_history:
            self.tokens.append(token)

    def replace(self, token: int) -> None:
        """The token that was drawn last is another one after all."""
        self.token = self.waiting = token
        if self.tokens:
            self.tokens[-1] = token


Sequences = dict[int, Sequence]


def evaluate(caches: Caches, seconds: float | None, unwanted: Callable[[], bool]) -> None:
    """Evaluate up to each few layers in turn, so that a long step can be given up between.

    ``seconds`` is what the whole is expected to take.  Raises Abandoned.
    """
    if seconds is not None and seconds < WORTH_ABANDONING_S:
        return
    for layer in range(LAYERS_AT_ONCE, len(caches), LAYERS_AT_ONCE):
        mx.async_eval(arrays_of(caches[layer - 1 : layer]))  # type: ignore[no-untyped-call]
        if unwanted():
            raise Abandoned


def checked(logits: mx.array, tokens: mx.array) -> mx.array:
    """[B] tokens as int32, -1 where the chosen logit is not finite: one transfer for both."""
    chosen = mx.take_along_axis(logits, tokens[:, None], axis=-1)[:, 0]
    return mx.where(mx.isfinite(chosen), tokens.astype(mx.int32), -1)


def host_values(array: mx.array) -> Any:
    """Waits for ``array``."""
    return array.tolist()
