"""The decode batch at work: one token per row and step, built ahead, started ahead when short."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, Final

import mlx.core as mx

from models.engine import StepPlan, TokenLogprobs
from models.mlx.batching import DecodeBatch, Row, arrays_of, remember, share_offsets
from models.mlx.heap import evaluate_in_turn
from models.mlx.sampler import BatchSampler, Draw
from models.mlx.sequences import NOT_FINITE, Sequences, checked, evaluate, host_values
from models.mlx.solo import SoloBatch

# A shorter wait does not show whether the decode ended just now.
MEASURABLE_S: Final = 0.0001


@dataclass(slots=True, kw_only=True)
class _Decode:
    """One decode of the whole batch, built and perhaps not started.

    ``drawn`` is [B], -1 for a failed row; ``draw.tokens`` [B] is the input of the decode after it.
    ``undo`` takes the building back.
    """

    drawn: mx.array
    draw: Draw
    undo: Callable[[], None] | None

    @property
    def outputs(self) -> list[mx.array]:
        extra = [] if self.draw.logprobs is None else self.draw.logprobs.arrays
        return [self.drawn, self.draw.tokens, *extra]


class Decoder:
    """``sequences`` belong to the backend; rows of the batch are those without caches.

    ``together`` False computes each row by itself: slower, and exactly what it would be alone.
    ``unwanted`` tells whether the running step has been given up.
    """

    def __init__(
        self,
        model: Any,
        sequences: Sequences,
        *,
        vocab_size: int,
        context_length: int,
        run_ahead_s: float,
        together: bool,
        unwanted: Callable[[], bool],
    ) -> None:
        self._model = model
        self._sequences = sequences
        self._vocab_size = vocab_size
        self._context_length = context_length
        self._run_ahead_s = run_ahead_s
        self._together = together
        self._unwanted = unwanted
        self._started_s = 0.0
        self._decode_s: float | None = None  # what a decode has been taking
        self.clear()

    def clear(self) -> None:
        """Forget the batch and whatever was built on it."""
        self.batch: DecodeBatch | SoloBatch = DecodeBatch() if self._together else SoloBatch()
        self._sampler: BatchSampler | None = None  # of the batch as it is
        self._tokens: mx.array | None = None  # [B], the inputs of the next decode
        self._ahead: _Decode | None = None  # built for the step after the running one
        self._running: _Decode | None = None  # started, not collected

    @property
    def running(self) -> bool:
        return self._running is not None

    def start(self, planned: tuple[int, ...]) -> None:
        """Start one decode of all planned rows that have no token waiting."""
        rows = tuple(one for one in planned if self._sequences[one].waiting is None)
        if not rows:
            return
        self.arrange(rows)
        assert max(self.batch.lengths) < self._context_length, "a sequence outgrew the context"
        self._start(self._ahead or self._build())

    def _start(self, decode: _Decode) -> None:
        self._ahead = decode.undo = None  # so that caches are updated in place
        self.batch.advance()
        self._tokens = decode.draw.tokens
        self._running, self._started_s = decode, time.perf_counter()
        evaluate(self.batch.caches, self._decode_s, self._unwanted)
        mx.async_eval(decode.outputs)  # type: ignore[no-untyped-call]

    def build_ahead(self, plan: StepPlan) -> None:
        """Build the decode after the running one, if the batch stays as it is, as far as one sees.

        Building takes a few per cent of a step; if the batch then changes after all, it is undone.
        """
        if any(chunk.sampling for chunk in plan.prefill):
            return  # its sequence joins in the next step
        if self._running is not None and set(plan.decode) == set(self.batch.ids):
            self._ahead = self._build()

    def run_ahead(self, plan: StepPlan) -> None:
        """Start the next decode before it is asked for, if it is a short one.

        The way from one step's result to the next plan takes a part of a millisecond, in which the
        device would stand still.  The price is at most one more decode of a row that ends or is
        cancelled, hence the bound on its length.
        """
        ahead, cost = self._ahead, self._decode_s
        if ahead is None or plan.prefill or cost is None or cost > self._run_ahead_s:
            return
        if max(self.batch.lengths) < self._context_length:
            self._start(ahead)

    def _build(self) -> _Decode:
        """Build the next decode of the batch as it is, without starting it."""
        batch = self.batch
        if self._sampler is None or self._tokens is None:
            rows = [self._sequences[sequence_id] for sequence_id in batch.ids]
            settings = [row.sampling for row in rows if row.sampling is not None]
            assert len(settings) == len(rows), "only complete prompts can decode"
            self._sampler = BatchSampler(
                settings,
                self._vocab_size,
                histories=[row.tokens for row in rows],
                generated=[row.generated for row in rows],
            )
            self._tokens = mx.array([row.token for row in rows], dtype=mx.uint32)
        undo = remember(batch.caches)
        logits = self._forward(self._tokens)
        share_offsets(batch.caches)
        # The token at hand will be cached, and the drawn one stands behind it.
        draw = self._sampler.draw(logits, [length + 1 for length in batch.lengths])
        return _Decode(drawn=checked(logits, draw.tokens), draw=draw, undo=undo)

    def _forward(self, tokens: mx.array) -> mx.array:
        """[B] tokens -> [B, V] logits."""
        batch = self.batch
        if isinstance(batch, SoloBatch):
            return batch.forward(self._model, tokens)
        logits: mx.array = self._model(tokens[:, None], cache=batch.caches)
        return logits[:, -1, :]

    def composition_changes(self) -> None:
        """Undo what was built on the batch as it was."""
        if self._ahead is not None and self._ahead.undo is not None:
            self._ahead.undo()
        self._sampler = self._tokens = self._ahead = None

    def arrange(self, decode: tuple[int, ...]) -> None:
        """Make the batch hold exactly the planned rows.  Others are kept outside (parked)."""
        batch = self.batch
        planned = set(decode)
        assert len(planned) == len(decode), "a sequence is planned twice"
        dropped = [row for row in batch.ids if row not in self._sequences]
        parked = []
        if decode:
            parked = [row for row in batch.ids if row in self._sequences and row not in planned]
        present = set(batch.ids)
        join = [one for one in decode if one not in present]
        if not (dropped or parked or join):
            return
        self.composition_changes()
        self._regroup({*dropped, *parked}, parked, join)
        if isinstance(batch, DecodeBatch):
            evaluate_in_turn(batch.caches)

    def _regroup(self, leave: set[int], parked: list[int], join: list[int]) -> None:
        """Nothing holds on to the former caches when this returns."""
        batch = self.batch
        for row in batch.take_out(parked):
            self._sequences[row.sequence_id].caches = row.caches
            self._sequences[row.sequence_id].length = row.length
        rows = []
        for sequence_id in join:
            sequence = self._sequences[sequence_id]
            assert sequence.caches is not None
            rows.append(
                Row(sequence_id=sequence_id, caches=sequence.caches, length=sequence.length)
            )
        batch.change(leave=leave, join=rows)
        for sequence_id in join:
            self._sequences[sequence_id].caches = None

    def collect(self, failed: dict[int, str], begin: float) -> float:
        """Wait for the decode that runs; its tokens wait in their sequences from then on.

        Returns about how many seconds a decode takes; 0.0 if none ran.
        """
        decode, self._running = self._running, None
        if decode is None:
            return 0.0
        waited_from = time.perf_counter()
        values = host_values(decode.drawn)
        now = time.perf_counter()
        # If it was over before, there is no telling when: the last measurement stands.
        if self._decode_s is None or now - waited_from > MEASURABLE_S:
            self._decode_s = now - max(self._started_s, begin - (self._decode_s or 0.0))
        logprobs = {} if decode.draw.logprobs is None else decode.draw.logprobs.values()
        lost = []
        for row, (sequence_id, token) in enumerate(zip(self.batch.ids, values, strict=True)):
            sequence = self._sequences.get(sequence_id)
            if token < 0:
                lost.append(sequence_id)
                if self._sequences.pop(sequence_id, None) is not None:
                    failed[sequence_id] = NOT_FINITE
            elif sequence is not None:
                sequence.draw(token, logprobs.get(row))
        if lost:
            self.composition_changes()
            self.batch.change(leave=lost, poisoned=True)
            mx.eval(arrays_of(self.batch.caches))
        return self._decode_s

    def hand_out(
        self,
        plan: StepPlan,
        tokens: dict[int, int],
        logprobs: dict[int, TokenLogprobs],
    ) -> None:
        """The waiting tokens of planned rows; a row that is to join the batch may have none yet."""
        self._enforce(plan.force)
        for sequence_id in plan.decode:
            sequence = self._sequences.get(sequence_id)
            if sequence is None or sequence.waiting is None:
                continue
            tokens[sequence_id] = sequence.waiting
            if sequence.logprobs is not None:
                logprobs[sequence_id] = sequence.logprobs
            sequence.waiting = sequence.logprobs = None

    def _enforce(self, force: Mapping[int, int]) -> None:
        for sequence_id, token in force.items():
            sequence = self._sequences.get(sequence_id)
            # A row without a token is planned, and forced, again.
            if sequence is None or sequence.waiting is None or sequence.waiting == token:
                continue
            sequence.replace(token)
            self.composition_changes()  # what was built went on from the token that was drawn

    def free_dropped(self) -> None:
        """With nothing to decode, nothing else would make room."""
        self.arrange(())
        # Unevaluated, rebuilt caches would keep the old ones.
        mx.eval(arrays_of(self.batch.caches))
