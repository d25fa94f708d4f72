"""Arithmetic on one side (keys or values) of a KV cache, quantised or not.

A side is one array [B, H, L, D] or, when quantised, a tuple of them (packed, scales, biases) with
the same B, H and L.  L counts columns, one per token.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import mlx.core as mx

Side = Any  # mx.array | tuple[mx.array, ...]


def parts(side: Side) -> tuple[mx.array, ...]:
    return side if isinstance(side, tuple) else (side,)


def mapped(function: Callable[..., mx.array], *sides: Side) -> Side:
    """The side made of ``function`` of the parts of one or more sides of the same kind."""
    if isinstance(sides[0], tuple):
        return tuple(function(*part) for part in zip(*sides, strict=True))
    return function(*sides)


def columns_of(side: Side) -> int:
    return int(parts(side)[0].shape[2])


def cut(side: Side, rows: Any, columns: slice) -> Side:
    return mapped(lambda part: part[rows, :, columns], side)


def copied(side: Side, rows: Any, columns: slice) -> Side:
    """Like :func:`cut`; the result does not keep the rest of ``side`` alive."""
    return mapped(lambda part: mx.contiguous(part[rows, :, columns]), side)


def blank(like: Side, rows: int, columns: int) -> Side:
    """Zeros: what padding holds is multiplied by zero weights, so it must be finite."""
    return mapped(
        lambda part: mx.zeros((rows, part.shape[1], columns, part.shape[3]), part.dtype), like
    )


def assign(side: Side, rows: Any, columns: slice, new: Side) -> None:
    """Overwrite a part of ``side``, in place where nothing else refers to its data."""
    for part, values in zip(parts(side), parts(new), strict=True):
        part[rows, :, columns] = values


def with_room(side: Side | None, like: Side, used: int, needed: int, columns: int) -> Side:
    """``side`` if it has ``needed`` columns, else with ``columns`` of them.

    The first ``used`` keep their content.  A new side has the rows of ``like``.
    """
    if side is None:
        return blank(like, parts(like)[0].shape[0], columns)
    if columns_of(side) >= needed:
        return side
    more = blank(side, parts(side)[0].shape[0], columns - used)
    return mapped(lambda old, new: mx.concatenate([old[:, :, :used], new], axis=2), side, more)
