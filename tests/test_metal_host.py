"""The emulator runs kernels as Metal would: results, arguments and counters."""

import metal_host
import mlx.core as mx
import pytest
from metal_host import EmulatedKernel, samples

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


def copying(source: str, **changed) -> EmulatedKernel:
    """A kernel from `a` to `out`."""
    return EmulatedKernel("copying", ["a"], ["out"], source, **changed)


def copied(kernel: EmulatedKernel, a: mx.array, **more) -> mx.array:
    """Its output [4, 6], float32, from one thread for each element."""
    call = dict(
        output_shapes=[(4, 6)],
        output_dtypes=[mx.float32],
        grid=(24, 1, 1),
        threadgroup=(8, 1, 1),
    )
    (out,) = kernel(inputs=[a], **call | more)
    return out


COPY = "const uint i = thread_position_in_grid.x; out[i] = a[i];"


@pytest.mark.parametrize("dtype", [mx.float32, mx.bfloat16], ids=str)
def test_strides_of_inputs_that_are_left_alone(dtype):
    source = """
      const uint i = thread_position_in_grid.x;
      const uint row = i / a_shape[1], column = i % a_shape[1];
      out[i] = float(a[row * a_strides[0] + column * a_strides[1]]) + a_ndim;
    """
    base = normal(12, 4, dtype=dtype)
    for a in (base[::2].T, mx.broadcast_to(base[0, :, None], (4, 6))):
        got = copied(copying(source, ensure_row_contiguous=False), a)
        assert mx.array_equal(got, a.astype(mx.float32) + 2)


def test_outputs_begin_as_asked():
    half = "if (thread_position_in_grid.x < 12) { " + COPY + " }"
    a = normal(4, 6)
    assert mx.array_equal(copied(copying(half), a, init_value=-1.5)[2:], mx.full((2, 6), -1.5))
    untouched = copied(copying(half), a)
    assert mx.array_equal(untouched[:2], a[:2])
    assert mx.isnan(untouched[2:]).all().item()  # what Metal leaves there is anyone's guess


def test_an_empty_grid_runs_nothing():
    assert mx.isnan(copied(copying(COPY), normal(4, 6), grid=(0, 1, 1))).all().item()


@pytest.mark.parametrize(
    "wrong,message",
    [
        (dict(inputs=[]), "`inputs` to have size 1 but got size 0"),
        (dict(output_shapes=[(1,), (2,)]), "`output_shapes` to have size 1 but got size 2"),
        (dict(threadgroup=(2048, 1, 1)), "greater than"),
    ],
    ids=["inputs", "outputs", "threadgroup"],
)
def test_wrong_calls_are_refused(wrong, message):
    sample = samples.exponential(normal(4, 6), mx.array(0.5))
    kernel = copying(COPY)
    with pytest.raises(ValueError, match=message):
        kernel(**{"inputs": [sample.inputs[0]]} | sample.call | wrong)


def test_a_kernel_that_does_not_compile():
    with pytest.raises(metal_host.CompilationError, match=r"body:1\b.*undeclared"):
        copied(copying(COPY.replace("a[i]", "undeclared")), normal(4, 6))
