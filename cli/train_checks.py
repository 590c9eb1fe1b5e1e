"""What `dflash-mlx train` refuses before anything is loaded: options that cannot go together."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import typer

from dflash_mlx.errors import SettingsError

from .options import is_given, spelled
from .train_options import FROM_TARGET

if TYPE_CHECKING:
    from dflash_mlx.train.losses import LossWeights

SHAPE = ("kind", "block_size", "layers", "causal")


def check_usage(context: typer.Context) -> None:
    """Raise `BadParameter` for options that contradict each other or can teach nothing."""
    options: Mapping[str, Any] = context.params
    if (options["data"] is None) == (options["synthesize"] is None):
        raise typer.BadParameter("give one of --data and --synthesize", param_hint="--data")
    if options["keep_answers"] and options["data"] is None:
        raise typer.BadParameter("goes with --data", param_hint="--keep-answers")
    if options["steps"] is not None and options["hours"] is not None:
        raise typer.BadParameter("goes without --hours", param_hint="--steps")
    for name in ("hours", "learning_rate"):
        value = options[name]
        if value is not None and not 0 < value < float("inf"):
            raise typer.BadParameter("give a number above 0", param_hint=spelled(name))
    if options["warm_start"] not in (None, FROM_TARGET):
        if given := next((name for name in SHAPE if is_given(name, context)), None):
            raise typer.BadParameter(
                "goes without a drafter to start from, which has its own", param_hint=spelled(given)
            )


def parse_loss(text: str) -> LossWeights:
    """The value of --loss. Raises `BadParameter`."""
    from dflash_mlx.train.losses import LossWeights

    try:
        parts = [float(part) for part in text.split(",")]
    except ValueError:
        parts = []
    if len(parts) != 3:
        raise typer.BadParameter("give three numbers, like 0.5,0.5,0", param_hint="--loss")
    try:
        return LossWeights(*parts)
    except SettingsError as error:
        raise typer.BadParameter(str(error), param_hint="--loss") from error
