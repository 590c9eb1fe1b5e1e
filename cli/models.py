"""`dflash-mlx models`: which targets have a drafter, what is on this disk, what a config says."""

from __future__ import annotations

from dataclasses import asdict
from pathlib import Path
from typing import Annotated, Any

from rich.text import Text

from dflash_mlx.loading.hub import Listing, listings
from dflash_mlx.loading.inspect import inspect_drafter

from . import options
from .screen import print_json, stdout

WIDTHS = (4, 8, 16)  # bits a weight
GB = 1e9


Inspect = Annotated[
    Path | None,
    options.value(
        group=options.OUTPUT,
        metavar="PATH",
        help="Show how a drafter's folder or config.json is read, field by field.",
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
    embedded = "  embedded, with its drafter and a second one, tiny-dflash2"
    lines = [Text.assemble(("tiny", "bold"), embedded)]
    for row in rows:
        lines += _lines(row)
    lines.append(Text("Conversions are known by their name: Qwen3-8B-4bit, Qwen3-8B-mxfp4, ..."))
    lines.append(
        Text("--draft chooses one of several drafters; any model is drafted by --draft lookup.")
    )
    stdout().print(*lines, sep="\n", soft_wrap=True)


def _lines(row: Listing) -> list[Text]:
    """What a person sees of one pair."""
    pair = row.pair
    original, *others = pair.targets
    first = Text.assemble((original, "bold"), "  drafted by ", (pair.drafter, "green"))
    lines = [first, *(Text(f"  also {name}", "dim") for name in others)]
    for other in pair.also:
        why = "" if other.refused is None else f", which does not load: {other.refused}"
        lines.append(Text(f"  or by {other.drafter}{why}", "dim"))
    if pair.billions is not None:
        weights = ", ".join(f"{pair.gigabytes(bits):.0f} GB in {bits} bits" for bits in WIDTHS)
        lines.append(Text(f"  about {weights}", "dim"))
    there = dict(row.copies)
    if row.drafter_bytes is not None:
        there[pair.drafter] = row.drafter_bytes
    lines += [Text(f"  downloaded: {name}, {size / GB:.1f} GB") for name, size in there.items()]
    return lines


def _as_json(row: Listing) -> dict[str, Any]:
    pair = row.pair
    return {
        "drafter": pair.drafter,
        "targets": list(pair.targets),
        "also": [asdict(other) for other in pair.also],
        "gigabytes": {str(bits): pair.gigabytes(bits) for bits in WIDTHS},
        "downloaded": row.copies,
        "drafter_bytes": row.drafter_bytes,
    }


def show_decisions(path: Path, json: bool) -> None:
    """Print what every field of a drafter's config was resolved to, and where it was read."""
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
