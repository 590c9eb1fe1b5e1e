"""verify_matmul_moe: its float32 reference, the same bits for a row in every call, its work."""

import mlx.core as mx
import pytest
from kernel_check import (
    DTYPES,
    TOLERANCES,
    kernel_factory,
    on_gpu_or_emulator,
    random_weights,
    relative_error,
    same_bits,
)

from dflash_mlx.errors import KernelError
from dflash_mlx.kernels.verify_matmul import verify_matmul_reference
from dflash_mlx.kernels.verify_matmul_moe import VerifyMatmulMoe, verify_matmul_moe_reference
from dflash_mlx.kernels.weights import AffineWeights

pytestmark = on_gpu_or_emulator


@pytest.fixture(scope="module")
def moe() -> VerifyMatmulMoe:
    return VerifyMatmulMoe(kernel_factory())


def routes(tokens: int, chosen: int, experts: int) -> mx.array:
    """Each token's experts, all different: [tokens, chosen]."""
    return mx.argsort(mx.random.normal((tokens, experts)), axis=-1)[:, :chosen].astype(mx.uint32)


def check(moe, x, w, experts, up=None):
    """The kernel's result, after comparing it with the reference."""
    y = moe(x, w, experts, up)
    truth = verify_matmul_moe_reference(x.astype(mx.float32), w, experts, up)
    assert y.shape == truth.shape == (*experts.shape, w.shape[1])
    assert relative_error(y, truth) <= TOLERANCES[y.dtype]
    return y


@pytest.mark.parametrize("dtype", [mx.bfloat16])
@pytest.mark.parametrize("bits,group", [(None, 0), (4, 32), (4, 64), (4, 128), (8, 32), (8, 64)])
def test_one_row_per_token(moe, dtype, bits, group):
    mx.random.seed(group)
    for tokens, chosen, experts, columns in (
        (1, 1, 2, 9),
        (1, 2, 4, 33),
        (5, 3, 16, 64),
        (16, 8, 8, 40),
    ):
        w = random_weights((experts, columns, 128), dtype, bits, group)
        check(
            moe, mx.random.normal((tokens, 128)).astype(dtype), w, routes(tokens, chosen, experts)
        )


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("bits", [None, 4, 8])
def test_gate_and_up(moe, dtype, bits):
    mx.random.seed(1)
    shape, experts = (6, 40, 192), routes(13, 2, 6)
    gate, up = random_weights(shape, dtype, bits), random_weights(shape, dtype, bits)
    check(moe, mx.random.normal((13, 192)).astype(dtype), gate, experts, up)


def test_one_row_per_token_and_expert(moe):
    """The projection down: each expert's own input. K is no multiple of anything."""
    mx.random.seed(2)
    experts = routes(11, 4, 6).reshape(1, 11, 4)
    w = random_weights((6, 24, 77), mx.float32)
    x = mx.random.normal((1, 11, 4, 77))
    y = check(moe, x, w, experts)
    assert same_bits(moe(x, w, experts, order=mx.argsort(experts.reshape(-1))), y)


def test_more_rows_than_a_tile_for_one_expert(moe):
    mx.random.seed(3)
    w = random_weights((2, 24, 64), mx.float32, 4, 32)
    experts = (mx.arange(40) >= 37).astype(mx.int32)[:, None]  # 37 rows and 3
    check(moe, mx.random.normal((40, 64)), w, experts)


def test_the_reference_is_the_dense_one_of_each_expert():
    mx.random.seed(4)
    gate, up = (random_weights((4, 24, 64), mx.float32, 4, 32) for _ in range(2))
    x, experts = mx.random.normal((5, 64)), routes(5, 2, 4)
    y = verify_matmul_moe_reference(x, gate, experts, up)
    for token in range(5):
        for place, expert in enumerate(experts[token].tolist()):
            one, other = (
                AffineWeights(w.words[expert], w.scales[expert], w.biases[expert], 4, 32)
                for w in (gate, up)
            )
            truth = verify_matmul_reference(x[token], one, other)
            assert mx.allclose(y[token, place], truth, atol=1e-5).item()


@pytest.mark.parametrize("dtype,bits,gate_up", [(mx.bfloat16, 4, True), (mx.float16, 8, False)])
def test_a_row_has_the_same_bits_in_every_call(moe, dtype, bits, gate_up):
    """Whether it has its experts to itself or shares them with 15 others."""
    mx.random.seed(5)
    shape, experts = (5, 24, 128), routes(16, 3, 5)  # nearly every expert has rows of most tokens
    w = random_weights(shape, dtype, bits, 32)
    up = random_weights(shape, dtype, bits, 32) if gate_up else None
    x = mx.random.normal((16, 128)).astype(dtype)
    alone = mx.concatenate([moe(x[i : i + 1], w, experts[i : i + 1], up) for i in range(16)])
    for rows in range(1, 17):
        assert same_bits(moe(x[:rows], w, experts[:rows], up), alone[:rows]), rows
        assert same_bits(moe(x[-rows:], w, experts[-rows:], up), alone[-rows:]), rows


def test_what_does_not_fit_is_refused(moe):
    w = random_weights((4, 16, 128), mx.float32, 4)
    with pytest.raises(KernelError, match="are \\[E, N, K\\]"):
        moe(mx.ones((2, 128)), w.words[0], routes(2, 2, 4))
    with pytest.raises(KernelError, match="do not belong to experts"):
        moe(mx.ones((3, 128)), w, routes(2, 2, 4))
