"""Rotary position embedding from tables, for float32 on MLX's CPU backend.

MLX's CPU fallback computes the sines and cosines anew in every layer, with scalar code; in a decode
step that costs more than the rotation itself.  Here they are looked up.  The tables hold MLX's own
values (its function applied to unit vectors), so the results are the same numbers.
"""

from __future__ import annotations

from typing import Any

import mlx.core as mx
import mlx.nn as nn

#: Tables are made for contexts up to this length (64 MB at width 128); longer ones are left alone.
MAX_POSITIONS = 65536


class RopeTables:
    """cos and signed sin, [P, D] each, for one kind of rotation; shared by all layers.

    The rows of the last array of offsets are kept, since every layer asks for the same ones.
    """

    def __init__(self, rope: nn.RoPE, positions: int) -> None:
        self.positions = positions
        self.traditional = bool(rope.traditional)
        self.width = width = int(rope.dims)
        first = mx.arange(width) % 2 == 0 if self.traditional else mx.arange(width) < width // 2
        ones = mx.broadcast_to(first.astype(mx.float32), (1, 1, positions, width))
        turned = rope(ones)[0, 0]  # cos where `first`, sin at the partner's place
        partner = self.swap(turned)
        self._cos = mx.where(first, turned, partner)
        self._sin = mx.where(first, -partner, turned)
        mx.eval(self._cos, self._sin)
        self._last: tuple[mx.array, int, mx.array, mx.array] | None = None

    def swap(self, x: mx.array) -> mx.array:
        """Each element's partner in the rotation."""
        half = x.shape[-1] // 2
        if self.traditional:
            pairs = x.reshape(*x.shape[:-1], half, 2)
            return pairs[..., ::-1].reshape(x.shape)
        return mx.concatenate([x[..., half:], x[..., :half]], axis=-1)

    def rows(self, offset: Any, count: int) -> tuple[mx.array, mx.array]:
        """cos and sin that broadcast against [B, H, count, D]."""
        if not isinstance(offset, mx.array):
            return self._cos[offset : offset + count], self._sin[offset : offset + count]
        if self._last is not None and self._last[0] is offset and self._last[1] == count:
            return self._last[2], self._last[3]
        places = offset.reshape(-1, 1) + mx.arange(count)
        cos, sin = self._cos[places][:, None], self._sin[places][:, None]
        self._last = (offset, count, cos, sin)
        return cos, sin


class TableRoPE(nn.Module):  # type: ignore[misc]
    """Stands in for one ``nn.RoPE``; what the tables do not cover goes to the original.

    That is: other dtypes, a rotation of a part of the head, positions behind the context.
    """

    def __init__(self, original: nn.RoPE, tables: RopeTables) -> None:
        super().__init__()
        self._original = original
        self._tables = tables

    def __call__(self, x: mx.array, offset: Any = 0) -> mx.array:
        """x [B, H, N, D]; ``offset`` an int or an array [B] of each row's first position."""
        tables = self._tables
        count = x.shape[-2]
        beyond = not isinstance(offset, mx.array) and offset + count > tables.positions
        if x.dtype != mx.float32 or x.ndim != 4 or x.shape[-1] != tables.width or beyond:
            plain: mx.array = self._original(x, offset=offset)
            return plain
        cos, sin = tables.rows(offset, count)
        return x * cos + tables.swap(x) * sin


def install(model: nn.Module, context_length: int) -> None:
    """Replace every plain ``nn.RoPE``.  Idempotent.

    ``context_length`` is the longest sequence; arrays of offsets must stay below it.
    """
    if context_length > MAX_POSITIONS:
        return
    tables: dict[tuple[Any, ...], RopeTables] = {}
    for module in model.modules():
        rope = getattr(module, "rope", None)
        if not isinstance(rope, nn.RoPE) or type(rope) is not nn.RoPE or rope.dims % 2:
            continue
        kind = (rope.dims, rope.traditional, rope.base, rope.scale)
        if kind not in tables:
            # One more than the context: a step may be built for the position behind the last.
            tables[kind] = RopeTables(rope, context_length + 1)
        module.rope = TableRoPE(rope, tables[kind])


def uninstall(model: nn.Module) -> None:
    for module in model.modules():
        rope = getattr(module, "rope", None)
        if isinstance(rope, TableRoPE):
            module.rope = rope._original
