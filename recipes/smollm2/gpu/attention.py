"""What MLX's attention takes for keys of a new length, and for keys padded to few lengths.

    cd recipes && python -m smollm2.gpu.attention OUT

On CUDA, cuDNN prepares itself for each new shape; `MLX_CUDA_USE_CUDNN_SDPA=0`, which MLX reads when
it starts, turns it off. So each setting is timed in a process of its own. Figures go to OUT.
"""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
import time
from pathlib import Path
from statistics import median

import mlx.core as mx

from .figures import Figures

SWITCH = "MLX_CUDA_USE_CUDNN_SDPA"
# (query heads, key heads, head size) of SmolLM2-135M and of Qwen3-8B.
SHAPES = ((9, 3, 64), (32, 8, 128))
ROWS = (1, 4, 8, 16)
FIRST = 500  # keys of the first length
LENGTHS = 16  # each has a key more than the one before
BUCKET = 256  # padded lengths are multiples of it


def milliseconds(shape: tuple[int, int, int], rows: int, keys: int, padded: bool) -> float:
    """Milliseconds of one call, until its result is there."""
    heads, kv_heads, size = shape
    length = -(-keys // BUCKET) * BUCKET if padded else keys
    queries = mx.random.normal((1, heads, rows, size)).astype(mx.bfloat16)
    kept = mx.random.normal((2, 1, kv_heads, length, size)).astype(mx.bfloat16)
    visible = mx.arange(length) <= mx.arange(keys - rows, keys)[:, None]
    mx.eval(queries, kept, visible)
    start = time.perf_counter()
    mask = visible if padded else "causal"
    mx.eval(
        mx.fast.scaled_dot_product_attention(queries, kept[0], kept[1], scale=size**-0.5, mask=mask)
    )
    return 1000 * (time.perf_counter() - start)


def measure(figures: Figures) -> None:
    """Time all shapes: each length for the first time, then all of them again."""
    for shape in SHAPES:
        for rows in ROWS:
            for padded in (False, True):
                turns = [
                    [milliseconds(shape, rows, FIRST + number, padded) for number in range(LENGTHS)]
                    for _ in range(2)
                ]
                figures.add(
                    "attention",
                    cudnn=os.environ.get(SWITCH, "default"),
                    device=str(mx.default_device()),
                    heads=shape,
                    rows=rows,
                    padded=padded,
                    new_ms=round(median(turns[0]), 3),
                    again_ms=round(median(turns[1]), 3),
                )


def main() -> None:
    """Measure with cuDNN as MLX has it, and without."""
    parser = argparse.ArgumentParser(description="Time MLX's attention for new lengths of keys.")
    parser.add_argument("out", type=Path, help="folder of figures.jsonl")
    parser.add_argument("--here", action="store_true", help="in this process, as it is")
    options = parser.parse_args()
    if options.here:
        measure(Figures(options.out, time.monotonic()))
        return
    command = [sys.executable, "-m", "smollm2.gpu.attention", str(options.out), "--here"]
    for switch in ({}, {SWITCH: "0"}):
        subprocess.run(command, env=os.environ | switch, check=True)


if __name__ == "__main__":
    main()
