"""`dflash-mlx train`: a drafter for any model, trained on the machine it will run on."""

from __future__ import annotations

import time
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import typer

import dflash_mlx
from dflash_mlx.errors import SettingsError
from dflash_mlx.loading.hub import Hub

from . import options
from .options import OUTPUT, flag, given, option, spelled
from .output import note, waiting

if TYPE_CHECKING:
    from dflash_mlx import DFlash
    from dflash_mlx.train.recipe import Recipe

DATA, DRAFTER, TRAINING = "Data", "Drafter", "Training"  # what --help shows
RATES = {"adamw": 1e-3, "muon": 0.02}  # default learning rates
SHAPE = ("kind", "block_size", "layers", "causal")


@dataclass(frozen=True)
class RecipeOptions:
    """The options of a `Recipe`, under the names of its fields."""

    data: Path | None = option(
        None, DATA, "FILE", "JSON lines of prompts, chats or texts; or a .txt file."
    )
    synthesize: int | None = option(None, DATA, "N", "Let the model write N prompts itself.", min=2)
    keep_answers: bool = flag(
        "--keep-answers", DATA, "Learn the file's answers, not the model's own."
    )
    max_tokens: int = option(
        256, DATA, "N", "End an answer after N tokens.", "--answer-tokens", min=2
    )
    rows: int = option(24, DATA, "N", "Answers generated together.", min=1)
    kind: str = option("dflash", DRAFTER, "KIND", "dflash, dflash2 or dspark.")
    block_size: int = option(8, DRAFTER, "N", "Rows of a block, with the known first one.", min=2)
    layers: int | None = option(
        None, DRAFTER, "N", "Default: one per eight of the model's, plus one.", min=1
    )
    causal: bool = flag("--causal", DRAFTER, "Let rows of a block see only earlier rows.")
    draft_vocab: int | None = option(
        None, DRAFTER, "N", "Draft only the answers' N commonest tokens.", min=1
    )
    warm_start: str | None = option(None, DRAFTER, "NAME", "Start from this drafter.")
    bits: int | None = option(
        None, DRAFTER, "4|6|8", "Store the drafter in so many bits, not 16.", "--store-bits"
    )
    steps: int | None = option(None, TRAINING, "N", "Default: six epochs.", min=1)
    hours: float | None = option(None, TRAINING, "H", "As many steps as fit into H hours.", min=0)
    anchors: int = option(64, TRAINING, "N", "Blocks per sequence and step.", min=1)
    tokens: int = option(1024, TRAINING, "N", "Tokens of half a step.", min=16)
    learning_rate: float | None = option(
        None, TRAINING, "R", "Peak. Default: the optimizer's.", min=0
    )
    optimizer: str = option("adamw", TRAINING, "NAME", "adamw or muon.")
    seed: int = option(0, TRAINING, "N", "Seed of everything random.", min=0)

    def recipe(self) -> Recipe:
        """The recipe. Raises `SettingsError`."""
        from dflash_mlx.train.recipe import Recipe

        if self.optimizer not in RATES:
            raise SettingsError(f"--optimizer must be {' or '.join(RATES)}.")
        rate = RATES[self.optimizer] if self.learning_rate is None else self.learning_rate
        return Recipe(**vars(self) | {"learning_rate": rate})


def train(
    context: typer.Context,
    *,
    model: str = options.MODEL_NAME,
    adapter: str | None = options.ADAPTER,
    target_bits: int | None = options.TARGET_BITS,
    offline: bool = options.OFFLINE,
    stock_blas: bool = options.STOCK_BLAS,
    out: Path = option(
        ..., OUTPUT, "DIR", "Folder for the drafter, and to resume from.", parser=options.named
    ),
    choices: RecipeOptions,
    json: bool = flag("--json", OUTPUT, "Print JSON lines and nothing else."),
) -> None:
    """Train a drafter for a model. If interrupted, the same command resumes."""
    warm_start, hub = choices.warm_start, Hub(offline=offline)
    shape = next((name for name in SHAPE if name in given(context)), None)
    if warm_start is not None and shape is not None:
        raise SettingsError(f"{spelled(shape)} cannot be combined with --warm-start.")
    blas = dflash_mlx.use_fast_blas(stock=stock_blas, flush_denormals=True)
    recipe = choices.recipe()
    with waiting(f"Loading {model}", spinner=False):
        target = dflash_mlx.load_target(model, target_bits, adapter=adapter, hub=hub)
        warm = None if warm_start is None else _load_warm(warm_start, hub)
    from dflash_mlx.train.run import train as train_drafter

    from .train_report import JsonProgress, ProgressBar, measure_held_out, write_card

    out, begin = out.expanduser(), time.monotonic()
    progress = JsonProgress() if json else ProgressBar()
    with progress:
        done = train_drafter(target, out, recipe, warm, progress)
    hours = (time.monotonic() - begin) / 3600
    with waiting("Measuring the drafter on held-out prompts"):
        scores = measure_held_out(target, out)
    write_card(target, recipe, done, scores, hours, blas, out)
    progress.end(scores, out)
    note(f"{out / 'work'} is no longer needed.")


def _load_warm(name: str, hub: Hub) -> tuple[DFlash, dict[str, Any]]:
    """A drafter to start from, and its config.json."""
    from mlx_lm.utils import dequantize_model

    from dflash_mlx.loading.load import drafter_folder

    drafter = dflash_mlx.load_drafter(name, hub=hub, kernels="off")
    dequantize_model(drafter)
    return drafter, drafter_folder(name, hub).config
