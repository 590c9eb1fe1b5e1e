"""Products of experts where they are easily wrong: one rounding, crowds, and pairs counted."""

import mlx.core as mx
import numpy as np
import pytest
from kernel_check import (
    DTYPES,
    float64,
    kernel_factory,
    on_gpu_or_emulator,
    random_weights,
    same_bits,
    within_rounding,
)

from dflash_mlx.kernels.verify_matmul import VerifyMatmul
from dflash_mlx.kernels.verify_matmul_moe import VerifyMatmulMoe
from dflash_mlx.kernels.weights import AffineWeights, Weights

pytestmark = on_gpu_or_emulator


@pytest.fixture(scope="module")
def moe() -> VerifyMatmulMoe:
    return VerifyMatmulMoe(kernel_factory())


def expert(w: Weights, index: int) -> Weights:
    """The weights of one expert."""
    if isinstance(w, mx.array):
        return w[index]
    return AffineWeights(w.words[index], w.scales[index], w.biases[index], w.bits, w.group_size)


def routes(tokens: int, chosen: int, experts: int) -> mx.array:
    """Each token's experts, all different, the last one among them."""
    order = mx.argsort(mx.random.normal((tokens, experts)), axis=-1)[:, :chosen]
    order[0, -1] = experts - 1
    return order.astype(mx.uint32)


def check(moe, x, w, experts, up=None) -> mx.array:
    """The kernel's result, each pair held to one rounding."""
    y = moe(x, w, experts, up)
    of = w.scales if isinstance(w, AffineWeights) else w
    assert y.dtype == mx.result_type(x, of) and y.shape == (*experts.shape, w.shape[1])
    truth, magnitude = np.zeros(y.shape), np.zeros(y.shape)
    rows = float64(x)
    for token, place in np.ndindex(experts.shape):
        row = rows[token] if x.ndim == 2 else rows[token, place]
        parts = [float64(expert(m, experts[token, place].item())) for m in (w, up) if m is not None]
        gate, size = parts[0] @ row, 24 * np.abs(parts[0]).max(1) * np.abs(row).sum()
        truth[token, place], magnitude[token, place] = gate, size
        if up is not None:
            unit = gate / (1 + np.exp(-gate))
            other = parts[1] @ row
            of_other = 24 * np.abs(parts[1]).max(1) * np.abs(row).sum()
            truth[token, place] = unit * other
            magnitude[token, place] = np.abs(unit) * of_other + 1.5 * size * np.abs(other)
    assert within_rounding(y, truth, magnitude), (x.shape, w.shape, y.dtype)
    return y


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("bits,group", [(None, 0), (4, 64), (8, 32), (8, 64), (8, 128)])
@pytest.mark.parametrize("gated", [False, True])
def test_one_rounding(moe, dtype, bits, group, gated):
    mx.random.seed(group)
    w, up = (random_weights((5, 40, 256), dtype, bits, group) for _ in range(2))
    x = mx.random.normal((6, 256)).astype(dtype)
    check(moe, x, w, routes(6, 2, 5), up if gated else None)


@pytest.mark.parametrize("crowd", [8, 9, 16, 17, 33, 64])
def test_crowds_of_every_size(moe, crowd):
    """So many rows for one expert between others: at the ends of half tiles, tiles and several."""
    mx.random.seed(crowd)
    w = random_weights((3, 20, 64), mx.float32, 4, 32)
    experts = mx.array([0] * 3 + [1] * crowd + [2] * 2)[:, None]
    shuffled = mx.argsort(mx.random.normal((crowd + 5,)))
    check(moe, mx.random.normal((crowd + 5, 64)), w, experts[shuffled])


def test_a_row_has_the_same_bits_among_64():
    """And those of the dense product, whose sums are in the same order where K is not split."""
    mx.random.seed(2)
    factory = kernel_factory()
    moe, dense = VerifyMatmulMoe(factory), VerifyMatmul(factory)
    w = random_weights((3, 24, 128), mx.bfloat16, 4, 32)
    x, experts = mx.random.normal((64, 128)).astype(mx.bfloat16), routes(64, 2, 3)
    y = moe(x, w, experts)
    for row in (0, 7, 33, 63):
        assert same_bits(moe(x[row : row + 1], w, experts[row : row + 1]), y[row : row + 1])
        for place in range(2):
            alone = dense(x[row : row + 1], expert(w, experts[row, place].item()))
            assert same_bits(alone[0], y[row, place])
