"""Give a loaded model's layers to our kernels, where those pass their checks on this device.

Imported only where our kernels can run.
"""

from __future__ import annotations

import warnings
from collections.abc import Iterable
from contextlib import suppress
from dataclasses import replace

import mlx.core as mx
import mlx.nn as nn

from ..errors import KernelError
from ..kernels.choose import Rows, read_choices, store_choices, tensor_key
from ..kernels.modules import EXACT, Kernels, will_be_exact, wire
from ..kernels.selfcheck import Check, faults
from ..kernels.shapes import matrices
from ..machine.chips import Chip, find_chip
from ..targets import Target, attention
from ..targets.autotune import (
    Stopwatch,
    Timing,
    autotune,
    candidates,
    forms,
    guess_products,
    guesses,
    time_products,
)
from ..targets.selfcheck import check_rows, model_checks, weight_checks

DRAFTER_SECONDS = 2.0  # of a drafter's stopwatch, which uses half of them


def wire_target(
    target: Target, kernels: Kernels, exact: bool | None, stopwatch: Stopwatch | None = None
) -> Target:
    """Give a target's layers to our kernels where they are faster on this machine; returns it.

    What was not timed yet is timed, and the answer is kept. Without a `stopwatch` an emulator's
    kernels run by a guess.

    A kernel that fails its check is replaced by MLX's, with a warning, or raises `KernelError` if
    `exact` is True and needs it.
    """
    model, config, required = target.model, target.config, bool(exact)
    if stopwatch is None and kernels.on_device:
        stopwatch = Stopwatch()
    if exact is None and not attention.attends_exactly(target.pairs()):
        exact = False
    rows = read_choices(forms(target))
    if rows is None and stopwatch is not None and not required:
        rows, _ = time_kernels(target, kernels, stopwatch)
    rows = guesses(target, _chip()) if rows is None else rows
    if exact is None:
        exact = will_be_exact(model, config, rows)
    broken = _broken(model_checks(target, kernels, rows, exact), required)
    if exact:
        attention.check_exact(target.pairs())
    wiring = wire(model, config, kernels, rows, exact and not broken, broken)
    target.wiring, kernels.chosen = replace(wiring, required=required), rows
    return target


def time_kernels(
    target: Target, kernels: Kernels, stopwatch: Stopwatch
) -> tuple[Rows, list[Timing]]:
    """Time a target whose layers are MLX's, as `autotune` does, and keep the answer.

    Kernels that fail their check are not timed, with a warning.
    """
    every = candidates(target, kernels.tensor_units)
    broken = _broken(model_checks(target, kernels, every, exact=False))
    rows, timings = autotune(target, kernels, broken, stopwatch, guesses(target, _chip()))
    with suppress(OSError):  # then the next load times again
        store_choices(forms(target), rows)
    return rows, timings


def wire_drafter(drafter: nn.Module, kernels: Kernels, stopwatch: Stopwatch | None = None) -> None:
    """The same for a drafter, never exact: drafts do not change the text.

    Forms of weights that a target with these kernels has, too, run as there. Others are timed
    alone.
    """
    names = [matrix.key for _, _, matrix in matrices(drafter, {})]
    timed, guessed = read_choices(names), guess_products(drafter, {}, _chip())
    if stopwatch is None and kernels.on_device:
        stopwatch = Stopwatch(DRAFTER_SECONDS)
    if timed is None and stopwatch is not None and guessed.keys() - kernels.chosen.keys():
        every = dict.fromkeys([*guessed, *map(tensor_key, guessed)], EXACT)
        broken = _broken(weight_checks(drafter, {}, kernels, every, exact=False))
        timed, _ = time_products(drafter, {}, kernels, broken, stopwatch, guessed)
        with suppress(OSError):
            store_choices(names, timed)
    rows = guess_products(drafter, {}, _chip(), {**(timed or {}), **kernels.chosen})
    broken = _broken(weight_checks(drafter, {}, kernels, rows, exact=False))
    wire(drafter, {}, kernels, rows, broken=broken)


def check_exact(target: Target) -> None:
    """Check that exact decoding is exact on this device.

    If it is not, raises `KernelError` if the user asked for it, else warns and turns it off.
    """
    wiring = target.wiring
    if wiring is None or not wiring.exact:
        return
    try:
        check_rows(target)
    except KernelError as error:
        if wiring.required:
            raise
        target.wiring = replace(wiring, exact=False)
        warnings.warn(f"dflash-mlx: {error.args[0]}", stacklevel=4)


def _chip() -> Chip | None:
    return find_chip(str(mx.device_info().get("device_name", "")))


def _broken(checks: Iterable[Check], required: bool = False) -> frozenset[str]:
    """The names of the kernels that fail; each with a warning, or a `KernelError`."""
    broken = faults(checks)
    if broken and required:
        [problem, *_] = broken.values()
        raise KernelError(f"Exact decoding needs our kernels: {problem}. Please report this.")
    for problem in broken.values():
        warnings.warn(
            f"dflash-mlx: a kernel of ours is broken here and left out: {problem}. "
            "Please report this.",
            stacklevel=5,
        )
    return frozenset(broken)
