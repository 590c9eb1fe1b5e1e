"""Checks the kernels against their references on this device.

The kernels were developed on an emulator and meet a real GPU on the user's machine. So when a model
is loaded, every kernel that may run is called with the model's dtypes, shapes and weights, and
compared with its reference in plain MLX. A kernel that fails is left to MLX; the others still run.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import product
from typing import Any

import mlx.core as mx

from ..errors import KernelError
from .block_attention import CHUNK, TreeMask, block_attention_reference
from .delta_replay import DeltaReplay, DeltaVerify, delta_replay_reference, delta_verify_reference
from .shapes import AttentionShape, DeltaShape, key_over
from .verify_matmul import verify_matmul_reference
from .verify_matmul_moe import verify_matmul_moe_reference
from .weights import AffineWeights, Weights, dequantized

# Relative to the largest value: a few roundings of the result and of float32 sums of length K.
TOLERANCES = {mx.float16: 2e-3, mx.bfloat16: 1.6e-2, mx.float32: 1e-4}
COLUMNS = 8  # compared at the beginning, in the middle and at the end of a matrix
HALF_ROWS, ALL_ROWS = 3, 64  # rows of half a tile; the most of attention and of exact decoding


@dataclass(frozen=True)
class Check:
    """One call of a kernel, and its expected result.

    Attributes:
        key: the `Matrix.key` or `attention_key` that is left to MLX if the call fails.
        what: the call in words, for a message.
        ours, reference: return arrays of the same shapes; the reference's are float32.
    """

    key: str
    what: str
    ours: Callable[[], list[mx.array]]
    reference: Callable[[], list[mx.array]]


def faults(checks: Iterable[Check]) -> dict[str, str]:
    """The failed checks: a description by key."""
    found: dict[str, str] = {}
    for check in checks:
        if check.key not in found and (fault := _fault(check)):
            found[check.key] = f"{check.what} {fault}"
    return found


def _fault(check: Check) -> str | None:
    """How a call fails: it does not run, or its result differs. None if it passes."""
    try:
        results = check.ours()
        mx.eval(results)
    except (RuntimeError, ValueError, KernelError) as error:  # the compiler's, and of limits
        return f"does not run ({_said(error)})"
    for result, reference in zip(results, check.reference(), strict=True):
        if result.shape != reference.shape:
            return f"gives {result.shape} instead of {reference.shape}"
        difference = mx.abs(result.astype(mx.float32) - reference).max()
        allowed = TOLERANCES[result.dtype] * mx.abs(reference).max()
        if not mx.less_equal(difference, allowed).item():  # with a NaN, too
            return f"differs from its reference by {difference.item():.2g}"
    return None


def _said(error: Exception) -> str:
    """A message's first line with an error of the compiler, or its first line."""
    lines = str(*error.args[:1]).strip().splitlines() or [type(error).__name__]
    return next((line for line in lines if "error:" in line), lines[0]).strip()[:200]


class Noise:
    """Random arrays of one dtype, different in every call."""

    def __init__(self, dtype: mx.Dtype) -> None:
        self.dtype = dtype
        self._key = mx.random.key(0)

    def __call__(self, *shape: int) -> mx.array:
        """Values of a normal distribution."""
        self._key, key = mx.random.split(self._key)
        return mx.random.normal(shape, key=key).astype(self.dtype)

    def gates(self, *shape: int) -> mx.array:
        """Values between 0 and 1, in float32."""
        return mx.sigmoid(self(*shape).astype(mx.float32))


def product_checks(
    multiply: Callable[..., list[mx.array]],
    key: str,
    dtype: mx.Dtype,
    rows: Iterable[int],
    weights: Sequence[Weights],
    gated: bool = False,
    top_k: int = 0,
) -> Iterator[Check]:
    """The products of the same x in `dtype` by each of the weights, or the gated unit of two.

    Args:
        multiply: our products of x, and of the experts of its rows where there are any.
        key: of each check.
        dtype: of x.
        rows: how many x has, one check for each.
        weights: [N, K], or [E, N, K] of experts.
        gated: whether the weights are gate and up.
        top_k: experts per row; 0 for none.
    """
    noise, columns = Noise(dtype), [_columns(w.shape[-2]) for w in weights]
    picked = [dequantized(_picked(w, of)) for w, of in zip(weights, columns, strict=True)]
    depth = weights[0].shape[-1]

    def ours(*given: mx.array) -> list[mx.array]:
        results = zip(multiply(*given), columns, weights, strict=False)
        return [y[..., of] if y.shape[-1] == w.shape[-2] else y for y, of, w in results]

    def reference(x: mx.array, *experts: mx.array) -> list[mx.array]:
        x, (first, *others) = x.astype(mx.float32), picked
        if experts:
            return [verify_matmul_moe_reference(x, first, *experts, *others)]
        if gated:
            return [verify_matmul_reference(x, *picked)]
        return [verify_matmul_reference(x, w) for w in picked]

    for count in rows:
        # A row per token, or per token and expert, as the down projection has it.
        given = [noise(count, *(() if gated or not top_k else (top_k,)), depth)]
        if top_k:
            given.append(mx.argsort(noise(count, weights[0].shape[0]), axis=-1)[:, :top_k])
        what = f"the product of {count} rows by {key}"
        yield Check(key, what, partial(ours, *given), partial(reference, *given))


def attention_checks(
    kernel: Callable[..., mx.array], shape: AttentionShape, rows: Iterable[int]
) -> Iterator[Check]:
    """Chains and trees across the end of a chunk of keys, also with quantized keys if possible."""
    for count, bits in product(rows, (None, 8, 4) if shape.group_size else (None,)):
        yield _attention(kernel, shape, count, bits, False)
        if count > 1:
            yield _attention(kernel, shape, count, bits, True)


def _attention(
    kernel: Callable[..., mx.array], shape: AttentionShape, rows: int, bits: int | None, tree: bool
) -> Check:
    noise, length = Noise(shape.dtype), rows + 30
    first = CHUNK - length // 2  # so that the rows see keys of two chunks
    queries = noise(1, shape.heads, rows, shape.head_dim)
    stored: list[Any] = [noise(1, shape.key_heads, length, shape.head_dim) for _ in range(2)]
    if bits is not None and shape.group_size is not None:
        parts = [mx.quantize(x, shape.group_size, bits) for x in stored]
        stored = [AffineWeights(*of, bits, shape.group_size) for of in parts]
    named: dict[str, Any] = {"scale": shape.head_dim**-0.5, "first": first, "window": shape.window}
    if shape.sinks:
        named["sinks"] = noise(shape.heads)
    if tree:
        named["tree"] = _tree(rows, first + length - rows)

    def reference() -> list[mx.array]:
        return [block_attention_reference(*map(dequantized, (queries, *stored)), **named)]

    kind = "a tree" if tree else "a chain"
    quantized = f" over {bits}-bit keys" if bits else ""
    what = f"{shape.key}, {kind} of {rows}{quantized},"
    return Check(
        key_over(shape.key, bits), what, lambda: [kernel(queries, *stored, **named)], reference
    )


def _tree(nodes: int, position: int) -> TreeMask:
    """A binary tree, row by row from the root."""
    ancestors = mx.eye(nodes, dtype=mx.bool_)
    for node in range(1, nodes):
        ancestors[node] = ancestors[node] | ancestors[(node - 1) // 2]
    return TreeMask(position - 1 + ancestors.sum(axis=-1), ancestors)


def delta_checks(
    verify: DeltaVerify, replay: DeltaReplay, shape: DeltaShape, rows: Iterable[int]
) -> Iterator[Check]:
    """The gated delta rule over chains and trees, and the replay of a part of the rows."""
    for count in rows:
        noise = Noise(shape.dtype)
        queries, keys = noise(2, 1, count, shape.key_heads, shape.key_dim) * shape.key_dim**-0.5
        values = noise(1, count, shape.heads, shape.value_dim)
        decay, beta = noise.gates(2, 1, count, shape.heads)
        state = noise(1, shape.heads, shape.value_dim, shape.key_dim).astype(mx.float32)
        tape = [keys, values, decay, beta.astype(shape.dtype), state]
        parents = [(node - 1) // 2 if node else -1 for node in range(count)]
        kept = mx.array([count // 2, count - 1])
        for name, ours, reference, args in (
            ("a chain", verify, delta_verify_reference, (queries, *tape)),
            ("a tree", verify, delta_verify_reference, (queries, *tape, parents)),
            ("the replay", replay, delta_replay_reference, (*tape, kept, 2)),
        ):
            what = f"{shape.key}, {name} of {count} rows,"
            exact = [_exact(x) for x in args]
            yield Check(
                shape.key, what, partial(_arrays, ours, *args), partial(_arrays, reference, *exact)
            )


def _exact(value: Any) -> Any:
    """Floating-point arrays in float32; other values as they are."""
    if isinstance(value, mx.array) and mx.issubdtype(value.dtype, mx.floating):
        return value.astype(mx.float32)
    return value


def _arrays(rule: Callable[..., Any], *args: Any) -> list[mx.array]:
    """A rule's results as a list."""
    result = rule(*args)
    return [x for x in (result if isinstance(result, tuple) else (result,)) if x is not None]


def _columns(count: int) -> mx.array:
    """The columns to compare: the reference of a whole matrix takes long."""
    starts = (0, count // 2, count - COLUMNS)
    return mx.array(
        sorted({at + i for at in starts for i in range(COLUMNS) if 0 <= at + i < count})
    )


def _picked(w: Weights, columns: mx.array) -> Weights:
    """Some columns of the result: rows of w [..., N, K]."""
    if isinstance(w, mx.array):
        return mx.take(w, columns, axis=-2)
    words, scales, biases = (mx.take(x, columns, axis=-2) for x in (w.words, w.scales, w.biases))
    return AffineWeights(words, scales, biases, w.bits, w.group_size)
