"""Autotuning: verifications are timed on this machine, with each group of our kernels on and off.

A kernel that wins alone may still make a forward slower, so forwards decide, and nothing is
guessed. What was not timed when the time was up runs on MLX's kernels. For a drafter, the products
of all its weights, one after another, stand for its forward.
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
from .modules import EXACT, KernelPlan, Kernels, chosen_together, restored, swap_layers
from .shapes import Matrix, activation_dtype, matrices

TITLE = "Checking and timing kernels, once on this machine"
# Our kernels have to take at most this share of the time. A smaller gain may be noise.
MAX_TIME_SHARE = 0.98
# The numbers of rows in the order in which they are timed, the most common first.
TIMED_ORDER = (16, 4, 8, 2, 6, 12, 3, 1)
# The numbers of rows that decide whether tensor units are used.
TENSOR_UNIT_ROWS = TIMED_ORDER[:2]

# The forms that run on our kernels.
Keys = frozenset[str]
# A forward to time, and what makes it from a kernel plan and a number of rows.
Call = Callable[[], list[mx.array]]
Start = Callable[[KernelPlan, int], Call]
# Times two sets of forms at a number of rows: the seconds with each, or None if time is up.
InTurns = Callable[[Keys, Keys, int], tuple[float, float] | None]


@dataclass(frozen=True)
class Timing:
    """Seconds of a forward by number of rows, without and with a group of our kernels.

    Attributes:
        key: the name of the group.
        stock: the seconds without it, for the rows that were timed.
        ours: the seconds with it.
    """

    key: str
    stock: Mapping[int, float]
    ours: Mapping[int, float]

    @property
    def won(self) -> list[int]:
        """The numbers of rows at which our kernels were clearly faster."""
        return [rows for rows in self.ours if self.ours[rows] <= MAX_TIME_SHARE * self.stock[rows]]


@dataclass
class Stopwatch:
    """Times two calls in turns, until its time is up.

    Args:
        seconds: how long to time; then no further call begins.
        repeats: how often each call is timed. The fastest counts, because other programs can only
            add time.
        clock: returns seconds.
    """

    seconds: float = 3.0
    repeats: int = 2
    clock: Callable[[], float] = time.perf_counter
    start: float | None = field(default=None, init=False)

    def both(
        self, stock: Call, ours: Call, prepare: Callable[[int], None] = lambda index: None
    ) -> tuple[float, float] | None:
        """The seconds of each call, or None if the time is up before.

        `prepare` is called before each call with its index, 0 or 1, and is not timed. In the first
        turn kernels compile and are checked. So its times are left out, and by as much as it takes
        longer than the second turn, the stopwatch runs longer.
        """
        calls = (stock, ours)
        fastest = [float("inf"), float("inf")]
        first = [0.0, 0.0]  # seconds of each call in the first turn
        for repeat in range(self.repeats + 1):
            for index, call in enumerate(calls):
                now = self.clock()
                self.start = now if self.start is None else self.start
                if now - self.start >= self.seconds:
                    return None
                prepare(index)
                now = self.clock()
                mx.eval(call())
                seconds = self.clock() - now
                if repeat == 0:  # as if it had taken no time
                    first[index] = seconds
                    self.start += seconds
                elif repeat == 1:  # what the first turn would have taken without compiling counts
                    self.start -= min(first[index], seconds)
                if repeat:
                    fastest[index] = min(fastest[index], seconds)
        return fastest[0], fastest[1]


def autotune(
    model: nn.Module,
    config: dict[str, Any],
    attention: Sequence[str],
    start: Callable[[KernelPlan, int, int], Call],
    kernels: Kernels,
    stopwatch: Stopwatch,
) -> tuple[dict[str, frozenset[int]], list[Timing]]:
    """Time a target's verification forwards.

    Returns, for each form of matrix or attention, the numbers of rows for which our kernels run,
    and the timings.

    Args:
        model: the target's, whose layers are MLX's.
        config: its config.json.
        attention: the forms of its attention, from `attention_key`.
        start: makes the forward to time from a plan, a number of rows, and the number of keys
            already in the cache.
        kernels: the kernels to try.
        stopwatch: measures. When its time is up, MLX's kernels are kept for the rest.
    """

    def time_in_turns(
        first: Keys, second: Keys, rows: int, depth: int
    ) -> tuple[float, float] | None:
        def start_at_depth(kernel_plan: KernelPlan, rows: int) -> Call:
            return start(kernel_plan, rows, depth)

        return _in_turns(
            model,
            config=config,
            kernels=kernels,
            stopwatch=stopwatch,
            start=start_at_depth,
            first=first,
            second=second,
            rows=rows,
        )

    short, long = DEPTHS
    short_keys = frozenset(key_at(key, short) for key in attention)
    long_keys = frozenset(key_at(key, long) for key in attention)
    groups = _product_groups(model, config) | ({"attention": short_keys} if short_keys else {})
    rows_by_form, timings = _choose(groups, kernels.tensor_units, partial(time_in_turns, depth=0))
    if long_keys:
        winners = frozenset(key for key, rows in rows_by_form.items() if rows)
        winning_products = winners - short_keys  # all but attention
        name = f"attention over {long} keys"
        timing = _time(
            name,
            without=winning_products,
            with_ours=winning_products | long_keys,
            in_turns=partial(time_in_turns, depth=long),
        )
        rows_by_form |= dict.fromkeys(long_keys, chosen(timing.won, MOST_NODES))
        timings.append(timing)
    return rows_by_form, timings


def autotune_products(
    model: nn.Module, kernels: Kernels, stopwatch: Stopwatch
) -> dict[str, frozenset[int]]:
    """Time a drafter's products.

    Returns, for each form of weights, the numbers of rows at which our kernel runs.
    """

    def start(kernel_plan: KernelPlan, rows: int) -> Call:
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
    """The numbers of rows at which each form runs on our kernels, and the timings.

    First, our kernels for all groups are timed against none of them. Then, for each group, all are
    timed against all but this group's.
    """
    all_keys: Keys = frozenset().union(*groups.values())
    unit_keys = frozenset(map(tensor_key, all_keys)) if tensor_units else all_keys
    if tensor_units:
        with_units = _time(
            "tensor units",
            without=all_keys,
            with_ours=all_keys | unit_keys,
            in_turns=in_turns,
            order=TENSOR_UNIT_ROWS,
        )
        if sum(with_units.ours.values()) < sum(with_units.stock.values()):
            all_keys |= unit_keys
    whole_verify = _time(
        "whole forward", without=frozenset(), with_ours=all_keys, in_turns=in_turns
    )
    stock: dict[str, dict[int, float]] = {name: {} for name in groups}
    ours: dict[str, dict[int, float]] = {name: {} for name in groups}
    runs: dict[str, list[int]] = {name: [] for name in groups}
    for rows in whole_verify.ours:
        saved = 0.0  # seconds, by leaving out the groups that are slower than MLX's
        faster = []
        for name, keys in groups.items():
            others = all_keys - keys - frozenset(map(tensor_key, keys))
            seconds = in_turns(others, all_keys, rows) if len(groups) > 1 else None
            if seconds is None:
                faster.append(name)
                continue
            seconds_without, seconds_with = seconds
            stock[name][rows] = seconds_without
            ours[name][rows] = seconds_with
            if seconds_with < seconds_without:
                faster.append(name)
            else:
                saved += seconds_with - seconds_without
        if whole_verify.ours[rows] - saved <= MAX_TIME_SHARE * whole_verify.stock[rows]:
            for name in faster:
                runs[name].append(rows)
    rows_of_form: dict[str, frozenset[int]] = {}
    for name, keys in groups.items():
        form_rows = chosen(runs[name], MOST_NODES if name == "attention" else 16)
        rows_of_form |= dict.fromkeys(keys, form_rows)
        rows_of_form |= dict.fromkeys(all_keys & frozenset(map(tensor_key, keys)), form_rows)
    return rows_of_form, [whole_verify, *(Timing(name, stock[name], ours[name]) for name in groups)]


def _time(
    name: str, without: Keys, with_ours: Keys, in_turns: InTurns, order: Sequence[int] = TIMED_ORDER
) -> Timing:
    """Time forwards with two sets of kernels in turns, until the time is up."""
    stock = {}
    ours = {}
    for rows in tqdm(order, TITLE, leave=False, disable=None):
        seconds = in_turns(without, with_ours, rows)
        if seconds is None:
            break
        stock[rows], ours[rows] = seconds
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

        def prepare(index: int) -> None:
            nonlocal call
            stack.close()
            stack.enter_context(restored(model))
            keys = (first, second)[index]
            call = start(
                swap_layers(model, config=config, kernels=kernels, rows=dict.fromkeys(keys, EXACT)),
                rows,
            )

        return stopwatch.both(lambda: call(), lambda: call(), prepare)


def _product(module: Any, matrix: Matrix, rows: int) -> Callable[[], mx.array]:
    """A product of a layer with rows of noise."""

    def noise(*shape: int) -> mx.array:
        return mx.random.normal(shape, key=mx.random.key(0))

    x = noise(1, rows, matrix.depth).astype(activation_dtype(module))
    mx.eval(x)
    if isinstance(module, nn.Embedding | nn.QuantizedEmbedding):
        return lambda: module.as_linear(x)
    if not matrix.experts:
        return lambda: module(x)
    # Each row has other experts, as after a router.
    experts = mx.argsort(noise(1, rows, matrix.experts), axis=-1)[..., : matrix.top_k]
    mx.eval(experts)
    return lambda: module(x[..., None, None, :], experts)
