"""What the actors know of the engine: one step at a time, plain Python values in and out.

An :class:`Engine` is driven by exactly one actor, the DecodeLoop.  ``start_step`` hands a plan to
the compute side and returns at once, so that the caller can deliver the previous step's tokens
while this one runs; ``wait_step`` waits for it.  At most one step is in flight.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Protocol

from models.sampling import SamplingParams


class EngineError(Exception):
    """A step failed as a whole.  The engine is usable again after ``reset``."""


class EngineDead(EngineError):
    """The compute side is gone or does not answer; no restart of the actors can help."""


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineInfo:
    """Facts about a loaded model that scheduling needs.

    ``kv_bytes_per_token`` is the size of one token's keys and values over all layers;
    ``kv_budget_bytes`` what the machine can give to KV caches (None: unlimited).
    ``max_batch`` is the widest decode batch the model's caches allow (None: any).
    ``notes`` are the choices made at load (device, dtype, BLAS, threads), for the log and /props.
    """

    model_type: str
    vocab_size: int
    context_length: int
    kv_bytes_per_token: int
    kv_budget_bytes: int | None = None
    max_batch: int | None = None
    notes: Mapping[str, str | int | float | bool | None] = field(default_factory=dict)


@dataclass(frozen=True, slots=True, kw_only=True)
class PrefillChunk:
    """Evaluate ``tokens`` at positions ``start`` onwards of one sequence's KV cache.

    ``start == 0`` opens the sequence.  The chunk that ends the prompt carries ``sampling``: the
    engine then draws the sequence's first token in the same step and the sequence is ready to
    decode in the next one.
    """

    sequence_id: int
    tokens: tuple[int, ...]
    start: int
    sampling: SamplingParams | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class StepPlan:
    """One engine step.

    Order inside the step: free ``drop``, decode one token for every sequence in ``decode``, then
    run the ``prefill`` chunks in order.  The input token of a decode row is the one the engine drew
    for it last; the engine keeps it, so nothing is sent twice.
    """

    step: int
    drop: tuple[int, ...] = ()
    decode: tuple[int, ...] = ()
    prefill: tuple[PrefillChunk, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class StepResult:
    """What a step drew.

    ``tokens`` maps sequence id -> token id, for decode rows and finished prompts, in plan order.  A
    decode row may be left out in the step in which it joins the others; it is simply planned again.
    ``failed`` maps sequence id -> a reason for the log: that sequence alone is lost (its cache is
    already freed), the others are not.  Times are seconds spent in the two parts.
    ``abandoned``: the step was given up half-way; it drew nothing and its sequences can only be
    dropped.
    """

    step: int
    tokens: Mapping[int, int]
    failed: Mapping[int, str] = field(default_factory=dict)
    abandoned: bool = False
    decode_s: float = 0.0
    prefill_s: float = 0.0


class Engine(Protocol):
    """The async face of a model.  Not safe for more than one driver."""

    @property
    def info(self) -> EngineInfo: ...

    @property
    def alive(self) -> bool:
        """False once the compute side is known to be dead."""
        ...

    def start_step(self, plan: StepPlan) -> None:
        """Hand ``plan`` over; asserts that no step is in flight.  Never blocks."""
        ...

    async def wait_step(self) -> StepResult:
        """Wait for the step in flight.  Raises EngineError (the step failed) or EngineDead."""
        ...

    def abandon_step(self) -> None:
        """Nobody wants the step in flight any more: end it early if that is possible.

        It still has to be waited for.  The caller drops every sequence of the step afterwards.
        """
        ...

    async def reset(self) -> None:
        """Forget every sequence, including one in flight.  Waits for a running step to end."""
        ...
