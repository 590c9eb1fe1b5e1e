"""`dflash-mlx models`, `pull`, `list` and `rm`: known models, and those on this disk."""

from __future__ import annotations

from dataclasses import asdict
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.table import Table
from rich.text import Text

from dflash_mlx.errors import DownloadError, ModelNotFoundError
from dflash_mlx.loading.checks import WHETHER, YES, fits, looks_quantized
from dflash_mlx.loading.hub import Hub
from dflash_mlx.loading.inspect import inspect_drafter
from dflash_mlx.loading.registry import (
    EMBEDDED,
    OTHERWISE,
    PACKAGES,
    KnownPair,
    check_name,
    gguf_file,
    known_drafter,
    pairs,
)

from . import options
from .output import NOTHING, make_table, note, print_json, sized, stdout
from .pair import announce, on_hub

WIDTHS = (16, 8, 4)  # bits per weight
GB = 1e9


REPOSITORY = "A Hugging Face repository (owner/name)."
Name = Annotated[str, typer.Argument(help=REPOSITORY, autocompletion=options.targets_beginning)]
NoDrafter = Annotated[
    bool, options.flag("--no-draft", options.MODEL, "Do not download the drafter.")
]
Inspect = Annotated[
    Path | None,
    options.option(options.OUTPUT, "PATH", "Show how a drafter's config.json is read."),
]


def models(json: options.Json = False, inspect: Inspect = None) -> None:
    """List the models that have a known drafter, and what is downloaded."""
    if inspect is not None:
        _inspect(inspect, json)
        return
    copies = Hub().copies()
    if json:
        rows = [_as_json(pair, copies) for pair in pairs()]
        print_json({"embedded": EMBEDDED, "pairs": rows})
        return
    _print_models(pairs(), copies)
    note("Sizes are rough. Conversions are recognized by name, such as Qwen3-8B-4bit.")
    note(f"--draft chooses one of several drafters. {OTHERWISE}")


def pull(*, name: Name, no_draft: NoDrafter = False, offline: options.Offline = False) -> None:
    """Download a model and its known drafter, and print where they are."""
    check_name(name)
    if "/" not in name:
        gguf_file(name)  # its error says how pip installs it
    if not on_hub(name):
        note(f"{name} is on this disk already.")
        return
    drafter, hub = known_drafter(name), Hub(offline=offline)
    announce(name, hub)
    names = [name]
    if drafter is None and not no_draft:
        note(f"No drafter is known for {name}: --draft NAME names one. {OTHERWISE}")
    elif drafter is not None and on_hub(drafter) and not no_draft:
        names.append(drafter)
        announce(drafter, hub, drafter=True)
    for one in names:
        print(f"{one}  {hub.fetch(one)}", flush=True)


def list_(*, json: options.Json = False) -> None:
    """List the downloaded models with their sizes."""
    copies = Hub().copies()
    fit = {name: fits(size, looks_quantized(name)) for name, size in copies.items()}
    if json:
        rows = [{"name": name, "bytes": copies[name], "fits": fit[name]} for name in copies]
        print_json({"models": rows})
        return
    if not copies:
        note("Nothing is downloaded. 'dflash-mlx pull NAME' downloads; 'tiny' is built in.")
        return
    table = make_table("name", "size", WHETHER)
    for name, size in copies.items():
        table.add_row(name, sized(size), fit[name])
    stdout().print(table)


def rm(*, name: Name) -> None:
    """Delete a downloaded model from this disk."""
    if name == EMBEDDED:
        raise ModelNotFoundError(f"{name} is part of dflash-mlx and cannot be deleted.")
    if name in PACKAGES:
        package, _ = PACKAGES[name]
        raise ModelNotFoundError(f"{name} is a Python package: pip uninstall {package}")
    note(f"Deleted {name}: {sized(Hub().remove(name))} freed.")


def _print_models(rows: list[KnownPair], copies: dict[str, int]) -> None:
    """A line for each target with its sizes; below it its drafters and downloads."""
    width = max(len(pair.targets[0]) for pair in rows)
    titles = [f"{bits}-bit" for bits in WIDTHS]
    _print_line("GB of memory", titles, WHETHER, width, "bold")
    _print_line("tiny", [NOTHING] * len(WIDTHS), YES, width)
    _print_details(["built in, with a second drafter: --draft tiny-dflash2"])
    _print_line("smollm2", [NOTHING] * len(WIDTHS), YES, width)
    _print_details(["a Python package that make real installs; its drafter is built in"])
    for pair in rows:
        sizes = [pair.gigabytes(bits) for bits in WIDTHS]
        cells = [NOTHING if size is None else f"{size:.1f}" for size in sizes]
        _print_line(pair.targets[0], cells, _fits(pair) or NOTHING, width)
        _print_details(_details(pair, copies))


def _print_line(name: str, cells: list[str], fit: str, width: int, style: str = "") -> None:
    figures = "".join(f"{cell:>8}" for cell in cells)
    stdout().print(Text(f"{name:{width}}{figures}  {fit}", style), soft_wrap=True)


def _print_details(lines: list[str]) -> None:
    for line in lines:
        stdout().print(Text(f"  {line}", "dim"), soft_wrap=True)


def _details(pair: KnownPair, copies: dict[str, int]) -> list[str]:
    """Other names of a target, its drafters, and what of these is downloaded."""
    lines = [f"also {name}" for name in pair.targets[1:]]
    lines.append(f"drafter {pair.drafter}")
    lines += [f"or {other.drafter}" for other in pair.also if other.refused is None]
    for name, size in copies.items():
        if name == pair.drafter or pair.matches(name):
            lines.append(f"downloaded: {name}, {sized(size)}")
    return lines


def _fits(pair: KnownPair) -> str | None:
    """Whether the published weights fit this machine; None if their size is unknown."""
    size = pair.gigabytes(16)
    return None if size is None else fits(size * GB)


def _as_json(pair: KnownPair, copies: dict[str, int]) -> dict[str, Any]:
    return {
        "drafter": pair.drafter,
        "targets": list(pair.targets),
        "also": [asdict(other) for other in pair.also],
        "gigabytes": {str(bits): pair.gigabytes(bits) for bits in WIDTHS},
        "fits": _fits(pair),
        "downloaded": {name: size for name, size in copies.items() if pair.matches(name)},
        "drafter_bytes": copies.get(pair.drafter),
    }


def _inspect(path: Path, json: bool) -> None:
    """Print what each field of a drafter's config was resolved to, and from where."""
    if not path.exists():
        from dflash_mlx.loading.load import drafter_folder

        try:
            path = drafter_folder(str(path), Hub(offline=True))
        except DownloadError as error:
            raise ModelNotFoundError(f"{path} is not here: dflash-mlx pull {path}") from error
    decisions = inspect_drafter(path)
    if json:
        print_json({"path": str(path), "decisions": [asdict(decision) for decision in decisions]})
        return
    table = Table.grid(padding=(0, 2))
    for decision in decisions:
        table.add_row(Text(decision.field, "bold"), str(decision.value), decision.source)
    stdout().print(table)
