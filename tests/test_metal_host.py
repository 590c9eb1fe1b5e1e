"""The emulator runs kernels as Metal would: results, arguments and counters."""

import metal_host
import mlx.core as mx
import pytest
from metal_host import EmulatedKernel, Traffic, samples

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


def test_counters_of_a_matrix_product():
    """Each weight read once, each column's scales by four threads, x by every threadgroup."""
    x, weights = normal(16, 256, dtype=mx.float16), normal(64, 256, dtype=mx.float16, seed=1)
    sample = samples.matmul(x, weights)
    kernel = EmulatedKernel(**sample.constructor)
    kernel(inputs=sample.inputs, **sample.call)
    size = {k: array.nbytes for k, array in zip("x w s b".split(), sample.inputs, strict=True)}
    buffers = kernel.counters.buffers
    assert buffers["w"] == Traffic(size["w"], 0, size["w"], 0)
    assert buffers["scales"] == buffers["biases"] == Traffic(4 * size["s"], 0, size["s"], 0)
    assert buffers["x"] == Traffic(2 * size["x"], 0, size["x"], 0)
    assert buffers["y"] == Traffic(0, 16 * 64 * 2, 0, 16 * 64 * 2)
    assert kernel.counters.multiply_accumulates == 16 * 64 * 256


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


def test_fma_is_counted():
    kernel = copying("const uint i = thread_position_in_grid.x; out[i] = fma(a[i], a[i], 1.0f);")
    a = normal(4, 6)
    assert error(copied(kernel, a), a * a + 1) < 1e-6
    assert kernel.counters.fmas == 24


def test_barriers_and_exchanges_are_counted():
    """Of threadgroups and of SIMD-groups: two of each, with a shuffle before and after."""
    body = """
      threadgroup float shared[64];
      const uint i = thread_index_in_threadgroup;
      shared[i] = simd_shuffle_xor(a[thread_position_in_grid.x], 1);
      threadgroup_barrier(mem_flags::mem_threadgroup);
      out[thread_position_in_grid.x] = simd_shuffle_xor(shared[i ^ 33], 1);
    """
    kernel = EmulatedKernel("counting", ["a"], ["out"], body)
    a = normal(128)
    (out,) = kernel(
        inputs=[a],
        grid=(128, 1, 1),
        threadgroup=(64, 1, 1),
        output_shapes=[a.shape],
        output_dtypes=[a.dtype],
    )
    assert mx.array_equal(out, a[mx.arange(128) ^ 33])
    assert (kernel.counters.barriers, kernel.counters.exchanges) == (2, 8)


def test_counters_need_a_checked_call():
    kernel = copying(COPY, checked=False)
    copied(kernel, normal(4, 6))
    with pytest.raises(RuntimeError, match="checked"):
        kernel.counters  # noqa: B018


def test_inputs_are_made_contiguous():
    a = normal(6, 4)
    assert mx.array_equal(copied(copying(COPY), a.T), a.T)


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


def test_verbose_prints_the_source(capsys):
    copied(copying(COPY), normal(4, 6), verbose=True)
    printed = capsys.readouterr().out
    assert printed.startswith("Generated source code for `copying`:\n```\n")
    assert COPY in printed and "custom_kernel_copying_float_float" in printed


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


def test_source_is_ascii():
    with pytest.raises(UnicodeEncodeError):
        copying("// naïve\n" + COPY)


def test_a_kernel_that_does_not_compile():
    with pytest.raises(metal_host.CompilationError, match=r"body:1\b.*undeclared"):
        copied(copying(COPY.replace("a[i]", "undeclared")), normal(4, 6))


def test_kernels_are_compiled_once(tmp_path):
    a = normal(4, 6)
    copied(copying(COPY, cache_dir=tmp_path), a)
    kept = {path: path.stat().st_mtime_ns for path in tmp_path.iterdir()}
    assert len(kept) == 2  # the runtime and the kernel, and nothing else is left behind
    copied(copying(COPY, cache_dir=tmp_path), a)
    assert {path: path.stat().st_mtime_ns for path in tmp_path.iterdir()} == kept
    copied(copying(COPY + " ", cache_dir=tmp_path), a)
    assert len(list(tmp_path.iterdir())) == 3
