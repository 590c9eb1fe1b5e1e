"""`dflash-mlx roofline`: what a model's rounds would cost at best on a chip, without the chip."""

from __future__ import annotations

from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.table import Table

import dflash_mlx
from dflash_mlx.drafter.config import read_json
from dflash_mlx.loading.checks import fits_here
from dflash_mlx.loading.hub import Hub
from dflash_mlx.loading.quantization import Quantization
from dflash_mlx.loading.registry import EMBEDDED, gguf_file, pair_of
from dflash_mlx.machine.chips import Chip, chip_named, chips, find_chip
from dflash_mlx.machine.links import links
from dflash_mlx.validation import text_config

from . import options
from .output import counted, note, print_json, sized, stdout, waiting
from .roofline_machines import Asked, config_folder, over_machines

if TYPE_CHECKING:
    from dflash_mlx.bench.roofline import Round

LINKS = tuple(link.name for link in links())
WIDE = 70  # columns of the whole table
EMBEDDED_ACCEPTANCE = 12.0  # as its model card says, over all categories


ChipName = Annotated[
    str | None, typer.Option(metavar="NAME", help="M1 to M5 Max. Default: this machine's chip.")
]
Acceptance = Annotated[
    float | None,
    typer.Option(
        metavar="TOKENS",
        help="Tokens per round of 16 rows, as 'bench' reports. Default: the published figure.",
    ),
]
Context = Annotated[int, typer.Option(min=0, metavar="N", help="Tokens of context to attend to.")]
MachineCount = Annotated[
    int, typer.Option(min=1, metavar="N", help="Machines of this chip that share the model.")
]
Link = Annotated[
    str | None,
    typer.Option(
        metavar="NAME", help=f"Between them: {', '.join(LINKS)}. Default: the first of these."
    ),
]
FirstDrafter = Annotated[
    str | None,
    typer.Option(
        "--draft",
        "-d",
        metavar="NAME",
        help="With --machines, the drafter on the first. Default: the known one.",
    ),
]


def roofline(
    given: typer.Context,
    model: options.Model = EMBEDDED,
    chip: ChipName = None,
    target_bits: options.TargetBits = None,
    acceptance: Acceptance = None,
    context: Context = 1024,
    machines: MachineCount = 1,
    link: Link = None,
    draft: FirstDrafter = None,
    offline: options.Offline = False,
    json: options.Json = False,
) -> None:
    """Predict how long rounds of 1 to 16 rows take on a chip, and the best possible speedup."""
    if machines == 1 and (link or draft):
        name = "--link" if link else "--draft"
        raise typer.BadParameter("goes with --machines 2 or more", param_hint=name)
    where = _chip(chip)
    tokens = _acceptance(model, acceptance)
    hub = Hub(offline=offline)
    config, file = _config(model, hub)
    if options.is_given("context", given):
        _check_context(model, config, context)
    quantization = Quantization.of(None if target_bits is None else int(target_bits.value))
    if machines > 1:
        asked = Asked(model, config, file, quantization, where, tokens, context)
        over_machines(asked, machines, link or LINKS[0], draft, hub, json)
        return
    with waiting("Reading the model's shapes"):
        from dflash_mlx.bench.roofline import (
            kernel_counts,
            model_of,
            recommended,
            rounds,
            shapes_of,
        )

        shapes = shapes_of(model_of(config, file, quantization), config, context)
    rows = rounds(shapes, where, tokens)
    best = recommended(rows)
    if json:
        content: dict[str, Any] = {"prediction": True, "model": model, "chip": asdict(where)}
        content |= {"acceptance": tokens, "context": context}
        content |= {"weights_bytes": shapes.weights, "recommended_rows": best.rows}
        content["kernels"] = kernel_counts(shapes, where)
        print_json(content | {"rounds": [asdict(row) for row in rows]})
        return
    stdout().print(_table(rows))
    quantized = bool(quantization or config.get("quantization"))
    speed = f"at most {best.tokens_per_second:,.0f} tokens per second"
    note(f"Recommended: {counted(best.rows, 'row')}, {speed}.")
    note(f"The weights take {sized(shapes.weights)}; {fits_here(shapes.weights, quantized)}.")
    note(f"A prediction, not a measurement: {model} on {where.name}, {context} tokens of context,")
    note(f"{tokens:g} tokens a round of 16 rows; the drafter's own time is not in it.")
    if where.generation == "M5":
        note("16-row tiles are those of the tensor units: our kernels do not use them, stock runs.")


def _config(model: str, hub: Hub) -> tuple[dict[str, Any], Path]:
    """A model's config, and the file that it is from: a config.json or a GGUF."""
    if gguf := gguf_file(model):
        from dflash_mlx.loading.gguf.convert import config_of

        return config_of(gguf), gguf
    file = config_folder(model, "target", hub) / "config.json"
    return read_json(file), file


def _check_context(model: str, config: dict[str, Any], context: int) -> None:
    """Raise `BadParameter` for more tokens than the model reads, where its config says that."""
    longest = text_config(config).get("max_position_embeddings")
    if isinstance(longest, int) and context > longest:
        told = f"{model} reads {longest:,} tokens at most"
        raise typer.BadParameter(told, param_hint="--context")


def _chip(name: str | None) -> Chip:
    """The chip asked for, or this machine's. Raises `SettingsError` for an unknown name."""
    with waiting("Starting MLX"):
        _ = dflash_mlx.Target  # raises `MissingDependencyError` where there is no MLX
        import mlx.core as mx
    if name is not None:
        return chip_named(name)
    here = find_chip(str(mx.device_info().get("device_name", "")))
    if here is None:
        names = ", ".join(chip.name for chip in chips())
        raise typer.BadParameter(f"this machine has none of: {names}", param_hint="--chip")
    return here


def _acceptance(model: str, given: float | None) -> float:
    """The acceptance given, or the one that is published for the model's drafter."""
    pair = pair_of(model)
    known = pair.acceptance if pair else EMBEDDED_ACCEPTANCE if model == EMBEDDED else None
    tokens = given if given is not None else known
    if tokens is None:
        raise typer.BadParameter(
            f"nothing is published for {model}: give what 'dflash-mlx bench' measures, or a guess",
            param_hint="--acceptance",
        )
    return tokens


def _table(rows: list[Round]) -> Table:
    """A row for each width; a narrow terminal gets the columns that matter most."""
    table = Table(box=None, pad_edge=False, header_style="bold")
    best = max(max(row.stock_speedup, row.tile_speedup) for row in rows)
    titles = ["rows", "GB read", "tokens", "stock ms", "x stock", "16-row ms", "x 16-row", "tok/s"]
    kept = range(len(titles)) if stdout().width >= WIDE else (0, 4, 6, 7)
    for place in kept:
        table.add_column(titles[place], justify="right", no_wrap=True)
    for row in rows:
        cells = [f"{row.rows}", f"{row.gigabytes:.2f}", f"{row.tokens:.2f}"]
        ways = ((row.stock_ms, row.stock_speedup), (row.tile_ms, row.tile_speedup))
        for milliseconds, speedup in ways:
            style = "[bold green]" if speedup == best else ""
            cells += [f"{milliseconds:.2f}", f"{style}{speedup:.2f}x"]
        cells.append(f"{row.tokens_per_second:,.0f}")
        table.add_row(*(cells[place] for place in kept))
    return table
