"""Tiny models, what plain mlx-lm makes of a prompt, and short ways to drive a backend."""

from __future__ import annotations

import functools
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import mlx.core as mx

from models.engine import PrefillChunk, StepPlan, StepResult
from models.mlx.backend import MLXBackend
from models.mlx.lm import mlx_lm_utils
from models.sampling import GREEDY, SamplingParams
from tools.tiny_model import CONTEXT_LENGTH, VARIANTS, VOCAB_SIZE, build_tiny_model

__all__ = ["CONTEXT_LENGTH", "VARIANTS", "VOCAB_SIZE"]

mx.disable_compile()  # it would call a C++ compiler


@functools.cache
def _folder() -> tempfile.TemporaryDirectory[str]:
    return tempfile.TemporaryDirectory(prefix="tiny-models-")


@functools.cache
def model_path(variant: str) -> Path:
    layers = 2 if variant in ("plain", "quantized") else 3
    return build_tiny_model(Path(_folder().name) / variant, variant=variant, layers=layers)


def load(variant: str) -> Any:
    """A new model object, on the calling thread."""
    model, _ = mlx_lm_utils().load_model(model_path(variant))
    return model


def make_backend(model: Any, **changes: Any) -> MLXBackend:
    """Without running ahead unless told otherwise: each step then gives each row a token."""
    settings = {
        "vocab_size": VOCAB_SIZE,
        "context_length": CONTEXT_LENGTH,
        "run_ahead_s": 0.0,
        **changes,
    }
    return MLXBackend(model, **settings)


def solo_tokens(model: Any, prompt: Sequence[int], count: int) -> list[int]:
    """Greedy tokens of one sequence on its own, by mlx-lm itself."""
    from mlx_lm.generate import generate_step

    steps = generate_step(mx.array(list(prompt)), model, max_tokens=count)
    return [int(token) for token, _ in steps]


def prompt_of(number: int, length: int) -> tuple[int, ...]:
    return tuple((53 * number + 29 * place + place * place) % 500 for place in range(length))


def prefill(
    backend: MLXBackend,
    sequence_id: int,
    prompt: Sequence[int],
    sampling: SamplingParams = GREEDY,
    *,
    drop: tuple[int, ...] = (),
) -> StepResult:
    """The whole prompt in one step."""
    chunk = PrefillChunk(sequence_id=sequence_id, tokens=tuple(prompt), start=0, sampling=sampling)
    return backend.step(StepPlan(step=0, drop=drop, prefill=(chunk,)))


def decode(backend: MLXBackend, *ids: int, drop: tuple[int, ...] = ()) -> StepResult:
    return backend.step(StepPlan(step=0, drop=drop, decode=ids))


def generate(
    backend: MLXBackend, requests: dict[int, tuple[Sequence[int], SamplingParams]], count: int
) -> dict[int, list[int]]:
    """``count`` tokens of each request, all decoding together; they are dropped afterwards."""
    out: dict[int, list[int]] = {}
    for sequence_id, (prompt, sampling) in requests.items():
        result = prefill(backend, sequence_id, prompt, sampling)
        out[sequence_id] = [result.tokens[sequence_id]]
    for _ in range(count - 1):
        for sequence_id, token in decode(backend, *requests).tokens.items():
            out[sequence_id].append(token)
    decode(backend, drop=tuple(requests))
    return out
