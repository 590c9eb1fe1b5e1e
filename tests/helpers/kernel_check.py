"""Shared by tests of kernels: the factory of kernels, random weights, and tolerances."""

from functools import partial

import mlx.core as mx
import numpy as np
import pytest
from metal_host import EmulatedKernel, needs_compiler

from dflash_mlx.kernels.verify_matmul import verify_matmul_reference
from dflash_mlx.kernels.weights import AffineWeights, Weights, dequantized

# Relative to the largest magnitude in the result.
TOLERANCES = {mx.float16: 1e-3, mx.bfloat16: 8e-3, mx.float32: 1e-5}
DTYPES = list(TOLERANCES)


# A module's `pytestmark`: its kernels run on the GPU where there is one, else on the emulator.
on_gpu_or_emulator = pytest.mark.metal if mx.metal.is_available() else needs_compiler


def kernel_factory(checked: bool = True):
    """The GPU's factory where there is one, else the emulator's, in checked mode or not."""
    if mx.metal.is_available():
        return mx.fast.metal_kernel
    return partial(EmulatedKernel, checked=checked)


def relative_error(y: mx.array, truth: mx.array) -> float:
    """The largest difference, relative to the largest magnitude of the truth."""
    y = y.astype(mx.float32)
    truth = truth.astype(mx.float32)
    return (mx.abs(y - truth).max() / mx.abs(truth).max()).item()


# Half of the distance between two neighbouring numbers of a dtype, relative to the smaller one.
HALF_STEP = {mx.float16: 2.0**-11, mx.bfloat16: 2.0**-8, mx.float32: 2.0**-24}


def float64(x: Weights) -> np.ndarray:
    """An array or dequantized weights, in float64."""
    return np.array(dequantized(x), np.float64)


def within_rounding(y: mx.array, truth: np.ndarray, magnitude: np.ndarray, sums: int = 64) -> bool:
    """Whether a result is the truth rounded once to its dtype, except for errors of float32 sums.

    Args:
        y: the result.
        truth: the result in float64, from the same inputs.
        magnitude: the sum of the absolute values that are added for each element.
        sums: the number of float32 roundings of that magnitude to allow.

    One more rounding to the dtype, or a value that is read twice, exceeds the tolerance.
    """
    allowed = HALF_STEP[y.dtype] * np.abs(truth) * 1.001 + sums * 2.0**-24 * magnitude
    if y.dtype == mx.float16:
        allowed = allowed + 2.0**-25  # half of the smallest float16
    return bool((np.abs(float64(y) - truth) <= allowed).all())


def product(x: mx.array, w: Weights, up: Weights | None = None) -> tuple[np.ndarray, np.ndarray]:
    """A product in float64, and the magnitude for `within_rounding`.

    It is x w^T, or with `up` the gated product silu(x w^T) * (x up^T).
    """
    rows = float64(x)
    weights = float64(w)
    if isinstance(w, AffineWeights):  # code * scale and the bias may be larger than their sum
        scales = np.abs(float64(w.scales)).repeat(w.group_size, -1)
        biases = np.abs(float64(w.biases)).repeat(w.group_size, -1)
        size = scales * (2**w.bits) + biases
    else:
        size = np.abs(weights)
    truth = rows @ weights.T
    magnitude = np.abs(rows) @ size.T
    if up is None:
        return truth, magnitude
    up_truth, up_magnitude = product(x, up)
    with np.errstate(over="ignore"):
        silu = truth / (1 + np.exp(-truth))
    # silu multiplies an error of its argument by 1.1 at most; exp and the division add errors.
    silu_magnitude = 1.1 * magnitude + 4 * np.abs(silu)
    return silu * up_truth, np.abs(silu) * up_magnitude + silu_magnitude * np.abs(up_truth)


def check_products(matmul, x: mx.array, *weights: Weights, gated: bool = False) -> list[mx.array]:
    """The kernel's results, asserted to be float64's rounded once; checks the reference as well."""
    results = matmul(x, *weights, gated=gated)
    groups = [weights] if gated else [(w,) for w in weights]
    dtype = mx.result_type(x, getattr(weights[0], "scales", weights[0]))
    for y, parts in zip(results, groups, strict=True):
        truth, magnitude = product(x, *parts)
        assert y.dtype == dtype and y.shape == truth.shape
        assert within_rounding(y, truth, magnitude), (x.shape, parts[0].shape, y.dtype)
        exact = verify_matmul_reference(x.astype(mx.float32), *parts)
        assert relative_error(exact, mx.array(truth, mx.float32)) <= TOLERANCES[mx.float32]
    return results


def check_rows(multiply, rows: int, counts) -> None:
    """Check that a row's bits do not depend on which other rows share the call.

    Args:
        multiply: takes a slice of the rows, and returns one array or several with a row for each.
        rows: the number of rows.
        counts: the first rows, and the last rows, are multiplied in calls of so many.
    """

    def products(part: slice) -> list[mx.array]:
        result = multiply(part)
        return result if isinstance(result, list) else [result]

    row_by_row = [products(slice(row, row + 1)) for row in range(rows)]
    expected = [mx.concatenate(outputs) for outputs in zip(*row_by_row, strict=True)]
    for count in counts:
        for part in (slice(0, count), slice(rows - count, rows)):
            for output, alone in zip(products(part), expected, strict=True):
                assert same_bits(output, alone[part]), part


def same_bits(a: mx.array, b: mx.array) -> bool:
    """Whether all bits are equal. Unlike with ==, 0 differs from -0, and a NaN equals itself."""
    words = {2: mx.uint16, 4: mx.uint32}[a.dtype.size]
    return a.dtype == b.dtype and mx.array_equal(a.view(words), b.view(words)).item()


def random_weights(
    shape: tuple[int, ...], dtype: mx.Dtype, bits: int | None = None, group: int = 64
) -> Weights:
    """Weights [..., N, K], affine with `bits` or plain."""
    values = (mx.random.normal(shape) / shape[-1] ** 0.5).astype(dtype)
    if bits is None:
        return values
    return AffineWeights(*mx.quantize(values, group_size=group, bits=bits), bits, group)


def random_parents(nodes: int, seed: int = 0) -> list[int]:
    """The parent of each node of a random tree, which comes before it; the root's is -1."""
    random = np.random.default_rng(seed)
    parents = [-1]
    for node in range(1, nodes):
        parents.append(int(random.integers(max(0, node - 5), node)))
    return parents


def random_tree(nodes: int, seed: int = 0) -> tuple[mx.array, mx.array]:
    """A random tree: the depths [N] of its nodes, and for each [N, N] which are its ancestors."""
    depths = np.zeros(nodes, np.int32)
    ancestors = np.eye(nodes, dtype=bool)
    for node, parent in enumerate(random_parents(nodes, seed)):
        if parent >= 0:
            depths[node] = depths[parent] + 1
            ancestors[node] |= ancestors[parent]
    return mx.array(depths), mx.array(ancestors)


def path(parents: list[int], node: int) -> list[int]:
    """The nodes from the root to a node."""
    if node == 0:
        return [0]
    return [*path(parents, parents[node]), node]
