"""Random matrix products through the Metal kernels, run on the CPU: the largest errors found.

    python scripts/kernel_sweep.py --products 1000 --seed 0

Each product has random rows, columns, depth, dtype, weights and experts. It runs in checked mode
and is compared with its float32 reference; then one of its rows, alone, must give the same bits.
Errors are parts of the reference's largest magnitude; the tests allow 1e-3, 8e-3 and 1e-5 for
float16, bfloat16 and float32.
"""

import argparse
import random
import sys
from pathlib import Path

import mlx.core as mx

from dflash_mlx.kernels.verify_matmul import VerifyMatmul, verify_matmul_reference
from dflash_mlx.kernels.verify_matmul_moe import VerifyMatmulMoe, verify_matmul_moe_reference

sys.path.insert(0, str(Path(__file__).parents[1] / "tests"))
from kernel_check import DTYPES, kernel_factory, random_weights, relative_error, same_bits

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


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--products", type=int, default=1000)
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args()
    choose = random.Random(options.seed)
    mx.random.seed(options.seed)
    kernels = {dense: VerifyMatmul(kernel_factory()), routed: VerifyMatmulMoe(kernel_factory())}
    worst: dict[tuple[str, str], list[float]] = {}
    other_bits = 0
    for _ in range(options.products):
        kind, dtype = choose.choice([dense, dense, routed]), choose.choice(DTYPES)
        error, same = kind(kernels[kind], choose, dtype)
        worst.setdefault((kind.__name__, str(dtype).split(".")[-1]), []).append(error)
        other_bits += not same
    for (kind, dtype), errors in sorted(worst.items()):
        print(f"{kind:7} {dtype:9} {len(errors):5} products, largest error {max(errors):.1e}")
    print(f"{other_bits} products of which a row has other bits alone")


if __name__ == "__main__":
    main()
