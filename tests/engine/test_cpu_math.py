"""The CPU versions of attention and SwiGLU against MLX's own."""

from __future__ import annotations

import mlx.core as mx
import pytest
from mlx_lm.models.base import create_causal_mask

from models.mlx import cpu_math

pytestmark = pytest.mark.mlx


def arrays(n: int, length: int, heads: int, groups: int) -> tuple[mx.array, mx.array, mx.array]:
    mx.random.seed(7)
    q = mx.random.normal((3, heads, n, 16)) * 3
    k = mx.random.normal((3, groups, length, 16)) * 3
    v = mx.random.normal((3, groups, length, 24))
    return q, k, v


def assert_same(got: mx.array, want: mx.array) -> None:
    assert got.shape == want.shape
    assert float(mx.max(mx.abs(got - want)).item()) < 2e-5


@pytest.mark.parametrize(("heads", "groups"), [(4, 4), (4, 2), (9, 3), (4, 1)])
@pytest.mark.parametrize("n", [1, 5])
@pytest.mark.parametrize("kind", ["none", "causal", "padding", "additive", "per head"])
def test_attention_equals_the_original(heads: int, groups: int, n: int, kind: str) -> None:
    length = 11
    q, k, v = arrays(n, length, heads, groups)
    mask: mx.array | str | None = None
    match kind:
        case "causal":
            mask = "causal"
        case "padding":
            padding = mx.array([0, 3, 5])
            mask = create_causal_mask(n, offset=length - n, left_padding=padding)
        case "additive":
            mask = mx.random.normal((n, length))
        case "per head":
            mask = mx.random.uniform(shape=(3, heads, n, length)) > 0.3
            mask = mask | (mx.arange(length) == 0)
    want = mx.fast.scaled_dot_product_attention(q, k, v, scale=0.25, mask=mask)
    assert_same(cpu_math.attention(q, k, v, None, 0.25, mask), want)


@pytest.mark.parametrize(("n", "length"), [(64, 64), (65, 65), (150, 150), (130, 221)])
def test_long_causal_prompts_equal_the_original(n: int, length: int) -> None:
    """They are computed in blocks of queries."""
    q, k, v = arrays(n, length, 6, 2)
    want = mx.fast.scaled_dot_product_attention(q, k, v, scale=0.25, mask="causal")
    assert_same(cpu_math.attention(q, k, v, None, 0.25, "causal"), want)


def test_large_scores_do_not_overflow() -> None:
    q, k, v = arrays(2, 6, 4, 2)
    want = mx.fast.scaled_dot_product_attention(q * 1e3, k, v, scale=1.0)
    got = cpu_math.attention(q * 1e3, k, v, None, 1.0, None)
    assert not bool(mx.any(mx.isnan(got)).item())
    assert_same(got, want)


def test_swiglu_equals_the_original_also_far_out() -> None:
    gate = mx.array([-1e4, -200.0, -88.0, -1.0, -0.0, 0.5, 60.0, 1e4])
    x = mx.array([1.0, -2.0, 3.0, 4.0, 5.0, -6.0, 7.0, 8.0])
    want = gate * mx.sigmoid(gate) * x
    got = cpu_math.swiglu(gate, x)
    assert bool(mx.allclose(got, want, 1e-6, 1e-30).item())


def test_other_dtypes_go_to_the_original() -> None:
    q, k, v = (a.astype(mx.bfloat16) for a in arrays(1, 5, 4, 2))
    want = mx.fast.scaled_dot_product_attention(q, k, v, scale=0.25)
    got = cpu_math.attention(q, k, v, None, 0.25, None)
    assert got.dtype == mx.bfloat16
    assert bool(mx.array_equal(got, want).item())
