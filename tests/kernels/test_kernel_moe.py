"""verify_matmul_moe: results within one rounding of float64, a row's bits the same in any call."""

import mlx.core as mx
import numpy as np
import pytest
from kernel_check import (
    DTYPES,
    TOLERANCES,
    check_rows,
    kernel_factory,
    on_gpu_or_emulator,
    product,
    random_weights,
    relative_error,
    same_bits,
    within_rounding,
)

from dflash_mlx.errors import KernelError
from dflash_mlx.kernels.verify_matmul_moe import VerifyMatmulMoe, verify_matmul_moe_reference
from dflash_mlx.kernels.weights import AffineWeights, Weights

pytestmark = on_gpu_or_emulator


@pytest.fixture(scope="module")
def moe() -> VerifyMatmulMoe:
    return VerifyMatmulMoe(kernel_factory())


def expert(w: Weights, index: int) -> Weights:
    """The weights of one expert."""
    if isinstance(w, mx.array):
        return w[index]
    return AffineWeights(
        w.words[index],
        scales=w.scales[index],
        biases=w.biases[index],
        bits=w.bits,
        group_size=w.group_size,
    )


def routes(tokens: int, chosen: int, experts: int) -> mx.array:
    """`chosen` different experts for each token; the first token has the last expert."""
    order = mx.argsort(mx.random.normal((tokens, experts)), axis=-1)[:, :chosen]
    order[0, -1] = experts - 1
    return order.astype(mx.uint32)


def check(moe, x, experts, *weights) -> mx.array:
    """The kernel's result, asserted to be within one rounding of numpy's, as is the reference."""
    [y] = moe(x, *weights, gated=len(weights) > 1, experts=experts)
    w, *up = weights
    reference = verify_matmul_moe_reference(x.astype(mx.float32), w, experts, *up)
    assert y.dtype == mx.result_type(x, getattr(w, "scales", w))
    assert y.shape == reference.shape == (*experts.shape, w.shape[-2])
    rows = x
    if x.ndim == experts.ndim:  # one row for a token, which all of its experts multiply
        rows = mx.broadcast_to(x[..., None, :], (*experts.shape, x.shape[-1]))
    truth = np.zeros(y.shape)
    magnitude = np.zeros(y.shape)
    for index in np.ndindex(experts.shape):
        weights_of_expert = [expert(matrix, experts[index].item()) for matrix in weights]
        truth[index], magnitude[index] = product(rows[index], *weights_of_expert)
    assert within_rounding(y, truth, magnitude), (x.shape, w.shape, y.dtype)
    assert relative_error(reference, mx.array(truth, mx.float32)) <= TOLERANCES[mx.float32]
    return y


@pytest.mark.parametrize("bits,group", [(None, 0), (4, 32), (4, 64), (4, 128), (8, 32), (8, 64)])
def test_products_of_one_row_per_token_are_within_one_rounding(moe, bits, group):
    mx.random.seed(group)
    for tokens, chosen, experts, columns in ((1, 1, 2, 9), (5, 3, 16, 64), (16, 8, 8, 40)):
        w = random_weights((experts, columns, 128), dtype=mx.bfloat16, bits=bits, group=group)
        x = mx.random.normal((tokens, 128)).astype(mx.bfloat16)
        check(moe, x, routes(tokens, chosen, experts), w)
    check(moe, x, routes(tokens, 2, experts), w)  # the same rows, for fewer experts


def test_products_of_one_row_per_token_and_expert_are_within_one_rounding(moe):
    """As in `down_proj`, where each expert has another input. K is 77, so no tile is whole."""
    mx.random.seed(2)
    experts = routes(11, 4, 6).reshape(1, 11, 4)
    w = random_weights((6, 24, 77), mx.float32)
    x = mx.random.normal((1, 11, 4, 77))
    y = check(moe, x, experts, w)
    assert moe(x.astype(mx.bfloat16), w, experts=experts)[0].dtype == mx.float32
    assert same_bits(moe(x, w, experts=experts)[0], y)  # a second call reuses the sorted experts


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("bits,group", [(None, 0), (4, 64), (8, 32)])
@pytest.mark.parametrize("gated", [False, True])
def test_every_dtype_and_kind_of_weights_is_within_one_rounding(moe, dtype, bits, group, gated):
    mx.random.seed(group)
    weights = [
        random_weights((5, 40, 256), dtype=dtype, bits=bits, group=group) for _ in range(1 + gated)
    ]
    check(moe, mx.random.normal((6, 256)).astype(dtype), routes(6, 2, 5), *weights)


@pytest.mark.parametrize("count", [8, 9, 16, 17, 33, 64])
def test_any_number_of_rows_for_one_expert_is_within_one_rounding(moe, count):
    """Around the ends of half a tile, one tile and several; other experts have a few rows."""
    mx.random.seed(count)
    w = random_weights((3, 20, 64), dtype=mx.float32, bits=4, group=32)
    experts = mx.array([0] * 3 + [1] * count + [2] * 2)[:, None]
    shuffled = mx.argsort(mx.random.normal((count + 5,)))
    check(moe, mx.random.normal((count + 5, 64)), experts[shuffled], w)


@pytest.mark.parametrize("dtype,bits,gated", [(mx.bfloat16, 4, True), (mx.float16, 8, False)])
def test_a_row_has_the_same_bits_in_every_call(moe, dtype, bits, gated):
    """Whether its experts multiply only this row or 63 others as well."""
    mx.random.seed(5)
    experts = routes(64, 3, 5)  # nearly every expert has rows of most tokens
    weights = [
        random_weights((5, 24, 128), dtype=dtype, bits=bits, group=32) for _ in range(1 + gated)
    ]
    x = mx.random.normal((64, 128)).astype(dtype)

    def multiply(rows):
        return moe(x[rows], *weights, gated=gated, experts=experts[rows])

    check_rows(multiply, 64, (2, 5, 8, 9, 13, 16, 17, 33, 64))


def test_shapes_without_a_kernel_are_refused(moe):
    x = mx.ones((2, 128))
    w = random_weights((4, 16, 128), mx.float32, 4)
    for message, given in (
        ("are \\[E, N, K\\]", (x, w.words[0])),
        ("do not belong to experts", (mx.ones((3, 128)), w)),
        ("2 matrices do not share", (x, w, w)),
    ):
        with pytest.raises(KernelError, match=message):
            moe(*given, experts=routes(2, 2, 4))
