"""`dflash-mlx train`: a drafter for any model, made on the machine it will run on."""

from __future__ import annotations

import time
from pathlib import Path
from typing import TYPE_CHECKING, Any

import typer

import dflash_mlx
from dflash_mlx.loading.hub import Hub
from dflash_mlx.machine.blas import BlasInfo

from . import options
from . import train_options as of
from .output import note, waiting
from .train_checks import check_usage, parse_loss

if TYPE_CHECKING:
    from dflash_mlx import DFlash, Target

RATES = {"adamw": 1e-3, "muon": 0.02}


def train(
    context: typer.Context,
    *,
    model: options.Model = "tiny",
    target_bits: options.TargetBits = None,
    offline: options.Offline = False,
    stock_blas: options.StockBlas = False,
    out: of.Out,
    data: of.Data = None,
    synthesize: of.Synthesize = None,
    keep_answers: of.KeepAnswers = False,
    answer_tokens: of.AnswerTokens = 256,
    rows: of.Rows = 24,
    kind: of.KindOf = of.Kind.dflash,
    block_size: of.BlockSize = 8,
    layers: of.Layers = None,
    causal: of.Causal = False,
    warm_start: of.WarmStart = None,
    store_bits: of.StoreBits = None,
    steps: of.Steps = None,
    hours: of.Hours = None,
    anchors: of.Anchors = 64,
    tokens: of.Tokens = 1024,
    learning_rate: of.Rate = None,
    optimizer: of.OptimizerOf = of.Optimizer.adamw,
    loss: of.Loss = "0.5,0.5,0",
    whole_vocabulary: of.WholeVocabulary = False,
    seed: of.Seed = 0,
    json: of.Json = False,
) -> None:
    """Train a drafter for a model. Interrupted? The same command goes on where it stopped."""
    check_usage(context)
    blas = dflash_mlx.use_fast_blas(stock=stock_blas, flush_denormals=True)
    from dflash_mlx.train.recipe import Recipe

    recipe = Recipe(
        data=data,
        synthesize=synthesize,
        keep_answers=keep_answers,
        kind=kind.value,
        block_size=block_size,
        layers=layers,
        causal=causal,
        warm_start=warm_start,
        steps=steps,
        hours=hours,
        anchors=anchors,
        tokens=tokens,
        learning_rate=learning_rate or RATES[optimizer.value],
        optimizer=optimizer.value,
        loss_weights=parse_loss(loss),
        answer_vocabulary=not whole_vocabulary,
        max_tokens=answer_tokens,
        rows=rows,
        bits=None if store_bits is None else int(store_bits.value),
        seed=seed,
    )
    hub = Hub(offline=offline)
    with waiting(f"Loading {model}"):
        target = dflash_mlx.load_target(
            model, None if target_bits is None else int(target_bits.value), hub=hub
        )
        warm = None
        if warm_start not in (None, of.FROM_TARGET):
            warm = _warm(str(warm_start), hub)
    from .train_live import Lines, Live

    _run(target, out.expanduser(), recipe, warm, blas, Lines() if json else Live())


def _run(target: Target, out: Path, recipe: Any, warm: Any, blas: BlasInfo, show: Any) -> None:
    """Train, measure on what was held out, and write the card."""
    from dflash_mlx.train.run import train as train_drafter

    from .train_card import draw_curve, measure_held_out, write_card

    begin = time.monotonic()
    with show:
        done = train_drafter(target, out, recipe, warm, show)
    hours = (time.monotonic() - begin) / 3600
    with waiting("Measuring the drafter on prompts that it never saw"):
        scores = measure_held_out(target, out)
    picture = draw_curve(done, out)
    write_card(target, recipe, done, scores, hours, blas, out, picture)
    show.end(scores, out)
    note(f"{out / 'work'} is no longer needed.")


def _warm(name: str, hub: Hub) -> tuple[DFlash, dict[str, Any]]:
    """A drafter to start from, and its config.json."""
    from mlx_lm.utils import dequantize_model

    from dflash_mlx.drafter.config import read_json
    from dflash_mlx.loading.load import drafter_folder

    drafter = dflash_mlx.load_drafter(name, hub=hub, kernels=False)
    dequantize_model(drafter)
    return drafter, read_json(drafter_folder(name, hub) / "config.json")
