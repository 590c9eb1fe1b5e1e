"""Time MLX's kernels against ours for the shapes of a model. `tune` chooses by these times."""

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

from ..kernels.choose import Timing
from ..kernels.modules import Kernels, can_swap, verifying
from ..kernels.shapes import AttentionShape, Matrix, dtype_of, matrices
from ..targets.attention import attention_shape
from ..targets.caches import make_cache

ROWS = (1, 2, 4, 6, 8, 12, 16)
CONTEXT = 4096  # tokens that attention is timed over
LAYERS = 8  # layers of one shape take turns, or the weights would come from a cache
REPEATS = 5  # the fastest counts: other programs only ever add time


@dataclass(frozen=True)
class ShapeTiming:
    """The timing of one shape.

    Attributes:
        key: as in `Matrix.key` and `AttentionShape.key`.
        layers: how many layers of the model have this shape.
        timing: seconds per layer.
    """

    key: str
    layers: int
    timing: Timing


def time_shapes(
    model: nn.Module,
    config: dict[str, Any],
    kernels: Kernels,
    known: Mapping[str, Timing],
    rows: Sequence[int] = ROWS,
    clock: Callable[[], float] = time.perf_counter,
) -> Iterator[ShapeTiming]:
    """Time every shape of a model that our kernels support, with MLX's and with ours in turns.

    Args:
        model: an mlx-lm model with stock layers.
        config: its config.json.
        kernels: ours.
        known: timings by key, which are not measured again.
        rows: numbers of rows to time.
        clock: returns seconds.
    """
    layers: list[Any] = model.layers
    found = (attention_shape(*of) for of in zip_longest(layers, make_cache(model)))
    attentions = Counter(  # the window does not matter: `CONTEXT` fits into any
        AttentionShape(shape.heads, shape.key_heads, shape.head_dim, shape.dtype)
        for shape in found
        if shape
    )
    for shape, count in attentions.items():
        timing = known.get(shape.key) or _time_attention(shape, kernels, rows, clock)
        yield ShapeTiming(shape.key, count, timing)
    shapes: dict[str, list[tuple[nn.Module, Matrix]]] = {}
    for _, module, matrix in matrices(model, config):
        if can_swap(module, matrix):
            shapes.setdefault(matrix.key, []).append((module, matrix))
    for key, same in shapes.items():
        timing = known.get(key) or _time_products(same[:LAYERS], kernels, rows, clock)
        yield ShapeTiming(key, len(same), timing)


def _time_products(
    layers: list[tuple[nn.Module, Matrix]],
    kernels: Kernels,
    rows: Sequence[int],
    clock: Callable[[], float],
) -> Timing:
    def both(count: int) -> tuple[float, float]:
        calls = [_forward(module, matrix, count) for module, matrix in layers]
        stock = _seconds(calls, clock)
        with verifying(layers, kernels):
            return stock, _seconds(calls, clock)

    return _fastest(both, rows)


def _time_attention(
    shape: AttentionShape, kernels: Kernels, rows: Sequence[int], clock: Callable[[], float]
) -> Timing:
    """Time attention over `CONTEXT` tokens in `LAYERS` caches that take turns."""
    scale, size = shape.head_dim**-0.5, (1, shape.key_heads, CONTEXT, shape.head_dim)
    caches = [
        (_noise(size, shape.dtype, seed), _noise(size, shape.dtype, LAYERS + seed))
        for seed in range(LAYERS)
    ]

    def both(count: int) -> tuple[float, float]:
        q = _noise((1, shape.heads, count, shape.head_dim), shape.dtype)
        mask = "causal" if count > 1 else None
        attend = mx.fast.scaled_dot_product_attention
        stock = [partial(attend, q, k, v, scale=scale, mask=mask) for k, v in caches]
        ours = [partial(kernels.attention, q, k, v, scale=scale) for k, v in caches]
        return _seconds(stock, clock), _seconds(ours, clock)

    return _fastest(both, rows)


def _fastest(both: Callable[[int], tuple[float, float]], rows: Sequence[int]) -> Timing:
    """The fastest of stock and ours at each number of rows; the rows take turns."""
    stock, ours = dict.fromkeys(rows, float("inf")), dict.fromkeys(rows, float("inf"))
    for repeat in range(REPEATS + 1):
        for count in rows:
            stock_seconds, our_seconds = both(count)
            if repeat:  # the first one compiles and warms up
                stock[count] = min(stock[count], stock_seconds)
                ours[count] = min(ours[count], our_seconds)
    return Timing(stock, ours)


def _seconds(calls: Sequence[Callable[[], mx.array]], clock: Callable[[], float]) -> float:
    """Seconds per call, of calls that are evaluated together."""
    start = clock()
    mx.eval([call() for call in calls])
    return (clock() - start) / len(calls)


def _noise(shape: tuple[int, ...], dtype: mx.Dtype, seed: int = 0) -> mx.array:
    noise = mx.random.normal(shape, key=mx.random.key(seed)).astype(dtype)
    mx.eval(noise)
    return noise


def _forward(module: Any, matrix: Matrix, rows: int) -> Callable[[], mx.array]:
    """A forward of the layer over rows of noise."""
    x = _noise((1, rows, matrix.depth), dtype_of(module))
    if isinstance(module, nn.Embedding | nn.QuantizedEmbedding):
        return lambda: module.as_linear(x)
    if not matrix.experts:
        return lambda: module(x)
    # Each row has experts of its own, as behind a router.
    scores = _noise((1, rows, matrix.experts), mx.float32)
    experts = mx.argsort(scores, axis=-1)[..., : matrix.top_k]
    mx.eval(experts)
    return lambda: module(x[..., None, None, :], experts)
