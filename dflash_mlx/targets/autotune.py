"""Autotuning: MLX's kernels and ours are timed on this machine, for a model's own layers.

Every form of weights and of attention is timed alone, in turns, and ours run at the rows where they
win. Then the whole forward decides: a kernel that wins alone may still make it slower. There is a
limit on the time that all of this takes; at rows that were not timed by then, the guess decides.
"""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from itertools import product
from types import MappingProxyType
from typing import Any

import mlx.core as mx
import mlx.nn as nn
from tqdm import tqdm

from ..kernels.block_attention import MOST_NODES
from ..kernels.choose import (
    DEPTHS,
    NONE,
    ROWS,
    WIDEST,
    Rows,
    chosen,
    guess,
    guess_attention,
    key_at,
    tensor_key,
)
from ..kernels.modules import (
    Kernels,
    can_use_tensor_units,
    chosen_together,
    restored,
    verifying,
    wire,
)
from ..kernels.shapes import AttentionShape, Matrix, dtype_of, matrices
from ..machine.chips import Chip
from ..proposal import Proposal
from .attention import attention_shapes, stock_attention
from .target import Target

FORWARD, TITLE = "whole forward", "Timing kernels, once on this machine"
LAYERS = 4  # layers of one form run together, or waiting for the device would be timed
ALONE = 0.5  # of the time, at most, before the whole forward is timed
GAIN = 0.98  # of MLX's time; a smaller gain alone may be noise
NONE_KNOWN: Rows = MappingProxyType({})
LOSS = 1.01  # of MLX's time in the whole forward
ORDER = (16, 4, 8, 2, 6, 12, 3, 1)  # rows, the commonest first


@dataclass(frozen=True)
class Timing:
    """Seconds by number of rows, with MLX's kernels and with ours; only what was timed.

    Attributes:
        key: `Matrix.key`, attention's name by depth, or `FORWARD`.
        layers: how many layers of the model have this form.
        stock, ours: seconds per layer, or of the forward.
    """

    key: str
    layers: int
    stock: Mapping[int, float]
    ours: Mapping[int, float]

    @property
    def won(self) -> list[int]:
        """The rows at which ours clearly took less."""
        return [rows for rows in self.ours if self.ours[rows] <= GAIN * self.stock[rows]]

    def choice(self, guessed: Rows, key: str, most: int = WIDEST) -> frozenset[int]:
        """The rows at which ours run, with a guess where they were not timed."""
        return chosen(self.won, most, self.ours, guessed.get(key, NONE))

    @property
    def not_lost(self) -> list[int]:
        """The rows at which ours did not take longer."""
        return [rows for rows in self.ours if self.ours[rows] <= LOSS * self.stock[rows]]


@dataclass
class Stopwatch:
    """Times two calls in turns, until its time is up.

    Args:
        seconds: the most that it takes, but for the call that runs when they have passed.
        repeats: how often each call is timed. The fastest counts: other programs only add time.
        clock: returns seconds.
    """

    seconds: float = 3.0
    repeats: int = 2
    clock: Callable[[], float] = time.perf_counter
    start: float | None = field(default=None, init=False)

    def both(
        self,
        stock: Callable[[], list[mx.array]],
        ours: Callable[[], list[mx.array]],
        share: float = 1.0,
        warm_up: bool = True,
        layers: int = 1,
    ) -> tuple[float, float] | None:
        """Seconds of each per layer; None if its `share` of the time has passed before."""
        calls, fastest = (stock, ours), [float("inf"), float("inf")]
        for repeat in range(self.repeats + warm_up):
            for at, call in enumerate(calls):
                now = self.clock()
                self.start = now if self.start is None else self.start
                if now - self.start >= share * self.seconds:
                    return None
                mx.eval(call())
                if repeat >= warm_up:
                    fastest[at] = min(fastest[at], self.clock() - now)
        return fastest[0] / layers, fastest[1] / layers


def forms(target: Target) -> list[str]:
    """The names of all weights and attention of a target, one a layer: what its timings are for."""
    found = [matrix.key for _, _, matrix in matrices(target.model, target.config)]
    return found + [shape.key for shape in attention_shapes(target.pairs()).elements()]


def guess_products(
    model: nn.Module, config: dict[str, Any], chip: Chip | None, known: Rows = NONE_KNOWN
) -> dict[str, frozenset[int]]:
    """The rows at which our products should win on a chip, where `known` does not say it."""
    rows: dict[str, frozenset[int]] = {}
    for group in chosen_together(model, config):
        if group.keys() <= known.keys():
            names = [name for key in group for name in (key, tensor_key(key)) if name in known]
            rows |= {name: known[name] for name in names}
        else:
            every = [matrix for layers in group.values() for _, matrix in layers]
            rows |= dict.fromkeys(group, guess(chip, every))
    return rows


def guesses(target: Target, chip: Chip | None) -> Rows:
    """The rows at which our kernels should win on a chip, before they were timed."""
    rows = guess_products(target.model, target.config, chip)
    for shape in attention_shapes(target.pairs()):
        of = guess_attention(chip, shape.heads, shape.key_heads)
        rows |= {key_at(shape.key, depth): of for depth in DEPTHS}
    return rows


def candidates(target: Target, tensor_units: bool = False) -> Rows:
    """All rows, for whatever our kernels can run, on `tensor_units` too."""
    keys = [key for group in chosen_together(target.model, target.config) for key in group]
    keys += [tensor_key(key) for key in keys if tensor_units]
    shapes = attention_shapes(target.pairs())
    keys += [key_at(shape.key, depth) for shape in shapes for depth in DEPTHS]
    return {key: chosen(ROWS, MOST_NODES) for key in keys}


def time_products(
    model: nn.Module,
    config: dict[str, Any],
    kernels: Kernels,
    broken: frozenset[str],
    stopwatch: Stopwatch,
    guessed: Rows,
) -> tuple[dict[str, frozenset[int]], dict[str, Timing]]:
    """Time a model's layers alone; returns the rows at which ours win, and the timings, by form.

    On a chip with tensor units, weights are timed on these, too. Args as of `autotune`.
    """
    groups = chosen_together(model, config)
    alone = {(key, False): layers for group in groups for key, layers in group.items()}
    for (key, _), layers in [*alone.items()]:
        if all(can_use_tensor_units(*layer, kernels) for layer in layers):
            alone[tensor_key(key), True] = layers
    bar = tqdm(alone.items(), TITLE, leave=False, disable=None)
    timings = {
        key: _time_layers(key, layers, tensor_units, kernels, stopwatch)
        for (key, tensor_units), layers in bar
        if key not in broken
    }
    rows: dict[str, frozenset[int]] = {}
    for group in groups:
        faster = {key: _faster(timings, key) for key in group if key in timings}
        total = _total([*faster.values()])
        for key, one in faster.items():
            rows[key] = rows[one.key] = total.choice(guessed, key)
    return rows, timings


def autotune(
    target: Target,
    kernels: Kernels,
    broken: frozenset[str],
    stopwatch: Stopwatch,
    guessed: Rows = NONE_KNOWN,
) -> tuple[Rows, list[Timing]]:
    """Time a target whose layers are MLX's; returns the rows at which ours run, and the timings.

    Args:
        target: it has no wiring, before and afterwards.
        kernels: ours.
        broken: the names of kernels that do not take part.
        stopwatch: a new one.
        guessed: the rows at which ours run, by form, where there was no time for both.
    """
    model, config = target.model, target.config
    rows, timings = time_products(model, config, kernels, broken, stopwatch, guessed)
    shapes = {
        shape.key: shape for shape in attention_shapes(target.pairs()) if shape.key not in broken
    }
    layers = Counter(forms(target))
    for (key, shape), depth in product(shapes.items(), DEPTHS):
        one = _time_attention(shape, layers[key], depth, kernels, stopwatch)
        timings[one.key], rows[one.key] = one, one.choice(guessed, one.key, MOST_NODES)
    # The forward reads few keys. Attention that wins over many takes part in it all the same.
    near = {
        key_at(key, DEPTHS[0]): frozenset().union(*(rows[key_at(key, depth)] for depth in DEPTHS))
        for key in shapes
    }
    with restored(model):
        target.wiring = wire(model, config, kernels, rows | near, broken=broken)
        forward = _time_forward(target, kernels, frozenset().union(*rows.values()), stopwatch)
        target.wiring = None
    return {
        key: of & chosen(forward.not_lost, MOST_NODES, forward.ours, guessed.get(key, NONE))
        for key, of in rows.items()
    }, [*timings.values(), forward]


def _faster(timings: Mapping[str, Timing], key: str) -> Timing:
    """The timing of our kernel, or the one on tensor units where these take less in total."""
    one, other = timings[key], timings.get(tensor_key(key), timings[key])
    rows = one.ours.keys() & other.ours.keys()
    return min(one, other, key=lambda timing: sum(timing.ours[at] for at in rows))


def _total(timings: Sequence[Timing]) -> Timing:
    """The layers of several forms together, at the rows for which all were timed."""
    timed = [rows for rows in ROWS if all(rows in one.ours for one in timings)]

    def total(of: Callable[[Timing], Mapping[int, float]]) -> dict[int, float]:
        return {rows: sum(one.layers * of(one)[rows] for one in timings) for rows in timed}

    return Timing("", 1, total(lambda one: one.stock), total(lambda one: one.ours))


def _timing(
    key: str, count: int, rows: Iterable[int], both: Callable[[int], tuple[float, float] | None]
) -> Timing:
    """The timing of `count` layers, with the seconds that `both` returns while there is time."""
    taken = {}
    for at in rows:
        if (seconds := both(at)) is None:
            break
        taken[at] = seconds
    stock, ours = ({at: seconds[way] for at, seconds in taken.items()} for way in (0, 1))
    return Timing(key, count, stock, ours)


def _time_layers(
    key: str,
    layers: list[tuple[nn.Module, Matrix]],
    tensor_units: bool,
    kernels: Kernels,
    stopwatch: Stopwatch,
) -> Timing:
    some = layers[:LAYERS]

    def both(rows: int) -> tuple[float, float] | None:
        calls = [_forward(module, matrix, rows) for module, matrix in some]

        def stock() -> list[mx.array]:
            return [call() for call in calls]

        def ours() -> list[mx.array]:
            with verifying(some, kernels, tensor_units):
                return stock()

        return stopwatch.both(stock, ours, ALONE, layers=len(some))

    return _timing(key, len(layers), ORDER, both)


def _time_attention(
    shape: AttentionShape, count: int, depth: int, kernels: Kernels, stopwatch: Stopwatch
) -> Timing:
    """Attention over `depth` keys, in caches of two layers that take turns."""
    scale, size = shape.head_dim**-0.5, (1, shape.key_heads, depth, shape.head_dim)
    keys, values, *others = (_noise(size, shape.dtype, seed) for seed in range(4))
    caches = [(keys, values), (others[0], others[1])]
    stock = partial(stock_attention, kernels.splits_stock)

    def both(rows: int) -> tuple[float, float] | None:
        q = _noise((1, shape.heads, rows, shape.head_dim), shape.dtype)
        mask = "causal" if rows > 1 else None
        return stopwatch.both(
            lambda: [stock(q, k, v, None, scale, mask) for k, v in caches],
            lambda: [kernels.attention(q, k, v, scale=scale) for k, v in caches],
            ALONE,
            layers=len(caches),
        )

    return _timing(key_at(shape.key, depth), count, ORDER, both)


def _time_forward(
    target: Target, kernels: Kernels, ours: frozenset[int], stopwatch: Stopwatch
) -> Timing:
    """A verify of a wired target, at the rows at which anything of ours runs."""

    def verify(rows: int, active: bool) -> list[mx.array]:
        kernels.active = active
        try:
            logits, _ = target.start().verify(Proposal(list(range(rows))))
        finally:
            kernels.active = True
        return [logits]

    def both(rows: int) -> tuple[float, float] | None:
        stock, with_ours = partial(verify, rows, False), partial(verify, rows, True)
        return stopwatch.both(stock, with_ours, warm_up=False)

    return _timing(FORWARD, 1, [rows for rows in ORDER if rows in ours], both)


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
