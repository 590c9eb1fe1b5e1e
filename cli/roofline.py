"""`dflash-mlx roofline`: predict the best possible speed of a model on a chip."""

from __future__ import annotations

from dataclasses import asdict
from typing import TYPE_CHECKING, Any

from rich.table import Table

import dflash_mlx
from dflash_mlx.errors import SettingsError
from dflash_mlx.loading.checks import fits_here
from dflash_mlx.loading.hub import Hub, find
from dflash_mlx.loading.quantization import Quantization
from dflash_mlx.loading.registry import pair_of
from dflash_mlx.machine.chips import Chip, chip_named, find_chip
from dflash_mlx.machine.facts import usable_bytes, working_set

from . import options
from .options import option
from .output import counted, make_table, note, print_json, rate, sized, stdout, waiting

if TYPE_CHECKING:
    from dflash_mlx.bench.roofline import StepPrediction

ACCEPTANCE = 4.0  # tokens per step, assumed where none are published

NAME_CHIP = "name a Mac's chip, as --chip 'M4 Max'"
PREDICTED = "What is predicted"  # the panel that --help shows
MEASURED = "Acceptance length at 16 rows, as 'bench' reports. Default: the published one, else 4."


def roofline(
    model: str = options.MODEL_NAME,
    chip: str | None = option(None, PREDICTED, "NAME", "M1 to M5 Max. Default: this machine's."),
    target_bits: int | None = options.TARGET_BITS,
    acceptance: float | None = option(None, PREDICTED, "TOKENS", MEASURED),
    context: int = option(1024, PREDICTED, "N", "Tokens of context to attend to.", min=0),
    offline: bool = options.OFFLINE,
    json: bool = options.JSON,
) -> None:
    """Predict how long steps of 1 to 16 rows take on a chip, and the best possible speedup."""
    where = _chip(chip, f"{NAME_CHIP}, and a --model of 100 MB or more, such as Qwen/Qwen3-8B")
    pair = pair_of(model)
    published = pair.acceptance if pair else None
    tokens = acceptance if acceptance is not None else published or ACCEPTANCE
    quantization = Quantization.of(target_bits)
    folder = find(model, Hub(offline=offline))  # of a hub model the config alone
    config = folder.config
    with waiting("Reading the model's shapes"):
        from dflash_mlx.bench.roofline import model_of, predict_steps, recommended, shapes_of

        shapes = shapes_of(model_of(config, folder.path, quantization), config, context)
    steps = predict_steps(shapes, where, tokens)
    best = recommended(steps)
    if json:
        content: dict[str, Any] = {"prediction": True, "model": model, "chip": asdict(where)}
        content |= {"acceptance": tokens, "context": context}
        content |= {"weights_bytes": shapes.weights, "recommended_rows": best.rows}
        print_json(content | {"steps": [asdict(step) for step in steps]})
        return
    stdout().print(_table(steps))
    quantized = bool(quantization or config.get("quantization"))
    speed = f"at most {best.tokens_per_second:,.0f} tokens per second"
    note(f"Recommended: {counted(best.rows, 'row')}, {speed}.")
    note(f"The weights take {sized(shapes.weights)}; {fits_here(shapes.weights, quantized)}.")
    note(f"A prediction, not a measurement: {model} on {where.name}, {context} tokens of context,")
    source = "" if acceptance else " (published)" if published else " (assumed: --acceptance)"
    note(f"{tokens:g} tokens per step of 16 rows{source}. The drafter's own time is not included.")


def show_models(name: str, chip: str | None, memory: int | None, json: bool) -> None:
    """Predict the models that fit a Mac, as `models --chip` does.

    Args:
        name: a part of the targets' names.
        chip, memory: of the Mac, in GiB; None for this machine's.
        json: print JSON.
    """
    where = _chip(chip, NAME_CHIP)
    limit = usable_bytes() if memory is None else working_set(memory * 2**30)
    with waiting("Predicting"):
        from dflash_mlx.bench.macs import CONTEXT, known_models

        named = [one for one in known_models() if name.lower() in one.pair.targets[0].lower()]
        if not named:
            raise SettingsError(f"{name}: no shapes of such a model are known; leave it out.")
        found = [one.predict(where) for one in named if one.memory <= limit]
    found.sort(key=lambda one: -one["plain"])
    if json:
        content: dict[str, Any] = {"prediction": True, "chip": asdict(where), "bytes": limit}
        print_json(content | {"context": CONTEXT, "models": found})
        return
    table = make_table("target", "bits", "GB", "plain", "16 rows", "drafted", padding=1)
    for one in found:
        figures = f"{one['gigabytes']:.1f}", rate(one["plain"]), f"{one['step_cost']:.1f}"
        table.add_row(one["target"], f"{one['bits']}", *figures, rate(one["drafted"] or 0))
    stdout().print(table if found else "None of them fits.")
    note(
        f"Predictions, not measurements, for {where.name} and {sized(limit)} that its GPU may use."
    )
    note(f"GB: weights, drafter, {CONTEXT:,} tokens of context. plain and drafted: tokens/s.")
    note("16 rows: plain steps that one drafted step takes; accepting more tokens is a gain.")
    note("drafted: at best, and only where an acceptance length is published.")


def _chip(name: str | None, advice: str) -> Chip:
    """The named chip, or this machine's. Raises `SettingsError` for one that is not known."""
    with waiting("Starting MLX"):
        _ = dflash_mlx.Target  # raises `MissingDependencyError` without MLX
        import mlx.core as mx
    here = str(mx.device_info().get("device_name", "unknown"))
    if name is None and find_chip(here) is None:
        raise SettingsError(f"No step can be predicted on {here}: {advice}.")
    return chip_named(name or here)


def _table(steps: list[StepPrediction]) -> Table:
    table = make_table("rows", "tokens", "ms", "speedup", "tok/s", padding=1)
    best = max(step.speedup for step in steps)
    for step in steps:
        figures = f"{step.tokens:.2f}", f"{step.milliseconds:.2f}", f"{step.speedup:.2f}x"
        style = "bold green" if step.speedup == best else ""
        table.add_row(f"{step.rows}", *figures, f"{step.tokens_per_second:,.0f}", style=style)
    return table
