"""The MLX backend: mlx-lm's models and caches, driven one step plan at a time."""

from __future__ import annotations

import time
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, cast

import mlx.core as mx
import mlx.nn as nn
from mlx_lm.models.cache import make_prompt_cache

from models.engine import EngineInfo, PrefillChunk, StepPlan, StepResult
from models.mlx.batch import DecodeBatch, Row
from models.mlx.head import last_logits
from models.mlx.kv import Caches, bytes_per_token, can_batch, state_arrays
from models.mlx.sampler import BatchSampler

BROKEN_LOGITS = "the model gave logits that are not numbers"


@dataclass(slots=True)
class _Prompt:
    """A sequence whose prompt is being evaluated."""

    caches: Caches
    length: int = 0


class MLXBackend:
    """Implements :class:`models.backend.Backend`.  Everything happens on the calling thread."""

    def __init__(
        self,
        model: nn.Module,
        *,
        model_type: str,
        vocab_size: int,
        context_length: int,
        kv_budget_bytes: int | None = None,
        notes: Mapping[str, str | int | float | bool | None] | None = None,
    ) -> None:
        self._model = model
        self._last_logits = last_logits(model)
        caches = self._probe()
        self._info = EngineInfo(
            model_type=model_type,
            vocab_size=vocab_size,
            context_length=context_length,
            kv_bytes_per_token=bytes_per_token(caches),
            kv_budget_bytes=kv_budget_bytes,
            max_batch=None if can_batch(make_prompt_cache(model)) else 1,
            notes=notes or {},
        )
        self._batch = DecodeBatch(model, vocab_size)
        self._prompts: dict[int, _Prompt] = {}
        self._rows: dict[int, Row] = {}

    def _probe(self) -> Caches:
        """Run two tokens through the model, which also warms it up."""
        caches: Caches = make_prompt_cache(self._model)
        mx.eval(self._last_logits(mx.array([[0, 0]], mx.int32), caches))
        return caches

    @property
    def info(self) -> EngineInfo:
        return self._info

    def step(self, plan: StepPlan) -> StepResult:
        self._drop(plan.drop)
        tokens: dict[int, int] = {}
        failed: dict[int, str] = {}
        started = time.perf_counter()
        if plan.decode:
            rows = [self._rows[sequence_id] for sequence_id in plan.decode]
            for row, token in zip(rows, self._batch.step(rows), strict=True):
                self._settle(row.sequence_id, token, tokens, failed)
        decoded = time.perf_counter()
        for chunk in plan.prefill:
            token_or_none = self._prefill(chunk)
            if token_or_none is not None:
                self._settle(chunk.sequence_id, token_or_none, tokens, failed)
        if failed:
            self._drop(tuple(failed))
        return StepResult(
            step=plan.step,
            tokens=tokens,
            failed=failed,
            decode_s=decoded - started,
            prefill_s=time.perf_counter() - decoded,
        )

    @staticmethod
    def _settle(
        sequence_id: int, token: int, tokens: dict[int, int], failed: dict[int, str]
    ) -> None:
        if token < 0:
            failed[sequence_id] = BROKEN_LOGITS
        else:
            tokens[sequence_id] = token

    def _prefill(self, chunk: PrefillChunk) -> int | None:
        """Evaluate one chunk; the drawn token if it ends the prompt."""
        if chunk.start == 0:
            self._prompts[chunk.sequence_id] = _Prompt(make_prompt_cache(self._model))
        prompt = self._prompts[chunk.sequence_id]
        assert prompt.length == chunk.start, (prompt.length, chunk.start)
        assert chunk.start + len(chunk.tokens) <= self._info.context_length
        ids = mx.array([chunk.tokens], mx.int32)
        prompt.length += len(chunk.tokens)
        if chunk.sampling is None:
            # The logits are never evaluated, so the output head costs nothing.
            self._model(ids, cache=prompt.caches)
            mx.eval(state_arrays(prompt.caches))
            return None
        logits = self._last_logits(ids, prompt.caches)
        drawn = BatchSampler([chunk.sampling], self._info.vocab_size).draw(logits, [0])
        mx.eval(drawn, state_arrays(prompt.caches))
        token = cast(list[int], drawn.tolist())[0]
        del self._prompts[chunk.sequence_id]
        self._rows[chunk.sequence_id] = Row(
            sequence_id=chunk.sequence_id,
            sampling=chunk.sampling,
            caches=prompt.caches,
            length=prompt.length,
            last_token=token,
            drawn=1,
        )
        return token

    def _drop(self, sequence_ids: tuple[int, ...]) -> None:
        if not sequence_ids:
            return
        for sequence_id in sequence_ids:
            self._prompts.pop(sequence_id, None)
            self._rows.pop(sequence_id, None)
        self._batch.forget(set(sequence_ids))

    def reset(self) -> None:
        self._batch.clear()
        self._prompts.clear()
        self._rows.clear()
        mx.clear_cache()

    def close(self) -> None:
        self.reset()

    @property
    def sequences(self) -> frozenset[int]:
        """Sequences that hold a cache, for tests."""
        return frozenset(self._prompts) | frozenset(self._rows)

    def memory(self) -> dict[str, Any]:
        """Bytes in use and cached by MLX's allocator."""
        return {"active": mx.get_active_memory(), "cache": mx.get_cache_memory()}
