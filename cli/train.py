"""`dflash-mlx train`: trains a drafter for any model, on the machine where it will run."""

from __future__ import annotations

import time
from pathlib import Path
from typing import TYPE_CHECKING, Any

import dflash_mlx
from dflash_mlx.loading.hub import Hub
from dflash_mlx.train.recipe import Recipe
from dflash_mlx.validation import user_path

from . import options
from .options import OUTPUT, flag, option
from .output import note, waiting

if TYPE_CHECKING:
    from dflash_mlx import DFlash


def train(
    *,
    model: str = options.MODEL_NAME,
    adapter: str | None = options.ADAPTER,
    target_bits: int | None = options.TARGET_BITS,
    offline: bool = options.OFFLINE,
    stock_blas: bool = options.STOCK_BLAS,
    out: Path = option(
        ...,
        panel=OUTPUT,
        metavar="DIR",
        help="Folder for the drafter, and to resume from.",
    ),
    choices: dict[str, Any] = options.settings(of=Recipe, panel="Training"),
    json: bool = flag("--json", panel=OUTPUT, help="Print JSON lines and nothing else."),
) -> None:
    """Train a drafter for a model. If interrupted, the same command resumes."""
    warm_start = choices["warm_start"]
    hub = Hub(offline=offline)
    blas = dflash_mlx.use_fast_blas(stock=stock_blas, flush_denormals=True)
    recipe = Recipe(**choices)
    with waiting(f"Loading {model}", spinner=False):
        target = dflash_mlx.load_target(model, target_bits, adapter=adapter, hub=hub)
        warm = None if warm_start is None else _load_warm(warm_start, hub)
    from dflash_mlx.train.run import train as train_drafter

    from .train_report import JsonProgress, ProgressBar, measure_held_out, write_card

    out = user_path(out)
    start = time.monotonic()
    progress = JsonProgress() if json else ProgressBar()
    with progress:
        trained = train_drafter(target, out, recipe=recipe, warm=warm, listen=progress)
    hours = (time.monotonic() - start) / 3600
    with waiting("Measuring the drafter on held-out prompts"):
        scores = measure_held_out(target, out)
    write_card(
        target,
        adapter=adapter,
        recipe=recipe,
        trained=trained,
        scores=scores,
        hours=hours,
        blas=blas,
        out=out,
    )
    progress.end(scores, out)
    note(f"{out / 'work'} is no longer needed.")


def _load_warm(name: str, hub: Hub) -> tuple[DFlash, dict[str, Any]]:
    """Load a drafter to start from, and its config.json."""
    from mlx_lm.utils import dequantize_model

    from dflash_mlx.loading.load import drafter_folder

    drafter = dflash_mlx.load_drafter(name, hub=hub, kernels="off")
    dequantize_model(drafter)
    return drafter, drafter_folder(name, hub).config
