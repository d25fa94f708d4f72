"""What the actors know of the engine: one step at a time, plain Python values in and out.

An :class:`Engine` is driven by exactly one actor, the DecodeLoop.  ``start_step`` hands a plan to
the compute side and returns at once, so that the caller can deliver the previous step's tokens
while this one runs; ``wait_step`` waits for it.  At most one step is in flight.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Literal, Protocol

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
    ``prefix`` is how parts of caches can be kept for later sequences: by any range of tokens
    ("blocks"), only as a whole at the length they have ("snapshots"), or not at all ("none").
    ``state_bytes`` is the size of what one sequence holds whatever its length (recurrent state).
    ``fingerprint`` names weights and cache layout; caches of another one are of no use.
    ``notes`` are the choices made at load (device, dtype, BLAS, threads), for the log and /props.
    """

    model_type: str
    vocab_size: int
    context_length: int
    kv_bytes_per_token: int
    kv_budget_bytes: int | None = None
    max_batch: int | None = None
    prefix: Literal["blocks", "snapshots", "none"] = "none"
    state_bytes: int = 0
    fingerprint: str = ""
    notes: Mapping[str, str | int | float | bool | None] = field(default_factory=dict)


@dataclass(frozen=True, slots=True, kw_only=True)
class KeptPrefix:
    """What a sequence is opened from: kept blocks in order, or one snapshot.

    Only the first ``tokens`` tokens of it are used; of a snapshot always all.
    """

    handles: tuple[int, ...]
    tokens: int


@dataclass(frozen=True, slots=True, kw_only=True)
class PrefillChunk:
    """Evaluate ``tokens`` at positions ``start`` onwards of one sequence's KV cache.

    The first chunk of a sequence opens it: empty at ``start == 0``, otherwise from ``prefix``,
    whose ``tokens`` equal ``start``.  The chunk that ends the prompt carries ``sampling``: the
    engine then draws the sequence's first token in the same step and the sequence is ready to
    decode in the next one.  That chunk also carries ``generated``, how many tokens at the end of
    the prompt were generated before (a sequence that is computed anew), and, if
    ``sampling.reads_history``, ``history``: all tokens of the sequence up to the chunk's end.

    ``keep_as``: keep a snapshot of the sequence's cache as it is after this chunk.
    """

    sequence_id: int
    tokens: tuple[int, ...]
    start: int
    prefix: KeptPrefix | None = None
    sampling: SamplingParams | None = None
    generated: int = 0
    history: tuple[int, ...] = ()
    keep_as: int | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class KeepBlock:
    """Keep the cache of the tokens [start, end) of a sequence under ``handle``.

    With ``export`` its data comes back in the result as well.  The sequence may be dropped in the
    same step; it must hold at least ``end`` tokens.
    """

    sequence_id: int
    handle: int
    start: int
    end: int
    export: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class PrefixData:
    """A kept block outside the engine: plain arrays by name (NumPy), to be written or read back."""

    handle: int
    arrays: Mapping[str, Any]


@dataclass(frozen=True, slots=True, kw_only=True)
class StepPlan:
    """One engine step.

    Order inside the step: free the kept ``forget``, take in ``load``, keep ``keep``, free the
    sequences ``drop``, decode one token for every sequence in ``decode``, then run the ``prefill``
    chunks, where several may run as one batch.  The input token of a decode row is the one the
    engine drew for it last; the engine keeps it, so nothing is sent twice.

    ``force`` maps sequences to the token that they get in this step instead of a drawn one: decode
    rows, and those whose last chunk is in this step.
    """

    step: int
    forget: tuple[int, ...] = ()
    load: tuple[PrefixData, ...] = ()
    keep: tuple[KeepBlock, ...] = ()
    drop: tuple[int, ...] = ()
    decode: tuple[int, ...] = ()
    prefill: tuple[PrefillChunk, ...] = ()
    force: Mapping[int, int] = field(default_factory=dict)


@dataclass(frozen=True, slots=True, kw_only=True)
class TokenLogprobs:
    """Natural logarithms of probabilities under the distribution of docs/sampling.md.

    ``top`` holds the likeliest tokens as (id, logprob), best first.
    """

    logprob: float
    top: tuple[tuple[int, float], ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class StepResult:
    """What a step drew.

    ``tokens`` maps sequence id -> token id, for decode rows and finished prompts, in plan order.  A
    decode row may be left out in the step in which it joins the others; it is simply planned again.
    ``logprobs`` has an entry for each of these tokens whose sampling asks for it.
    ``failed`` maps sequence id -> a reason for the log: that sequence alone is lost (its cache is
    already freed), the others are not.  Times are seconds spent in the two parts.
    ``exported`` holds the data of the blocks kept with ``export``.
    ``abandoned``: the step was given up half-way; it drew nothing and its sequences can only be
    dropped.  What it was to forget, load, keep and drop has been done.
    """

    step: int
    tokens: Mapping[int, int]
    logprobs: Mapping[int, TokenLogprobs] = field(default_factory=dict)
    failed: Mapping[int, str] = field(default_factory=dict)
    exported: tuple[PrefixData, ...] = ()
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
        """Forget every sequence and all that was kept.  Waits for a running step to end."""
        ...
