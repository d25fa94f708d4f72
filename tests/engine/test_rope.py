"""Table look-up gives the very numbers of MLX's own rotary embedding."""

from __future__ import annotations

import mlx.core as mx
import mlx.nn as nn
import pytest

from models.mlx.rope import RopeTables, TableRoPE, install, uninstall

pytestmark = pytest.mark.mlx

POSITIONS = 64


def pair(traditional: bool, scale: float = 1.0) -> tuple[nn.RoPE, TableRoPE]:
    original = nn.RoPE(16, traditional=traditional, base=10000.0, scale=scale)
    return original, TableRoPE(original, RopeTables(original, POSITIONS))


def queries(batch: int, count: int, width: int = 16) -> mx.array:
    mx.random.seed(3)
    return mx.random.normal((batch, 4, count, width))


def same(a: mx.array, b: mx.array) -> bool:
    return a.shape == b.shape and bool(mx.allclose(a, b, 1e-6, 1e-6).item())


@pytest.mark.parametrize("traditional", [False, True])
@pytest.mark.parametrize("scale", [1.0, 0.5])
@pytest.mark.parametrize(("offset", "count"), [(0, 1), (0, 9), (7, 5), (55, 9)])
def test_prefill_positions(traditional: bool, scale: float, offset: int, count: int) -> None:
    original, table = pair(traditional, scale)
    x = queries(2, count)
    assert same(table(x, offset=offset), original(x, offset=offset))


@pytest.mark.parametrize("traditional", [False, True])
@pytest.mark.parametrize("count", [1, 3])
def test_a_batch_at_different_positions(traditional: bool, count: int) -> None:
    original, table = pair(traditional)
    x, offsets = queries(3, count), mx.array([0, 20, 60])
    assert same(table(x, offset=offsets), original(x, offset=offsets))


def test_new_offsets_are_not_mistaken_for_the_last_ones() -> None:
    original, table = pair(True)
    x = queries(2, 1)
    for start in (3, 4, 5):
        offsets = mx.array([start, start + 9])
        for _ in range(2):  # the second time from what was kept
            assert same(table(x, offset=offsets), original(x, offset=offsets))


def test_what_the_tables_do_not_cover_goes_to_the_original() -> None:
    original, table = pair(False)
    beyond = queries(1, 4)
    assert same(table(beyond, offset=POSITIONS - 2), original(beyond, offset=POSITIONS - 2))
    wide = queries(1, 2, width=24)  # only a part of the head is rotated
    assert same(table(wide, offset=1), original(wide, offset=1))
    half = queries(1, 2).astype(mx.bfloat16)
    assert table(half, offset=1).dtype == mx.bfloat16


class Layer(nn.Module):
    def __init__(self, rope: nn.Module) -> None:
        super().__init__()
        self.rope = rope


class Stack(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = [
            Layer(nn.RoPE(16, base=1e4)),
            Layer(nn.RoPE(16, base=1e4)),
            Layer(nn.RoPE(16, base=1e5)),
            Layer(nn.Linear(2, 2)),
        ]


def test_layers_of_one_kind_share_tables_and_others_are_left_alone() -> None:
    model = Stack()
    install(model, POSITIONS)
    install(model, POSITIONS)
    first, second, third, other = (layer.rope for layer in model.layers)
    assert isinstance(first, TableRoPE)
    assert first._tables is second._tables
    assert first._tables is not third._tables
    assert type(other) is nn.Linear
    uninstall(model)
    assert type(model.layers[0].rope) is nn.RoPE


def test_very_long_contexts_are_left_alone() -> None:
    model = Stack()
    install(model, 10**6)
    assert type(model.layers[0].rope) is nn.RoPE
