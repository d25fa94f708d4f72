"""Logits of a prompt's last position without the output head over all the others.

mlx-lm's models return logits for every position; over a long prompt most of that work is for
nothing.  Most of them are a body (``model.model``) and a head, which can be called apart.  Whether
that gives the same logits is tried out once, at load.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import mlx.core as mx
import mlx.nn as nn
from mlx_lm.models.cache import make_prompt_cache

#: token ids [1, n] and caches -> logits [1, V] of the last position
LastLogits = Callable[[mx.array, list[Any]], mx.array]


def last_logits(model: nn.Module) -> LastLogits:
    head = _head(model)
    if head is not None and _agrees(model, head):
        body = model.model

        def split(ids: mx.array, caches: list[Any]) -> mx.array:
            return head(body(ids, cache=caches)[:, -1:, :])[:, -1, :]

        return split

    def whole(ids: mx.array, caches: list[Any]) -> mx.array:
        logits: mx.array = model(ids, cache=caches)
        return logits[:, -1, :]

    return whole


def _head(model: nn.Module) -> Callable[[mx.array], mx.array] | None:
    body = getattr(model, "model", None)
    if not isinstance(body, nn.Module):
        return None
    head = getattr(model, "lm_head", None)
    if isinstance(head, nn.Module):
        return head
    embedding = getattr(body, "embed_tokens", None)
    return embedding.as_linear if isinstance(embedding, nn.Embedding) else None


def _agrees(model: nn.Module, head: Callable[[mx.array], mx.array]) -> bool:
    ids = mx.array([[0, 1, 2]], mx.int32)
    want = model(ids, cache=make_prompt_cache(model))[:, -1, :]
    try:
        got = head(model.model(ids, cache=make_prompt_cache(model))[:, -1:, :])[:, -1, :]
    except (TypeError, AttributeError, ValueError, IndexError):
        return False  # another signature: this architecture is not split
    return bool(got.shape == want.shape) and bool(mx.allclose(got, want, 1e-4, 1e-5).item())
