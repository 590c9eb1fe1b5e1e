"""What Metal has beyond C++, function by function, against numpy."""

import metal_host
import mlx.core as mx
import numpy as np
import pytest
from metal_host import EmulatedKernel

pytestmark = metal_host.needs_compiler

LANES = 32
THREADS = 64  # two SIMD-groups


def run(body: str, *inputs: mx.array, shape=(THREADS,), dtype=mx.float32, header="", **changed):
    """What `body` leaves in `out`, as numpy; its inputs are a, b ... and `t` is its thread."""
    call = dict(grid=(THREADS, 1, 1), threadgroup=(THREADS, 1, 1)) | changed
    constructor = {k: call.pop(k) for k in ("atomic_outputs", "compiler") if k in call}
    kernel = EmulatedKernel(
        name="body",
        input_names=list("abcd"[: len(inputs)]),
        output_names=["out"],
        source=f"const uint t = thread_position_in_grid.x;\n{body}",
        header=header,
        **constructor,
    )
    (out,) = kernel(inputs=list(inputs), output_shapes=[shape], output_dtypes=[dtype], **call)
    return np.array(out.astype(mx.float32))


def values(*shape: int, dtype=mx.float32, seed: int = 0) -> mx.array:
    """Quarters: sums of a few hundred of them are exact in every order, in any dtype but bf16."""
    return (mx.random.randint(-8, 8, shape, key=mx.random.key(seed)) / 4).astype(dtype)


# Of a row of 32 lanes, what every one of them gets.
SIMD_FUNCTIONS = {
    "simd_sum(a[t])": lambda row: [row.sum()] * LANES,
    "simd_product(a[t])": lambda row: [row.prod()] * LANES,
    "simd_max(a[t])": lambda row: [row.max()] * LANES,
    "simd_min(a[t])": lambda row: [row.min()] * LANES,
    "simd_broadcast(a[t], 7)": lambda row: [row[7]] * LANES,
    "simd_broadcast_first(a[t])": lambda row: [row[0]] * LANES,
    "simd_shuffle(a[t], 31 - t % 32)": lambda row: row[::-1],
    "simd_shuffle_xor(a[t], 5)": lambda row: row[np.arange(LANES) ^ 5],
    "simd_shuffle_down(a[t], 3)": lambda row: np.append(row[3:], row[-3:]),
    "simd_shuffle_up(a[t], 3)": lambda row: np.append(row[:3], row[:-3]),
    "simd_shuffle_rotate_down(a[t], 3)": lambda row: np.roll(row, -3),
    "simd_prefix_inclusive_sum(a[t])": lambda row: np.cumsum(row),
    "simd_prefix_exclusive_sum(a[t])": lambda row: np.cumsum(row) - row,
    "simd_any(a[t] == 1.75f)": lambda row: [(row == 1.75).any()] * LANES,
    "simd_all(a[t] < 2.0f)": lambda row: [True] * LANES,
    "simd_is_first()": lambda row: np.arange(LANES) == 0,
    "quad_sum(a[t])": lambda row: row.reshape(-1, 4).sum(1).repeat(4),
    "quad_shuffle_xor(a[t], 1)": lambda row: row[np.arange(LANES) ^ 1],
    "popcount(uint((uint64_t)simd_ballot(a[t] > 0)))": lambda row: [(row > 0).sum()] * LANES,
}


def test_simd_functions():
    a = values(THREADS)
    body = "".join(f"out[{i} * 64 + t] = {call};\n" for i, call in enumerate(SIMD_FUNCTIONS))
    got = run(body, a, shape=(len(SIMD_FUNCTIONS), THREADS))
    rows = np.array(a).reshape(2, LANES)
    for name, result, expected in zip(SIMD_FUNCTIONS, got, SIMD_FUNCTIONS.values(), strict=True):
        np.testing.assert_array_equal(
            result, np.concatenate([expected(row) for row in rows]), err_msg=name
        )


@pytest.mark.parametrize("dtype", [mx.float32, mx.float16, mx.bfloat16], ids=str)
@pytest.mark.parametrize("transposed", [False, True])
def test_matrices(dtype, transposed):
    """d = a b + 3, with a from device memory and the second 8x8 of each row of b, by origin."""
    a, b = values(8, 8, dtype=dtype), values(8, 16, dtype=dtype, seed=1)
    got = run(
        f"""
          simdgroup_matrix<T, 8, 8> left, right;
          simdgroup_matrix<float, 8, 8> sum = make_filled_simdgroup_matrix<float, 8, 8>(3);
          simdgroup_load(left, a, 8, ulong2(0, 0), {str(transposed).lower()});
          simdgroup_load(right, b, 16, ulong2(8, 0));
          simdgroup_multiply_accumulate(sum, left, right, sum);
          simdgroup_store(sum, out, 8);
        """,
        a,
        b,
        shape=(8, 8),
        template=[("T", dtype)],
        grid=(LANES, 1, 1),
    )
    left, right = (np.array(each.astype(mx.float32)) for each in (a, b[:, 8:]))
    np.testing.assert_array_equal(got, (left.T if transposed else left) @ right + 3)


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
