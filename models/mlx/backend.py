"""Engine steps on an mlx-lm model: batching, chunked prefill, sampling, kept prefixes."""

from __future__ import annotations

import time
from collections.abc import Mapping
from functools import partial
from typing import Any, Final

import mlx.core as mx

from models.engine import (
    EngineInfo,
    KeepBlock,
    PrefixData,
    StepPlan,
    StepResult,
    TokenLogprobs,
)
from models.mlx.batching import (
    DecodeBatch,
    arrays_of,
    kinds_of,
    new_caches,
    prefix_mode,
)
from models.mlx.block_copies import Planes
from models.mlx.decoder import Decoder
from models.mlx.head import LastPositionHead
from models.mlx.kv_probe import check_caches, widest_batch
from models.mlx.memory import kv_budget, kv_bytes_per_token, state_bytes
from models.mlx.prefiller import Prefiller, takes_padding
from models.mlx.prefixes import PrefixStore, planes_of, planes_of_row
from models.mlx.sequences import Abandoned, Sequences

# Steps between two returns of unused memory to the system.
CLEAR_EVERY: Final = 512
# Decodes shorter than this run ahead of the plan: what that can waste stays below it.
RUN_AHEAD_S: Final = 0.010

Note = str | int | float | bool | None


class MLXBackend:
    """Implements Backend.  Made, used and closed on one thread, which owns the model's arrays.

    ``kv_budget_bytes`` None takes what the machine has left.  Decodes that take less than
    ``run_ahead_s`` are started before they are asked for.  ``max_kv_size`` bounds every sequence's
    cache; ``kv_bits`` quantises caches; raises UnsupportedCaches where the model cannot work with
    such.  ``deterministic`` computes every sequence by itself.
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
        max_kv_size: int | None = None,
        kv_bits: int | None = None,
        kv_group_size: int = 64,
        deterministic: bool = False,
        fingerprint: str = "",
    ) -> None:
        self._model = model
        self._sequences: Sequences = {}
        self._steps = 0
        self._step = 0
        self._abandoned = -1  # the step that nobody wants; set by another thread
        kind: dict[str, Any] = {
            "max_kv_size": max_kv_size,
            "kv_bits": kv_bits,
            "kv_group_size": kv_group_size,
        }
        if max_kv_size is not None or kv_bits is not None:
            check_caches(model, **kind)
        make_caches = partial(new_caches, model, **kind)
        head = LastPositionHead(model)
        probe = make_caches()
        mx.eval(head(model, mx.array([[0, 0]]), probe), arrays_of(probe))
        self._store = PrefixStore(probe if prefix_mode(probe) == "blocks" else [])
        self._decoder = Decoder(
            model,
            self._sequences,
            vocab_size=vocab_size,
            context_length=context_length,
            run_ahead_s=run_ahead_s,
            together=not deterministic,
            unwanted=self._unwanted,
        )
        self._prefiller = Prefiller(
            model,
            head,
            self._sequences,
            self._store,
            make_caches=make_caches,
            vocab_size=vocab_size,
            context_length=context_length,
            together=takes_padding(probe) and not deterministic,
            unwanted=self._unwanted,
        )
        self._info = EngineInfo(
            model_type=model_type or str(getattr(model, "model_type", "unknown")),
            vocab_size=vocab_size,
            context_length=context_length,
            kv_bytes_per_token=kv_bytes_per_token(probe),
            kv_budget_bytes=kv_budget() if kv_budget_bytes is None else kv_budget_bytes,
            max_batch=widest_batch(model, **kind),
            prefix=prefix_mode(probe),
            state_bytes=state_bytes(probe),
            fingerprint=fingerprint,
            notes={
                **(notes or {}),
                "kv_caches": kinds_of(probe),
                "kv_bytes_per_token": kv_bytes_per_token(probe),
            },
        )

    @property
    def info(self) -> EngineInfo:
        return self._info

    def step(self, plan: StepPlan) -> StepResult:
        """See models.engine.StepPlan.  Any exception leaves the backend in need of a reset."""
        self._step = plan.step
        exported = self._house_keeping(plan)
        try:
            return self._run(plan, exported)
        except Abandoned:
            # Half-evaluated caches are of no use; their sequences will be dropped.
            self._decoder.clear()
            return StepResult(step=plan.step, tokens={}, exported=exported, abandoned=True)

    def abandon(self, step: int) -> None:
        self._abandoned = step

    def _unwanted(self) -> bool:
        return self._abandoned == self._step

    def _house_keeping(self, plan: StepPlan) -> tuple[PrefixData, ...]:
        self._store.forget(plan.forget)
        for data in plan.load:
            self._store.load(data)
        exported = self._keep(plan.keep) if plan.keep else ()
        for sequence_id in plan.drop:
            del self._sequences[sequence_id]
        return exported

    def _keep(self, keeps: tuple[KeepBlock, ...]) -> tuple[PrefixData, ...]:
        # Caches that a decode was built on ahead are one token further than anybody knows.
        self._decoder.composition_changes()
        by_sequence: dict[int, list[KeepBlock]] = {}
        for keep in keeps:
            by_sequence.setdefault(keep.sequence_id, []).append(keep)
        outputs = []
        for sequence_id, some in by_sequence.items():
            planes, held = self._planes(sequence_id)
            outputs += self._store.keep_blocks(planes, some, held)
        mx.eval(outputs)
        return tuple(self._store.export(keep.handle) for keep in keeps if keep.export)

    def _planes(self, sequence_id: int) -> tuple[Planes, int]:
        sequence = self._sequences[sequence_id]
        if sequence.caches is not None:
            return planes_of(sequence.caches), sequence.length
        batch = self._decoder.batch
        if isinstance(batch, DecodeBatch):
            return planes_of_row(batch, sequence_id)
        caches, length = batch.caches_of(sequence_id)
        return planes_of(caches), length

    def _run(self, plan: StepPlan, exported: tuple[PrefixData, ...]) -> StepResult:
        begin = time.perf_counter()
        decoder = self._decoder
        tokens: dict[int, int] = {}
        logprobs: dict[int, TokenLogprobs] = {}
        failed: dict[int, str] = {}
        if not decoder.running:
            decoder.start(plan.decode)
        # Graphs are built while the decode runs, and evaluated after it.
        passes = self._prefiller.build(plan.prefill, failed)
        decoder.build_ahead(plan)
        spent = decoder.collect(failed, begin)
        decoder.hand_out(plan, tokens, logprobs)
        if not plan.decode:
            decoder.free_dropped()
        decoded = time.perf_counter()
        for one in passes:
            self._prefiller.finish(one, tokens, logprobs, failed)
        if len(passes) > 1:  # they may have run in another order
            order = [*plan.decode, *(chunk.sequence_id for chunk in plan.prefill)]
            tokens = {one: tokens[one] for one in order if one in tokens}
        decoder.run_ahead(plan)
        self._steps += 1
        if self._steps % CLEAR_EVERY == 0:
            mx.clear_cache()
        return StepResult(
            step=plan.step,
            tokens=tokens,
            logprobs=logprobs,
            failed=failed,
            exported=exported,
            decode_s=spent,
            prefill_s=time.perf_counter() - decoded if plan.prefill else 0.0,
        )

    def reset(self) -> None:
        self._sequences.clear()
        self._store.clear()
        self._decoder.clear()
        mx.clear_cache()

    def close(self) -> None:
        self.reset()
        self._model = None
