"""A correction to attention in mlx-lm that decodes wrongly in a batch.

Where several query heads share a key head, Gemma 2's own attention has scores
[B, K, R, N, L] and adds the batch's mask [B, 1, N, L] to them as it is.  That fails, or for B = K
silently gives each row the masks of all rows.  The mask needs another axis.
"""

from __future__ import annotations

from typing import Any

import mlx.core as mx

from models.mlx.lm import mlx_lm_utils

mlx_lm_utils()

from mlx_lm.models import gemma2  # noqa: E402


def install() -> None:
    """Idempotent."""
    original = gemma2.Attention.__call__
    if getattr(original, "takes_batch_masks", False):
        return

    def attention(self: Any, x: mx.array, mask: mx.array | None = None, cache: Any = None) -> Any:
        if mask is not None and mask.ndim == 4 and self.repeats > 1:
            mask = mask[:, :, None]
        return original(self, x, mask, cache)

    attention.takes_batch_masks = True  # type: ignore[attr-defined]
    gemma2.Attention.__call__ = attention
