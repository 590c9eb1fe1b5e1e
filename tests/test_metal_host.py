"""The emulator runs kernels as Metal would: results, arguments and counters."""

import metal_host
import mlx.core as mx
import pytest
from metal_host import samples

pytestmark = metal_host.needs_compiler

TOLERANCE = {mx.float32: 1e-5, mx.float16: 1e-3, mx.bfloat16: 8e-3}
DTYPES = pytest.mark.parametrize("dtype", TOLERANCE, ids=str)


def normal(*shape: int, dtype=mx.float32, seed: int = 0) -> mx.array:
    return mx.random.normal(shape, key=mx.random.key(seed)).astype(dtype)


def error(got: mx.array, expected: mx.array) -> float:
    """Largest error relative to the largest expected value, in float32."""
    expected = expected.astype(mx.float32)
    return (mx.abs(got.astype(mx.float32) - expected).max() / mx.abs(expected).max()).item()


@DTYPES
def test_elementwise(dtype):
    values = normal(37, 129, dtype=dtype)
    (got,) = samples.exponential(values, mx.array(0.5)).run()
    assert got.dtype == dtype and got.shape == values.shape
    assert error(got, mx.exp(values.astype(mx.float32)) * 2 + 0.5) < TOLERANCE[dtype]


@DTYPES
def test_reduction_over_a_threadgroup(dtype):
    x = normal(5, 1000, dtype=dtype)
    top, total = samples.softmax_statistics(x).run()
    wide = x.astype(mx.float32)
    assert mx.array_equal(top, wide.max(1))
    assert error(total, mx.exp(wide - wide.max(1, keepdims=True)).sum(1)) < 1e-5


@DTYPES
@pytest.mark.parametrize("checked", [True, False], ids=["checked", "unchecked"])
def test_matrix_product(dtype, checked):
    x, weights = normal(16, 256, dtype=dtype), normal(64, 256, dtype=dtype, seed=1)
    sample = samples.matmul(x, weights)
    (got,) = sample.run(checked=checked)
    quantized = [array.astype(mx.float32) for array in sample.inputs[2:]]
    wide = mx.dequantize(sample.inputs[1], *quantized, group_size=64, bits=4)
    assert error(got, x.astype(mx.float32) @ wide.T) < TOLERANCE[dtype]
