"""Autotuning: whole verifies are timed on this machine, with each group of our kernels on and off.

A kernel that wins alone may still make a forward slower, so forwards decide, and nothing is
guessed. What was not timed when the time was up is MLX's. A drafter's forward is all of its
products, one after another.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import mlx.core as mx
import mlx.nn as nn
from tqdm import tqdm

from .block_attention import MOST_NODES
from .choose import DEPTHS, chosen, key_at, tensor_key
from .modules import EXACT, Kernels, Wiring, chosen_together, restored, wire
from .shapes import Matrix, dtype_of, matrices

TITLE = "Checking and timing kernels, once on this machine"
GAIN = 0.98  # of the time without; a smaller gain may be noise
ORDER = (16, 4, 8, 2, 6, 12, 3, 1)  # rows, the commonest first
FIRST = ORDER[:2]  # rows that decide whether tensor units run

Keys = frozenset[str]  # the forms that run on our kernels
Call = Callable[[], list[mx.array]]
Start = Callable[[Wiring, int], Call]  # a wiring and rows -> the forward to time
InTurns = Callable[[Keys, Keys, int], tuple[float, float] | None]  # seconds with each, rows


@dataclass(frozen=True)
class Timing:
    """Seconds of a forward by number of rows, without a group of our kernels and with it.

    Attributes:
        key: the group's name.
        stock, ours: without and with it; only what was timed.
    """

    key: str
    stock: Mapping[int, float]
    ours: Mapping[int, float]

    @property
    def won(self) -> list[int]:
        """The rows at which ours clearly took less."""
        return [rows for rows in self.ours if self.ours[rows] <= GAIN * self.stock[rows]]


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
        self, stock: Call, ours: Call, ready: Callable[[int], None] = lambda at: None
    ) -> tuple[float, float] | None:
        """Seconds of each; None if the time has passed before.

        `ready` is called before each call of the first or second, and not timed. In the first turn
        kernels compile and are checked: it does not count, and what it takes longer is no part of
        the stopwatch's time.
        """
        calls = (stock, ours)
        fastest = [float("inf"), float("inf")]
        first = [0.0, 0.0]
        for repeat in range(self.repeats + 1):
            for at, call in enumerate(calls):
                now = self.clock()
                self.start = now if self.start is None else self.start
                if now - self.start >= self.seconds:
                    return None
                ready(at)
                now = self.clock()
                mx.eval(call())
                taken = self.clock() - now
                if repeat == 0:
                    first[at] = taken
                    self.start += taken
                elif repeat == 1:
                    self.start -= min(first[at], taken)
                if repeat:
                    fastest[at] = min(fastest[at], taken)
        return fastest[0], fastest[1]


def autotune(
    model: nn.Module,
    config: dict[str, Any],
    attention: Sequence[str],
    start: Callable[[Wiring, int, int], Call],
    kernels: Kernels,
    stopwatch: Stopwatch,
) -> tuple[dict[str, frozenset[int]], list[Timing]]:
    """Time a target's verifies; returns the rows at which ours run, by form, and the timings.

    Args:
        model: the target's, whose layers are MLX's.
        config: its config.json.
        attention: the forms of its attention, as of `attention_key`.
        start: a wiring, rows and the keys behind which they are read -> the forward to time.
        kernels: the kernels to try.
        stopwatch: what is left when its time is up stays MLX's.
    """

    def in_turns(first: Keys, second: Keys, rows: int, depth: int) -> tuple[float, float] | None:
        def behind(wiring: Wiring, rows: int) -> Call:
            return start(wiring, rows, depth)

        return _in_turns(
            model,
            config=config,
            kernels=kernels,
            stopwatch=stopwatch,
            start=behind,
            first=first,
            second=second,
            rows=rows,
        )

    near, far = (frozenset(key_at(key, depth) for key in attention) for depth in DEPTHS)
    groups = _product_groups(model, config) | ({"attention": near} if near else {})
    rows, timings = _choose(groups, kernels.tensor_units, partial(in_turns, depth=0))
    if far:
        products = frozenset(key for key, won in rows.items() if won) - near
        name = f"attention over {DEPTHS[1]} keys"
        timing = _time(
            name,
            without=products,
            with_ours=products | far,
            in_turns=partial(in_turns, depth=DEPTHS[1]),
        )
        rows |= dict.fromkeys(far, chosen(timing.won, MOST_NODES))
        timings.append(timing)
    return rows, timings


def autotune_products(
    model: nn.Module, kernels: Kernels, stopwatch: Stopwatch
) -> dict[str, frozenset[int]]:
    """Time a drafter's products; returns the rows at which ours run, by form."""

    def start(wiring: Wiring, rows: int) -> Call:
        calls = [_product(module, matrix, rows) for _, module, matrix in matrices(model, {})]
        return lambda: [call() for call in calls]

    in_turns = partial(_in_turns, model, {}, kernels, stopwatch, start)
    return _choose(_product_groups(model, {}), kernels.tensor_units, in_turns)[0]


def _product_groups(model: nn.Module, config: dict[str, Any]) -> dict[str, Keys]:
    """The forms of weights that are chosen together, by the name of their group."""
    return {", ".join(group): frozenset(group) for group in chosen_together(model, config)}


def _choose(
    groups: Mapping[str, Keys], tensor_units: bool, in_turns: InTurns
) -> tuple[dict[str, frozenset[int]], list[Timing]]:
    """The rows at which each form runs on our kernels, and the timings.

    First all groups against none of them, then all against all but one.
    """
    every: Keys = frozenset().union(*groups.values())
    units = frozenset(map(tensor_key, every)) if tensor_units else every
    if tensor_units:
        with_units = _time(
            "tensor units", without=every, with_ours=every | units, in_turns=in_turns, order=FIRST
        )
        if sum(with_units.ours.values()) < sum(with_units.stock.values()):
            every |= units
    whole = _time("whole verify", without=frozenset(), with_ours=every, in_turns=in_turns)
    stock: dict[str, dict[int, float]] = {name: {} for name in groups}
    ours: dict[str, dict[int, float]] = {name: {} for name in groups}
    runs: dict[str, list[int]] = {name: [] for name in groups}
    for rows in whole.ours:
        saved = 0.0  # where what is slower than MLX's is left out
        faster = []
        for name, keys in groups.items():
            others = every - keys - frozenset(map(tensor_key, keys))
            taken = in_turns(others, every, rows) if len(groups) > 1 else None
            if taken is not None:
                stock[name][rows], ours[name][rows] = taken
            if taken is None or taken[1] < taken[0]:
                faster.append(name)
            else:
                saved += taken[1] - taken[0]
        if whole.ours[rows] - saved <= GAIN * whole.stock[rows]:
            for name in faster:
                runs[name].append(rows)
    found: dict[str, frozenset[int]] = {}
    for name, keys in groups.items():
        of = chosen(runs[name], MOST_NODES if name == "attention" else 16)
        found |= dict.fromkeys(keys, of)
        found |= dict.fromkeys(every & frozenset(map(tensor_key, keys)), of)
    return found, [whole, *(Timing(name, stock[name], ours[name]) for name in groups)]


def _time(
    name: str, without: Keys, with_ours: Keys, in_turns: InTurns, order: Sequence[int] = ORDER
) -> Timing:
    """Forwards with two sets of kernels in turns, while there is time."""
    stock = {}
    ours = {}
    for rows in tqdm(order, TITLE, leave=False, disable=None):
        if (taken := in_turns(without, with_ours, rows)) is None:
            break
        stock[rows], ours[rows] = taken
    return Timing(name, stock, ours)


def _in_turns(
    model: nn.Module,
    config: dict[str, Any],
    kernels: Kernels,
    stopwatch: Stopwatch,
    start: Start,
    first: Keys,
    second: Keys,
    rows: int,
) -> tuple[float, float] | None:
    """Seconds of a forward with two sets of kernels. Layers are swapped while no clock runs."""
    call: Call = list
    with ExitStack() as stack:

        def ready(at: int) -> None:
            nonlocal call
            stack.close()
            stack.enter_context(restored(model))
            keys = (first, second)[at]
            call = start(
                wire(model, config=config, kernels=kernels, rows=dict.fromkeys(keys, EXACT)), rows
            )

        return stopwatch.both(lambda: call(), lambda: call(), ready)


def _product(module: Any, matrix: Matrix, rows: int) -> Callable[[], mx.array]:
    """A product of a layer with rows of noise."""

    def noise(*shape: int) -> mx.array:
        return mx.random.normal(shape, key=mx.random.key(0))

    x = noise(1, rows, matrix.depth).astype(dtype_of(module))
    mx.eval(x)
    if isinstance(module, nn.Embedding | nn.QuantizedEmbedding):
        return lambda: module.as_linear(x)
    if not matrix.experts:
        return lambda: module(x)
    # Each row has experts of its own, as behind a router.
    experts = mx.argsort(noise(1, rows, matrix.experts), axis=-1)[..., : matrix.top_k]
    mx.eval(experts)
    return lambda: module(x[..., None, None, :], experts)
