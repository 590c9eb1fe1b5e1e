"""MLX's kernels against ours, for the shapes of a model: what decides on this machine."""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import zip_longest
from typing import Any

import mlx.core as mx
import mlx.nn as nn

from ..kernels.calibration import Timing
from ..kernels.modules import Kernels, can_swap, verifying
from ..kernels.shapes import AttentionShape, Matrix, dtype_of, matrices
from ..targets.attention import attention_shape
from ..targets.caches import make_cache

ROWS = (1, 2, 4, 6, 8, 12, 16)
CONTEXT = 4096  # tokens that attention is timed over
LAYERS = 8  # of one shape that take turns, or the weights would come from a cache
REPEATS = 5  # of which the quickest counts: other programs only ever add time
SEED = 0


@dataclass(frozen=True)
class KernelRow:
    """The timing of one shape.

    Attributes:
        key: as of `Matrix.key` and `attention_key`.
        layers: how many layers of the model have it.
        timing: seconds of one layer.
    """

    key: str
    layers: int
    timing: Timing


def kernel_rows(
    model: nn.Module,
    config: dict[str, Any],
    kernels: Kernels,
    known: Mapping[str, Timing],
    rows: Sequence[int] = ROWS,
    clock: Callable[[], float] = time.perf_counter,
) -> Iterator[KernelRow]:
    """Time every shape of a model that our kernels take, with MLX's and with ours in turns.

    Args:
        model: an mlx-lm model with stock layers.
        config: its config.json.
        kernels: ours.
        known: timings by key, which are not taken again.
        rows: at how many rows.
        clock: seconds.
    """
    layers: list[Any] = model.layers
    found = (attention_shape(*of) for of in zip_longest(layers, make_cache(model)))
    attentions = Counter(
        AttentionShape(shape.heads, shape.key_heads, shape.head_dim, shape.dtype)
        for shape in found
        if shape  # whatever its window: the context here fits into any
    )
    for shape, count in attentions.items():
        timing = known.get(shape.key) or _attention(shape, kernels, rows, clock)
        yield KernelRow(shape.key, count, timing)
    shapes: dict[str, list[tuple[nn.Module, Matrix]]] = {}
    for _, module, matrix in matrices(model, config):
        if can_swap(module, matrix):
            shapes.setdefault(matrix.key, []).append((module, matrix))
    for key, same in shapes.items():
        timing = known.get(key) or _products(same[:LAYERS], kernels, rows, clock)
        yield KernelRow(key, len(same), timing)


def _products(
    layers: list[tuple[nn.Module, Matrix]],
    kernels: Kernels,
    rows: Sequence[int],
    clock: Callable[[], float],
) -> Timing:
    """Layers of one shape."""

    def both(count: int) -> tuple[float, float]:
        calls = [_call(module, matrix, count) for module, matrix in layers]
        stock = _seconds(calls, clock)
        with verifying(layers, kernels):
            return stock, _seconds(calls, clock)

    return _timing(both, rows)


def _attention(
    shape: AttentionShape, kernels: Kernels, rows: Sequence[int], clock: Callable[[], float]
) -> Timing:
    """Attention over `CONTEXT` tokens, in `LAYERS` caches that take turns."""
    scale, size = shape.head_dim**-0.5, (1, shape.key_heads, CONTEXT, shape.head_dim)
    held = [_noise(size, shape.dtype, seed) for seed in range(2 * LAYERS)]
    pairs = list(zip(held[:LAYERS], held[LAYERS:], strict=True))

    def both(count: int) -> tuple[float, float]:
        q = _noise((1, shape.heads, count, shape.head_dim), shape.dtype)
        mask = "causal" if count > 1 else None
        attend = mx.fast.scaled_dot_product_attention
        stock = [partial(attend, q, k, v, scale=scale, mask=mask) for k, v in pairs]
        ours = [partial(kernels.attention, q, k, v, scale=scale) for k, v in pairs]
        return _seconds(stock, clock), _seconds(ours, clock)

    return _timing(both, rows)


def _timing(both: Callable[[int], tuple[float, float]], rows: Sequence[int]) -> Timing:
    """The quickest of stock and ours at each number of rows, a layer each, the rows in turns."""
    stock, ours = dict.fromkeys(rows, float("inf")), dict.fromkeys(rows, float("inf"))
    for repeat in range(REPEATS + 1):
        for count in rows:
            seconds, own = both(count)
            if repeat:  # the first one compiles and warms up
                stock[count] = min(stock[count], seconds)
                ours[count] = min(ours[count], own)
    return Timing(stock, ours)


def _seconds(calls: Sequence[Callable[[], mx.array]], clock: Callable[[], float]) -> float:
    """Of one of these calls, which are evaluated together."""
    start = clock()
    mx.eval([call() for call in calls])
    return (clock() - start) / len(calls)


def _noise(shape: tuple[int, ...], dtype: mx.Dtype, seed: int = SEED) -> mx.array:
    noise = mx.random.normal(shape, key=mx.random.key(seed)).astype(dtype)
    mx.eval(noise)
    return noise


def _call(module: Any, matrix: Matrix, rows: int) -> Callable[[], mx.array]:
    """A forward of the layer over so many rows of noise."""
    x = _noise((1, rows, matrix.depth), dtype_of(module))
    if isinstance(module, nn.Embedding | nn.QuantizedEmbedding):
        return lambda: module.as_linear(x)
    if not matrix.experts:
        return lambda: module(x)
    # Each row's experts are different ones, as a router's are.
    chances = _noise((1, rows, matrix.experts), mx.float32)
    experts = mx.argsort(chances, axis=-1)[..., : matrix.top_k]
    mx.eval(experts)
    return lambda: module(x[..., None, None, :], experts)
