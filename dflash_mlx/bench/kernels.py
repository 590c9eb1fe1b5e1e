"""MLX's kernels against ours, for the matrices of a model: what decides on this machine."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import mlx.core as mx
import mlx.nn as nn

from ..errors import SettingsError
from ..kernels.calibration import Timing
from ..kernels.modules import Kernels, can_swap, verifying
from ..kernels.shapes import Matrix, matrices

ROWS = (1, 2, 4, 6, 8, 12, 16)
LAYERS = 8  # of one shape that take turns, or the weights would come from a cache
REPEATS = 5  # of which the quickest counts: other programs only ever add time
SEED = 0


@dataclass(frozen=True)
class KernelRow:
    """The timing of one shape.

    Attributes:
        key: as of `Matrix.key`.
        layers: how many layers of the model have it.
        timing: seconds of one layer.
    """

    key: str
    layers: int
    timing: Timing


def check_metal() -> None:
    """Raise `SettingsError` where there is no Metal to time."""
    if not mx.metal.is_available():
        raise SettingsError(
            "Our kernels need Metal, which this machine lacks: MLX's own CPU kernels run instead."
        )


def kernel_rows(
    model: nn.Module,
    config: dict[str, Any],
    kernels: Kernels,
    rows: Sequence[int] = ROWS,
    clock: Callable[[], float] = time.perf_counter,
) -> Iterator[KernelRow]:
    """Time every shape of a model's matrices that ours can multiply by, in both ways in turns.

    Args:
        model: an mlx-lm model with stock layers.
        config: its config.json.
        kernels: ours.
        rows: at how many rows.
        clock: seconds.
    """
    shapes: dict[str, list[tuple[nn.Module, Matrix]]] = {}
    for _, module, matrix in matrices(model, config):
        if can_swap(module, matrix):
            shapes.setdefault(matrix.key, []).append((module, matrix))
    for key, layers in shapes.items():
        timing = _timing(layers[:LAYERS], kernels, rows, clock)
        yield KernelRow(key, len(layers), timing)


def _timing(
    layers: list[tuple[nn.Module, Matrix]],
    kernels: Kernels,
    rows: Sequence[int],
    clock: Callable[[], float],
) -> Timing:
    stock, ours = dict.fromkeys(rows, float("inf")), dict.fromkeys(rows, float("inf"))
    for repeat in range(REPEATS + 1):
        for count in rows:
            calls = [_call(module, matrix, count) for module, matrix in layers]
            seconds = _seconds(calls, clock)
            with verifying(layers, kernels):
                own = _seconds(calls, clock)
            if repeat:  # the first one compiles and warms up
                stock[count] = min(stock[count], seconds / len(layers))
                ours[count] = min(ours[count], own / len(layers))
    return Timing(stock, ours)


def _seconds(calls: Sequence[Callable[[], mx.array]], clock: Callable[[], float]) -> float:
    start = clock()
    mx.eval([call() for call in calls])
    return clock() - start


def _call(module: Any, matrix: Matrix, rows: int) -> Callable[[], mx.array]:
    """A forward of the layer over so many rows of noise."""
    dtype = module.scales.dtype if "scales" in module else module.weight.dtype
    key, key_of_experts = mx.random.split(mx.random.key(SEED))
    x = mx.random.normal((1, rows, matrix.depth), key=key).astype(dtype)
    if isinstance(module, nn.Embedding | nn.QuantizedEmbedding):
        mx.eval(x)
        return lambda: module.as_linear(x)
    if not matrix.experts:
        mx.eval(x)
        return lambda: module(x)
    # Each row's experts are different ones, as a router's are.
    chances = mx.random.uniform(shape=(1, rows, matrix.experts), key=key_of_experts)
    experts = mx.argsort(chances, axis=-1)[..., : matrix.top_k]
    x = x[..., None, None, :]
    mx.eval(x, experts)
    return lambda: module(x, experts)
