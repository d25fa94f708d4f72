"""Both ways of cutting and joining blocks give the same numbers, and copies."""

import mlx.core as mx
import numpy as np
import pytest

from models.mlx.block_copies import ROOM, BlockCopies, GraphCopies, HostCopies

pytestmark = pytest.mark.mlx
BOTH = pytest.mark.parametrize("copies", [GraphCopies(), HostCopies()], ids=["graph", "host"])
DTYPES = pytest.mark.parametrize("dtype", [mx.float32, mx.float16, mx.bfloat16, mx.uint32], ids=str)
RANGES = [(16, 32), (0, 16), (40, 43)]


def some_planes(dtype: mx.Dtype, count: int = 3, tokens: int = 50) -> list[mx.array]:
    values = np.arange(count * 2 * tokens * 8).reshape(count, 1, 2, tokens, 8) % 251
    return [mx.array(one).astype(dtype) for one in values]


@BOTH
@DTYPES
def test_a_stack_holds_its_range_of_every_plane(copies: BlockCopies, dtype: mx.Dtype) -> None:
    planes = some_planes(dtype)
    for stack, (start, end) in zip(copies.cut(planes, RANGES), RANGES, strict=True):
        assert stack.dtype == dtype
        assert stack.shape == (3, 2, end - start, 8)
        for row, plane in enumerate(planes):
            assert mx.array_equal(stack[row], plane[0, :, start:end])


@BOTH
def test_planes_may_be_views_of_larger_arrays(copies: BlockCopies) -> None:
    batch = mx.arange(4 * 2 * 60 * 8).reshape(4, 2, 60, 8)
    planes = [batch[row : row + 1, :, 7:57] for row in range(4)]
    (stack,) = copies.cut(planes, [(3, 20)])
    assert mx.array_equal(stack, batch[:, :, 10:27])


@BOTH
@DTYPES
@pytest.mark.parametrize("tokens", [20, 32, 17])
def test_joined_planes_hold_the_first_tokens(
    copies: BlockCopies, dtype: mx.Dtype, tokens: int
) -> None:
    planes = some_planes(dtype)
    stacks = copies.cut(planes, [(0, 16), (16, 32)])
    for plane, joined in zip(planes, copies.join(stacks, tokens), strict=True):
        assert joined.dtype == dtype
        assert mx.array_equal(joined[:, :, :tokens], plane[:, :, :tokens])
        assert mx.all(joined[:, :, tokens:] == 0)


@BOTH
def test_one_stack_alone_is_copied_too(copies: BlockCopies) -> None:
    planes = some_planes(mx.float32)
    (stack,) = copies.cut(planes, [(0, 16)])
    joined = copies.join([stack], 16)
    mx.eval(joined)
    joined[0][:, :, :16] = -1.0
    planes[0][:] = -2.0
    mx.eval(joined, planes)
    assert mx.array_equal(stack[0], some_planes(mx.float32)[0][0, :, :16])


def test_the_host_leaves_room_for_the_next_tokens() -> None:
    copies = HostCopies()
    stacks = copies.cut(some_planes(mx.float32), [(0, 16)])
    assert {plane.shape[2] for plane in copies.join(stacks, 16)} == {ROOM}
    assert {plane.shape[2] for plane in copies.join(stacks * 16, 256)} == {2 * ROOM}
