"""Give a loaded model's layers to our kernels, where those pass their checks on this device.

Imported only where our kernels can run.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterable
from dataclasses import replace
from typing import Any

import mlx.core as mx
import mlx.nn as nn

from ..errors import KernelError
from ..kernels.choose import choices, read_timings
from ..kernels.modules import Kernels, Wiring, will_be_exact, wire
from ..kernels.selfcheck import Check, faults
from ..machine.chips import find_chip
from ..targets import Target
from ..targets.attention import attends_exactly
from ..targets.selfcheck import check_rows, model_checks, weight_checks


def wire_target(
    model: nn.Module, config: dict[str, Any], kernels: Kernels, exact: bool | None
) -> Wiring:
    """Give a target's layers to our kernels where they are faster on this machine.

    A kernel that fails its check is replaced by MLX's, with a warning, or raises `KernelError` if
    `exact` is True and needs it.
    """
    if exact is None and not attends_exactly(model):
        exact = False
    return _wire(model, config, kernels, exact, model_checks)


def wire_drafter(drafter: nn.Module, kernels: Kernels) -> None:
    """The same for a drafter, never exact: drafts do not change the text."""
    _wire(drafter, {}, kernels, False, weight_checks)


def check_exact(target: Target, wiring: Wiring, asked: bool) -> None:
    """Check that exact decoding is exact on this device.

    If it is not, raises `KernelError` if the user asked for it, else warns and turns it off.
    """
    try:
        check_rows(target)
    except KernelError as error:
        if asked:
            raise
        target.wiring = replace(wiring, exact=False)
        warnings.warn(f"dflash-mlx: {error}", stacklevel=4)


def _wire(
    model: nn.Module,
    config: dict[str, Any],
    kernels: Kernels,
    exact: bool | None,
    checks: Callable[..., Iterable[Check]],
) -> Wiring:
    chip = find_chip(str(mx.device_info().get("device_name", "")))
    measured = choices(read_timings())
    asked = bool(exact)
    if exact is None:
        exact = will_be_exact(model, config, measured)
    broken = faults(checks(model, config, kernels, chip, measured, exact))
    if broken and asked:
        [problem, *_] = broken.values()
        raise KernelError(f"Exact decoding needs our kernels: {problem}. Please report this.")
    for problem in broken.values():
        warnings.warn(
            f"dflash-mlx: MLX's kernel runs, ours is broken here: {problem}. Please report this.",
            stacklevel=5,
        )
    measured |= dict.fromkeys(broken, None)
    exact = exact and not broken
    wiring = wire(model, config, kernels, chip, measured, exact, frozenset(broken))
    return replace(wiring, required=asked)
