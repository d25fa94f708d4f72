"""Engine steps on an mlx-lm model: continuous batching, chunked prefill, sampling."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, Final

import mlx.core as mx

from models.engine import EngineInfo, PrefillChunk, StepPlan, StepResult
from models.mlx.batching import (
    Caches,
    DecodeBatch,
    Row,
    arrays_of,
    can_batch,
    new_caches,
    remember,
    share_offsets,
)
from models.mlx.head import LastPositionHead
from models.mlx.memory import kv_budget, kv_bytes_per_token
from models.mlx.sampler import BatchSampler, check_params
from models.sampling import SamplingParams

# Steps between two returns of unused memory to the system.
CLEAR_EVERY: Final = 512
# Decodes shorter than this run ahead of the plan: what that can waste stays below it.
RUN_AHEAD_S: Final = 0.010
# A shorter wait does not show whether the decode ended just now.
MEASURABLE_S: Final = 0.0001
# A step that is expected to take longer is evaluated a few layers at a time.
WORTH_ABANDONING_S: Final = 0.030
LAYERS_AT_ONCE: Final = 4
NOT_FINITE: Final = "the model's output is not a finite number"

Note = str | int | float | bool | None


@dataclass(slots=True, kw_only=True)
class _Sequence:
    """``caches`` is None while the sequence is a row of the decode batch.

    ``length`` counts the cached tokens outside the batch.  ``token`` is the last drawn one, the
    input of the next decode; ``waiting`` is the same token while nobody has been told of it.
    ``sampling`` is set once the prompt is complete.
    """

    caches: Caches | None
    length: int = 0
    token: int = -1
    waiting: int | None = None
    sampling: SamplingParams | None = None


@dataclass(slots=True, kw_only=True)
class _Decode:
    """One decode of the whole batch, built and perhaps not started.

    ``drawn`` is [B], -1 for a failed row; ``tokens`` [B] is the input of the decode after it.
    ``undo`` takes the building back.
    """

    drawn: mx.array
    tokens: mx.array
    undo: Callable[[], None] | None


class _Abandoned(Exception):
    """Nobody wants the running step any more."""


class MLXBackend:
    """Implements Backend.  Made, used and closed on one thread, which owns the model's arrays.

    ``kv_budget_bytes`` None takes what the machine has left.  Decodes that take less than
    ``run_ahead_s`` are started before they are asked for.
    """

    def __init__(
        self,
        model: Any,
        *,
        vocab_size: int,
        context_length: int,
        model_type: str = "",
        notes: Mapping[str, Note] | None = None,
        kv_budget_bytes: int | None = None,
        run_ahead_s: float = RUN_AHEAD_S,
    ) -> None:
        self._model = model
        self._head = LastPositionHead(model)
        self._sequences: dict[int, _Sequence] = {}
        self._batch = DecodeBatch()
        self._sampler: BatchSampler | None = None  # of the batch as it is
        self._tokens: mx.array | None = None  # [B], the inputs of the next decode
        self._ahead: _Decode | None = None  # built for the step after the running one
        self._running: _Decode | None = None  # started, not collected
        self._started_s = 0.0
        self._decode_s: float | None = None  # what a decode has been taking
        self._run_ahead_s = run_ahead_s
        self._steps = 0
        self._step = 0
        self._abandoned = -1  # the step that nobody wants; set by another thread
        probe = new_caches(model)
        mx.eval(self._head(model, mx.array([[0, 0]]), probe), arrays_of(probe))
        self._info = EngineInfo(
            model_type=model_type or str(getattr(model, "model_type", "unknown")),
            vocab_size=vocab_size,
            context_length=context_length,
            kv_bytes_per_token=kv_bytes_per_token(probe),
            kv_budget_bytes=kv_budget() if kv_budget_bytes is None else kv_budget_bytes,
            max_batch=None if can_batch(probe) else 1,
            notes=dict(notes or {}),
        )

    @property
    def info(self) -> EngineInfo:
        return self._info

    def step(self, plan: StepPlan) -> StepResult:
        """See models.engine.StepPlan.  Any exception leaves the backend in need of a reset."""
        self._step = plan.step
        for sequence_id in plan.drop:
            del self._sequences[sequence_id]
        try:
            return self._run(plan)
        except _Abandoned:
            # Half-evaluated caches are of no use; their sequences will be dropped.
            self._batch = DecodeBatch()
            self._sampler = self._tokens = self._ahead = self._running = None
            return StepResult(step=plan.step, tokens={}, abandoned=True)

    def abandon(self, step: int) -> None:
        self._abandoned = step

    def _evaluate(self, caches: Caches, seconds: float | None) -> None:
        """Evaluate up to each few layers in turn, so that a long step can be given up between.

        ``seconds`` is what the whole is expected to take.  Raises _Abandoned.
        """
        if seconds is not None and seconds < WORTH_ABANDONING_S:
            return
        for layer in range(LAYERS_AT_ONCE, len(caches), LAYERS_AT_ONCE):
            mx.async_eval(arrays_of(caches[layer - 1 : layer]))  # type: ignore[no-untyped-call]
            if self._abandoned == self._step:
                raise _Abandoned

    def _run(self, plan: StepPlan) -> StepResult:
        begin = time.perf_counter()
        tokens: dict[int, int] = {}
        failed: dict[int, str] = {}
        if self._running is None:
            self._start_decode(plan.decode)
        # Graphs are built while the decode runs, and evaluated after it.
        prompts = [self._build_chunk(chunk, failed) for chunk in plan.prefill]
        if self._running is not None and self._will_go_on(plan):
            self._ahead = self._build_decode()
        spent = self._collect(failed, begin)
        for sequence_id in plan.decode:
            self._hand_out(sequence_id, tokens)
        if not plan.decode:
            self._free_dropped()
        decoded = time.perf_counter()
        for chunk, outputs in zip(plan.prefill, prompts, strict=True):
            self._finish_chunk(chunk, outputs, tokens, failed)
        self._run_ahead(plan)
        self._steps += 1
        if self._steps % CLEAR_EVERY == 0:
            mx.clear_cache()
        return StepResult(
            step=plan.step,
            tokens=tokens,
            failed=failed,
            decode_s=spent,
            prefill_s=time.perf_counter() - decoded if plan.prefill else 0.0,
        )

    def reset(self) -> None:
        self._sequences.clear()
        self._batch = DecodeBatch()
        self._sampler = self._tokens = self._ahead = self._running = None
        mx.clear_cache()

    def close(self) -> None:
        self.reset()
        self._model = None

    # -- decode

    def _start_decode(self, planned: tuple[int, ...]) -> None:
        """Start one decode of all planned rows that have no token waiting."""
        rows = tuple(one for one in planned if self._sequences[one].waiting is None)
        if not rows:
            return
        self._arrange(rows)
        assert max(self._batch.lengths) < self._info.context_length, (
            "a sequence outgrew the context"
        )
        self._start(self._ahead or self._build_decode())

    def _start(self, decode: _Decode) -> None:
        self._ahead = decode.undo = None  # so that caches are updated in place
        self._batch.advance()
        self._tokens = decode.tokens
        self._running, self._started_s = decode, time.perf_counter()
        self._evaluate(self._batch.caches, self._decode_s)
        mx.async_eval(decode.drawn, decode.tokens)  # type: ignore[no-untyped-call]

    def _will_go_on(self, plan: StepPlan) -> bool:
        """Whether the batch stays as it is, as far as this step can tell."""
        if any(chunk.sampling for chunk in plan.prefill):
            return False  # its sequence joins in the next step
        return set(plan.decode) == set(self._batch.ids)

    def _run_ahead(self, plan: StepPlan) -> None:
        """Start the next decode before it is asked for, if it is a short one.

        The way from one step's result to the next plan takes a part of a millisecond, in which the
        device would stand still.  The price is at most one more decode of a row that ends or is
        cancelled, hence the bound on its length.
        """
        ahead, cost = self._ahead, self._decode_s
        if ahead is None or plan.prefill or cost is None or cost > self._run_ahead_s:
            return
        if max(self._batch.lengths) < self._info.context_length:
            self._start(ahead)

    def _build_decode(self) -> _Decode:
        """Build the next decode of the batch as it is, without starting it.

        This takes a few per cent of a step, so it is done for the step after the running one; if
        the batch then changes after all, it is taken back.
        """
        batch = self._batch
        if self._sampler is None or self._tokens is None:
            rows = [self._sequences[sequence_id] for sequence_id in batch.ids]
            settings = [row.sampling for row in rows if row.sampling is not None]
            assert len(settings) == len(rows), "only complete prompts can decode"
            self._sampler = BatchSampler(settings, self._info.vocab_size)
            self._tokens = mx.array([row.token for row in rows], dtype=mx.uint32)
        undo = remember(batch.caches)
        logits = self._model(self._tokens[:, None], cache=batch.caches)[:, -1, :]
        share_offsets(batch.caches)
        # The token at hand will be cached, and the drawn one stands behind it.
        tokens = self._sampler.draw(logits, [length + 1 for length in batch.lengths])
        return _Decode(drawn=_checked(logits, tokens), tokens=tokens, undo=undo)

    def _composition_changes(self) -> None:
        if self._ahead is not None and self._ahead.undo is not None:
            self._ahead.undo()
        self._sampler = self._tokens = self._ahead = None

    def _arrange(self, decode: tuple[int, ...]) -> None:
        """Make the batch hold exactly the planned rows.  Others are kept outside (parked)."""
        batch = self._batch
        planned = set(decode)
        assert len(planned) == len(decode), "a sequence is planned twice"
        dropped = [row for row in batch.ids if row not in self._sequences]
        parked = []
        if decode:
            parked = [row for row in batch.ids if row in self._sequences and row not in planned]
        present = set(batch.ids)
        join: list[Row] = []
        for sequence_id in decode:
            if sequence_id in present:
                continue
            sequence = self._sequences[sequence_id]
            assert sequence.caches is not None
            join.append(
                Row(sequence_id=sequence_id, caches=sequence.caches, length=sequence.length)
            )
        if not (dropped or parked or join):
            return
        self._composition_changes()
        for row in batch.take_out(parked):
            self._sequences[row.sequence_id].caches = row.caches
            self._sequences[row.sequence_id].length = row.length
        batch.change(leave={*dropped, *parked}, join=join)
        for row in join:
            self._sequences[row.sequence_id].caches = None

    def _collect(self, failed: dict[int, str], begin: float) -> float:
        """Wait for the decode that runs; its tokens wait in their sequences from then on.

        Returns about how many seconds a decode takes; 0.0 if none ran.
        """
        decode, self._running = self._running, None
        if decode is None:
            return 0.0
        waited_from = time.perf_counter()
        values: Any = decode.drawn.tolist()
        now = time.perf_counter()
        # If it was over before, there is no telling when: the last measurement stands.
        if self._decode_s is None or now - waited_from > MEASURABLE_S:
            self._decode_s = now - max(self._started_s, begin - (self._decode_s or 0.0))
        lost = []
        for sequence_id, token in zip(self._batch.ids, values, strict=True):
            sequence = self._sequences.get(sequence_id)
            if token < 0:
                lost.append(sequence_id)
                if self._sequences.pop(sequence_id, None) is not None:
                    failed[sequence_id] = NOT_FINITE
            elif sequence is not None:
                sequence.token = sequence.waiting = token
        if lost:
            self._composition_changes()
            self._batch.change(leave=lost, poisoned=True)
            mx.eval(arrays_of(self._batch.caches))
        return self._decode_s

    def _hand_out(self, sequence_id: int, tokens: dict[int, int]) -> None:
        """The waiting token of a planned row; a row that is to join the batch may have none yet."""
        sequence = self._sequences.get(sequence_id)
        if sequence is not None and sequence.waiting is not None:
            tokens[sequence_id] = sequence.waiting
            sequence.waiting = None

    def _free_dropped(self) -> None:
        """With nothing to decode, nothing else would make room."""
        self._arrange(())
        # Unevaluated, rebuilt caches would keep the old ones.
        mx.eval(arrays_of(self._batch.caches))

    # -- prefill

    def _build_chunk(self, chunk: PrefillChunk, failed: dict[int, str]) -> list[mx.array]:
        """The arrays to evaluate; for the end of a prompt the drawn token ([1]) comes first."""
        if chunk.sampling is not None and (fault := check_params(chunk.sampling)) is not None:
            self._sequences.pop(chunk.sequence_id, None)
            failed[chunk.sequence_id] = fault
            return []
        if chunk.start == 0:
            assert chunk.sequence_id not in self._sequences, "the sequence exists already"
            self._sequences[chunk.sequence_id] = _Sequence(caches=new_caches(self._model))
        sequence = self._sequences[chunk.sequence_id]
        caches = sequence.caches
        assert caches is not None
        assert sequence.sampling is None, "the prompt is complete already"
        assert chunk.tokens, "a chunk must have tokens"
        assert sequence.length == chunk.start, "a chunk does not continue its sequence"
        sequence.length += len(chunk.tokens)
        assert sequence.length <= self._info.context_length, "a prompt outgrew the context"
        logits = self._head(self._model, mx.array([chunk.tokens], dtype=mx.uint32), caches)
        if chunk.sampling is None:
            return arrays_of(caches)  # the logits are never computed
        sequence.sampling = chunk.sampling
        sampler = BatchSampler([chunk.sampling], self._info.vocab_size)
        token = sampler.draw(logits, [sequence.length])
        return [_checked(logits, token), *arrays_of(caches)]

    def _finish_chunk(
        self,
        chunk: PrefillChunk,
        outputs: list[mx.array],
        tokens: dict[int, int],
        failed: dict[int, str],
    ) -> None:
        if not outputs:
            return
        caches = self._sequences[chunk.sequence_id].caches
        assert caches is not None
        self._evaluate(caches, None)
        mx.eval(outputs)
        if chunk.sampling is None:
            return
        values: Any = outputs[0].tolist()
        token = int(values[0])
        if token < 0:
            failed[chunk.sequence_id] = NOT_FINITE
            del self._sequences[chunk.sequence_id]
        else:
            self._sequences[chunk.sequence_id].token = tokens[chunk.sequence_id] = token


def _checked(logits: mx.array, tokens: mx.array) -> mx.array:
    """[B] tokens as int32, -1 where the chosen logit is not finite: one transfer for both."""
    chosen = mx.take_along_axis(logits, tokens[:, None], axis=-1)[:, 0]
    return mx.where(mx.isfinite(chosen), tokens.astype(mx.int32), -1)
