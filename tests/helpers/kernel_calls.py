"""Every kernel with every set of constants that its wrapper can ask for.

What a wrapper takes is found by asking it: all of MLX's dtypes, bits, sizes of groups and heads are
offered, and what it refuses with a `KernelError` it cannot ask for. So a value that is added to a
wrapper is in here without another word.
"""

from collections.abc import Callable, Iterator
from itertools import cycle, product
from typing import Any

import mlx.core as mx
from metal_host.wrapper import METAL_NAMES, Wrapper, wrap

from dflash_mlx.errors import KernelError
from dflash_mlx.kernels.block_attention import AttentionCall, BlockAttention, TreeMask
from dflash_mlx.kernels.delta_replay import DeltaRule, Tape
from dflash_mlx.kernels.verify_matmul import ENOUGH_TILES, ENOUGH_TILES_LARGE, VerifyMatmul
from dflash_mlx.kernels.verify_matmul_moe import VerifyMatmulMoe
from dflash_mlx.kernels.weights import AffineWeights, Weights

DTYPES = tuple(METAL_NAMES)
BITS = range(1, 17)
GROUPS = tuple(2**power for power in range(3, 11))
HEAD_DIMS = range(8, 521, 8)
# Rows of a draft and of a cache: of one key, in part of a SIMD-group, and in many of them.
ROWS = ((1, 1), (1, 40), (16, 40), (64, 80))
# One for each number of elements that a lane can hold, whole SIMD-groups of them and ragged.
TREES = (1, 3, 7, 15, 31, 63)  # balanced ones
KEY_DIMS = (1, 31, 32, 48, 64, 96, 112, 128, 160, 192, 200, 224, 256)


class Recorder:
    """A factory whose kernels compute zeros and keep the Metal that MLX would compile.

    Attributes:
        wrappers: of all calls, once each, by their text.
        launches: of every call the name, the grid, the threadgroup and the shapes of its outputs.
    """

    def __init__(self) -> None:
        self.wrappers: dict[str, Wrapper] = {}
        self.launches: list[tuple[str, tuple[int, ...], tuple[int, ...], list[Any]]] = []

    def __call__(
        self,
        name: str,
        input_names: list[str],
        output_names: list[str],
        source: str,
        header: str = "",
        **_: Any,
    ) -> Callable[..., list[mx.array]]:
        def call(
            inputs, output_shapes, output_dtypes, grid=(), threadgroup=(), **_
        ) -> list[mx.array]:
            self.launches.append((name, grid, threadgroup, [tuple(s) for s in output_shapes]))
            arrays = [x if isinstance(x, mx.array) else mx.array(x) for x in inputs]
            outputs = list(zip(output_names, output_dtypes, strict=True))
            named = list(zip(input_names, arrays, strict=True))
            wrapper = wrap(name, named, outputs, header, source)
            self.wrappers[wrapper.text] = wrapper
            return [mx.zeros(*each) for each in zip(output_shapes, output_dtypes, strict=True)]

        return call


def taken(function: Callable[..., Any], *args: Any, **named: Any) -> Any:
    """What the function returns, None where it refuses the arguments."""
    try:
        return function(*args, **named)
    except KernelError:
        return None


def affine_weights(*shape: int) -> Iterator[AffineWeights]:
    """Zeros [..., N, K] in every form that `AffineWeights` takes, K rounded up to a group."""
    *leading, depth = shape
    for bits, group, dtype in product(BITS, GROUPS, DTYPES):
        whole = -(-depth // group) * group
        words = mx.zeros((*leading, whole * bits // 32), mx.uint32)
        scales = mx.zeros((*leading, whole // group), dtype)
        for tensor_units in (False, True):
            form = bits, group, tensor_units
            if weights := taken(AffineWeights, words, scales, scales, *form):
                yield weights


def matrices(*shape: int) -> Iterator[Weights]:
    """Weights [..., N, K], plain and affine, in every dtype."""
    yield from (mx.zeros(shape, dtype) for dtype in DTYPES)
    yield from affine_weights(*shape)


def record_products(recorder: Recorder) -> None:
    """Plain and affine weights, gate and up, whole and split K, one row of weights and several."""
    moe, experts = VerifyMatmulMoe(recorder), mx.array([[0, 1]])
    for rows, shape in product((1, 3), ((1, 8), (33, 128), (32, 256), (64, 1024), (64, 4096))):
        matmul = VerifyMatmul(recorder, ENOUGH_TILES_LARGE if rows == 1 else ENOUGH_TILES)
        for w, dtype, gated in product(matrices(*shape), DTYPES, (False, True)):
            taken(matmul, mx.zeros((rows, w.shape[1]), dtype), *[w] * (1 + gated), gated=gated)
    for shape in ((2, 1, 8), (2, 33, 128)):
        for w, dtype, gated in product(matrices(*shape), DTYPES, (False, True)):
            x = mx.zeros((1, w.shape[2]), dtype)
            taken(moe, x, *[w] * (1 + gated), gated=gated, experts=experts)


def record_fused(recorder: Recorder) -> None:
    """Two to as many matrices as are taken, whole and split K."""
    for enough in (ENOUGH_TILES, ENOUGH_TILES_LARGE):
        several = VerifyMatmul(recorder, enough)
        for count, shape in product(range(1, 9), ((1, 8), (32, 256), (64, 1024))):
            for w, dtype in product(matrices(*shape), DTYPES):
                taken(several, mx.zeros((3, w.shape[1]), dtype), *[w] * count)


def record_attention(recorder: Recorder) -> None:
    """Plain and quantized caches, chains and trees, sinks; of one key and of several."""
    attention = BlockAttention(recorder)
    for head_dim, dtype, (nodes, length) in product(HEAD_DIMS, DTYPES, ROWS):
        queries = mx.zeros((1, 2, nodes, head_dim), dtype)
        plain = mx.zeros((1, 1, length, head_dim), dtype)
        if taken(attention, AttentionCall(queries, plain, plain, 1.0)) is None:
            continue
        whole = (w for w in affine_weights(1, 1, length, head_dim) if w.shape[-1] == head_dim)
        for stored, tree, sinks in product((plain, *whole), (False, True), (False, True)):
            given = {"sinks": mx.zeros(2)} if sinks else {}
            if tree:
                given["tree"] = TreeMask(mx.arange(nodes), mx.eye(nodes))
            taken(attention, AttentionCall(queries, stored, stored, 1.0, **given))


def record_delta(recorder: Recorder) -> None:
    """Verify of chains and trees, and replay."""
    rule = DeltaRule(recorder)
    shapes = cycle([(1, 1, 1), (2, 4, 6), (1, 8, 128)])  # heads of keys, of values, Dv
    for dtype, gate, key_dim in product(DTYPES, DTYPES, KEY_DIMS):
        key_heads, heads, dim = next(shapes)
        keys = mx.zeros((1, 1, key_heads, key_dim), dtype)
        values, beta = mx.zeros((1, 1, heads, dim), dtype), mx.zeros((1, 1, heads), gate)
        state = mx.zeros((1, heads, dim, key_dim))
        tape = Tape(keys, values, beta.astype(mx.float32), beta, state)
        if taken(rule.verify, keys, tape) is not None:
            rule.replay(tape, mx.array([0]), 1)
            for nodes in TREES:  # whose branching nodes wait in no slot, one, ... of them
                queries, *rows = (mx.repeat(x, nodes, axis=1) for x in (keys, *tape[:-1]))
                parents = [(node - 1) // 2 if node else -1 for node in range(nodes)]
                rule.verify(queries, Tape(*rows, state), parents)


def every_call() -> Recorder:
    """All of them."""
    recorder = Recorder()
    for record in (record_products, record_fused, record_attention, record_delta):
        record(recorder)
    return recorder
