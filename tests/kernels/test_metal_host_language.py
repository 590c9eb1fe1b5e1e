"""What no kernel's own test shows of the emulator: rounding, and which lanes a barrier orders."""

import metal_host
import mlx.core as mx
import numpy as np
import pytest
from metal_host import EmulatedKernel

pytestmark = metal_host.needs_compiler

THREADS = 64  # two SIMD-groups


def run(body: str, *inputs: mx.array, shape=(THREADS,), dtype=mx.float32, **changed):
    """What `body` leaves in `out`, as numpy; its inputs are a, b ... and `t` is its thread."""
    call = dict(grid=(THREADS, 1, 1), threadgroup=(THREADS, 1, 1)) | changed
    constructor = {"compiler": call.pop("compiler", None)}
    kernel = EmulatedKernel(
        name="body",
        input_names=list("abcd"[: len(inputs)]),
        output_names=["out"],
        source=f"const uint t = thread_position_in_grid.x;\n{body}",
        **constructor,
    )
    (out,) = kernel(inputs=list(inputs), output_shapes=[shape], output_dtypes=[dtype], **call)
    return np.array(out.astype(mx.float32))


def values(*shape: int, dtype=mx.float32, seed: int = 0) -> mx.array:
    """Quarters: sums of a few hundred of them are exact in every order, in any dtype but bf16."""
    return (mx.random.randint(-8, 8, shape, key=mx.random.key(seed)) / 4).astype(dtype)


@pytest.mark.parametrize("compiler", metal_host.compilers(), ids=lambda each: each.version[:12])
def test_half_and_bfloat_round_after_every_operation(compiler):
    """Including the intermediate ones: half(half(a + b) + c), as Metal has no wider half."""
    inputs = [mx.random.normal((THREADS,), key=mx.random.key(i)) for i in range(3)]
    for dtype in (mx.float16, mx.bfloat16):
        a, b, c = (each.astype(dtype) for each in inputs)
        body = "out[t] = a[t] * b[t] + c[t];"
        got = run(body, a, b, c, dtype=dtype, compiler=compiler)
        wide = (a.astype(mx.float32) * b.astype(mx.float32)).astype(dtype).astype(mx.float32)
        expected = (wide + c.astype(mx.float32)).astype(dtype)
        np.testing.assert_array_equal(got, np.array(expected.astype(mx.float32)))


def test_bfloat_rounds_to_even_and_keeps_infinities():
    ties = [1 + 2**-8, 1 + 3 * 2**-8, 3.4e38, -np.inf, 1e-40, 0.1]
    given = mx.array(np.resize(np.array(ties, np.float32), THREADS))
    got = run("out[t] = bfloat(a[t]);", given, dtype=mx.bfloat16)
    np.testing.assert_array_equal(got, np.array(given.astype(mx.bfloat16).astype(mx.float32)))


def test_simdgroup_barrier_orders_its_own_lanes_only():
    body = """
      threadgroup float shared[64];
      shared[t] = a[t];
      simdgroup_barrier(mem_flags::mem_threadgroup);
      out[t] = shared[t ^ {}];
    """
    a = values(THREADS)
    np.testing.assert_array_equal(run(body.format(1), a), np.array(a)[np.arange(THREADS) ^ 1])
    with pytest.raises(metal_host.CheckError, match="race"):
        run(body.format(32), a)
