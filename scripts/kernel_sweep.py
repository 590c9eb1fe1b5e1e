"""Random calls of the Metal kernels, run on the CPU: the largest errors found.

    python scripts/kernel_sweep.py --calls 1000 --seed 0
    python scripts/kernel_sweep.py --calls 200 --only attention

Each call has random shapes, dtypes, weights, caches and trees. It runs in checked mode and is
compared with its float32 reference; then one of its rows, alone, must give the same bits. Errors
are parts of the reference's largest magnitude; the tests allow 1e-3, 8e-3 and 1e-5 for float16,
bfloat16 and float32.
"""

import argparse
import random
import sys
from pathlib import Path

import mlx.core as mx

from dflash_mlx.kernels.block_attention import (
    HEAD_DIMS,
    BlockAttention,
    TreeMask,
    block_attention_reference,
)
from dflash_mlx.kernels.delta_replay import DeltaVerify, delta_verify_reference
from dflash_mlx.kernels.verify_matmul import VerifyMatmul, verify_matmul_reference
from dflash_mlx.kernels.verify_matmul_moe import VerifyMatmulMoe, verify_matmul_moe_reference
from dflash_mlx.kernels.verify_qkv import COUNTS, VerifyQkv, verify_qkv_reference
from dflash_mlx.kernels.weights import AffineWeights, Weights, dequantized

sys.path.insert(0, str(Path(__file__).parents[1] / "tests"))
from kernel_check import DTYPES, kernel_factory, random_weights, relative_error, same_bits
from kernel_trees import path, random_parents, random_tree

EXPERTS = 12


def weights_of(choose: random.Random, dtype: mx.Dtype, leading: tuple[int, ...]) -> list:
    """One matrix or two, plain or quantized: their shape is `leading`, N, K."""
    bits, group = choose.choice([None, 4, 8]), choose.choice([32, 64, 128])
    depth = choose.randint(8, 1500) if bits is None else group * choose.randint(1, 2048 // group)
    shape = (*leading, choose.randint(8, 60 if leading else 300), depth)
    return [random_weights(shape, dtype, bits, group) for _ in range(choose.choice([1, 1, 2]))]


def dense(matmul: VerifyMatmul, choose: random.Random, dtype: mx.Dtype) -> tuple[float, bool]:
    """The error of one product, and whether a row of it has the same bits alone."""
    weights = weights_of(choose, dtype, ())
    x = mx.random.normal((choose.randint(1, 16), weights[0].shape[1])).astype(dtype)
    row = choose.randrange(len(x))
    y = matmul(x, *weights)
    truth = verify_matmul_reference(x.astype(mx.float32), *weights)
    return relative_error(y, truth), same_bits(matmul(x[row], *weights), y[row])


def beside(kernel: VerifyQkv, choose: random.Random, dtype: mx.Dtype) -> tuple[float, bool]:
    """As `dense`, for two to four matrices in one launch."""
    bits, group = choose.choice([None, 4, 8]), choose.choice([32, 64, 128])
    depth = choose.randint(8, 1500) if bits is None else group * choose.randint(1, 2048 // group)
    columns = [choose.randint(8, 150) for _ in range(choose.choice(COUNTS))]
    weights = [random_weights((n, depth), dtype, bits, group) for n in columns]
    x = mx.random.normal((choose.randint(1, 40), depth)).astype(dtype)
    row = choose.randrange(len(x))
    y, alone = (mx.concatenate(kernel(rows, weights), axis=-1) for rows in (x, x[row]))
    truth = verify_qkv_reference(x.astype(mx.float32), weights)
    return relative_error(y, mx.concatenate(truth, axis=-1)), same_bits(alone, y[row])


def routed(moe: VerifyMatmulMoe, choose: random.Random, dtype: mx.Dtype) -> tuple[float, bool]:
    """As `dense`, with experts."""
    w, *up = weights_of(choose, dtype, (EXPERTS,))
    x = mx.random.normal((choose.randint(1, 16), w.shape[2])).astype(dtype)
    chances = mx.random.uniform(shape=(len(x), EXPERTS))
    experts = mx.argsort(chances, axis=-1)[:, : choose.randint(1, 8)]
    row = choose.randrange(len(x))
    y = moe(x, w, experts, *up)
    truth = verify_matmul_moe_reference(x.astype(mx.float32), w, experts, *up)
    return relative_error(y, truth), same_bits(moe(x[row], w, experts[row], *up), y[row])


def attention(attend: BlockAttention, choose: random.Random, dtype: mx.Dtype) -> tuple[float, bool]:
    """As `dense`: a chain or a tree behind a cache; its last row has the bits of its path alone."""
    head_dim, bits = choose.choice(HEAD_DIMS), choose.choice([None, None, 4, 8])
    key_heads, group, tree = choose.randint(1, 2), choose.randint(1, 8), choose.random() < 0.4
    nodes = choose.randint(1, 64 if tree else 16)
    past, first = int(10 ** choose.uniform(0, 3.7)) - 1, choose.choice([0, choose.randint(1, 3000)])
    stored = (1, key_heads, past + nodes, head_dim)
    queries = mx.random.normal((1, key_heads * group, nodes, head_dim)).astype(dtype)
    pair = [mx.random.normal(stored).astype(dtype) for _ in range(2)]
    if bits and head_dim % 64 == 0:
        pair = [AffineWeights(*mx.quantize(x, 64, bits), bits, 64) for x in pair]
    named = {"scale": head_dim**-0.5, "first": first}
    named["window"] = choose.choice([None, choose.randint(1, 500)])
    named["sinks"] = choose.choice([None, mx.random.normal((key_heads * group,))])
    path = mx.arange(nodes)
    if tree:
        depths, ancestors = random_tree(nodes, choose.randrange(1000))
        named["tree"] = TreeMask(first + past + depths, ancestors)
        path = mx.array([node for node, above in enumerate(ancestors[-1].tolist()) if above])
    y = attend(queries, *pair, **named)
    truth = block_attention_reference(queries.astype(mx.float32), *map(dequantized, pair), **named)
    named["tree"] = None
    rows = mx.concatenate([mx.arange(past), past + path])
    alone = attend(queries[:, :, -1:], *(_rows(x, rows) for x in pair), **named)
    return relative_error(y, truth), same_bits(alone, y[:, :, -1:])


def _rows(stored: Weights, rows: mx.array) -> Weights:
    """Some rows of keys or values."""
    if isinstance(stored, mx.array):
        return mx.take(stored, rows, axis=2)
    arrays = (mx.take(x, rows, axis=2) for x in (stored.words, stored.scales, stored.biases))
    return AffineWeights(*arrays, stored.bits, stored.group_size)


def delta(verify: DeltaVerify, choose: random.Random, dtype: mx.Dtype) -> tuple[float, bool]:
    """As `attention`, for the gated delta rule."""
    key_heads, repeats, tree = choose.randint(1, 2), choose.randint(1, 4), choose.random() < 0.5
    key_dim, value_dim = choose.randint(8, 256), choose.randint(2, 12)
    nodes, heads = choose.randint(1, 64 if tree else 16), key_heads * repeats
    directions = mx.random.normal((2, 1, nodes, key_heads, key_dim))
    queries, keys = (directions / mx.linalg.norm(directions, axis=-1, keepdims=True)).astype(dtype)
    values = mx.random.normal((1, nodes, heads, value_dim)).astype(dtype)
    decay, beta = mx.random.uniform(shape=(2, 1, nodes, heads))
    state = mx.random.normal((1, heads, value_dim, key_dim)) / key_dim**0.5
    tape = [queries, keys, values, decay, beta.astype(dtype)]
    parents = random_parents(nodes, choose.randrange(1000)) if tree else None
    rows = mx.array(path(parents, nodes - 1) if parents else list(range(nodes)))
    y, _ = verify(*tape, state, parents)
    truth, _ = delta_verify_reference(*(x.astype(mx.float32) for x in tape), state, parents)
    alone, _ = verify(*(mx.take(x, rows, axis=1) for x in tape), state)
    return relative_error(y, truth), same_bits(alone[:, -1], y[:, -1])


# What a kind of call needs, and how often it is drawn.
KERNELS = {
    dense: (VerifyMatmul, 4),
    beside: (VerifyQkv, 2),
    routed: (VerifyMatmulMoe, 2),
    attention: (BlockAttention, 2),
    delta: (DeltaVerify, 1),
}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--calls", type=int, default=1000)
    parser.add_argument("--seed", type=int, default=0)
    names = [kind.__name__ for kind in KERNELS]
    parser.add_argument("--only", choices=names, help="one kind of call instead of all")
    options = parser.parse_args()
    choose = random.Random(options.seed)
    mx.random.seed(options.seed)
    kinds = [kind for kind in KERNELS if options.only in (None, kind.__name__)]
    kernels = {kind: KERNELS[kind][0](kernel_factory()) for kind in kinds}
    weights = [KERNELS[kind][1] for kind in kinds]
    worst: dict[tuple[str, str], list[float]] = {}
    other_bits = 0
    for _ in range(options.calls):
        (kind,), dtype = choose.choices(kinds, weights), choose.choice(DTYPES)
        error, same = kind(kernels[kind], choose, dtype)
        worst.setdefault((kind.__name__, str(dtype).split(".")[-1]), []).append(error)
        other_bits += not same
    for (name, dtype), errors in sorted(worst.items()):
        print(f"{name:9} {dtype:9} {len(errors):5} calls, largest error {max(errors):.1e}")
    print(f"{other_bits} calls of which a row has other bits alone")


if __name__ == "__main__":
    main()
