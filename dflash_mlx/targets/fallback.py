"""Going on with MLX's kernels when one of ours fails in the middle of an answer.

The self-check at load runs every kind of launch once. A device can still refuse one later, when
memory is short. What failed cannot be told: MLX computes a step's launches together. So all of
ours are suspended, the drafter's too, and the step runs again. If it passes now, a kernel was to
blame.
"""

from __future__ import annotations

import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING

from ..errors import KernelError, SettingsError
from .target import Target

if TYPE_CHECKING:
    from ..kernels.modules import Kernels

# A refused launch is a RuntimeError or a ValueError of MLX's. So is much else.
MAYBE_REFUSED = (RuntimeError, ValueError, KernelError)


@contextmanager
def on_stock(target: Target, drafts_on: Kernels | None, error: BaseException) -> Iterator[None]:
    """Have the code inside repeat what failed with `error`, on MLX's kernels alone.

    If it passes, ours stay off, with a warning. Else they are on again. `error` is raised at once
    where no kernel can be to blame, and where exact decoding was asked for.

    Args:
        target: whose kernels are suspended.
        drafts_on: the drafter's kernels, which may be others.
        error: what a step raised.
    """
    wiring, passed = target.wiring, False
    ours = {one for one in (wiring and wiring.kernels, drafts_on) if one and one.active}
    required = wiring is not None and wiring.required
    ruled_out = isinstance(error, SettingsError) or not isinstance(error, MAYBE_REFUSED)
    if not ours or required or ruled_out:
        raise error
    target.wiring = None
    for kernels in ours:
        kernels.active = False
    try:
        yield
        passed = True
    finally:
        if not passed:
            target.wiring = wiring
            for kernels in ours:
                kernels.active = True
    warnings.warn(
        f"dflash-mlx: MLX's kernels run from now on, because one of ours failed: {error} The text "
        "goes on. Please report this.",
        stacklevel=4,
    )
