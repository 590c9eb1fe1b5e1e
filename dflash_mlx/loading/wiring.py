"""Giving a loaded model's layers to our kernels, as far as they are sound on this device.

Imported where there are kernels to run: the rest of loading does without them.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterable
from dataclasses import replace
from typing import Any

import mlx.core as mx
import mlx.nn as nn

from ..errors import KernelError
from ..kernels.calibration import choices, read_timings
from ..kernels.modules import Kernels, Wiring, will_be_exact, wire
from ..kernels.selfcheck import Check, faults
from ..machine.chips import find_chip
from ..targets import Target
from ..targets.attention import attends_exactly
from ..targets.selfcheck import check_rows, model_checks, weight_checks


def wire_target(
    model: nn.Module, config: dict[str, Any], kernels: Kernels, exact: bool | None
) -> Wiring:
    """Give a target's layers to our kernels where this machine's table says so.

    What fails its check is left to MLX, with a warning. Raises `KernelError` instead if exact
    decoding, which needs it, was asked for.
    """
    if exact is None and not attends_exactly(model):
        exact = False
    return _wire(model, config, kernels, exact, model_checks)


def wire_drafter(drafter: nn.Module, kernels: Kernels) -> None:
    """The same for a drafter, never exactly: drafts may differ, the text may not."""
    _wire(drafter, {}, kernels, False, weight_checks)


def check_exact(target: Target, wiring: Wiring, asked: bool) -> None:
    """See whether exact decoding is exact here.

    Raises `KernelError` if it is not and was asked for; else a warning says so, and it is off.
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
    if exact is None:
        exact = will_be_exact(model, config, measured)
        asked = False
    else:
        asked = exact
    broken = faults(checks(model, config, kernels, chip, measured, exact))
    if broken and asked:
        [problem, *_] = broken.values()
        raise KernelError(f"Exact decoding needs our kernels: {problem}. Please report this.")
    for problem in broken.values():
        warnings.warn(
            f"dflash-mlx: MLX's own kernel runs, for ours is broken here: {problem}. Please report "
            "this.",
            stacklevel=5,
        )
    measured |= dict.fromkeys(broken, None)
    return wire(model, config, kernels, chip, measured, exact and not broken, frozenset(broken))
