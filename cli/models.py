"""`dflash-mlx models`: which targets have a drafter, and how a drafter's config is understood."""

from __future__ import annotations

from dataclasses import asdict
from pathlib import Path

from rich.text import Text

from dflash_mlx.drafter.inspect import inspect_drafter
from dflash_mlx.registry import pairs

from . import options
from .screen import print_json, stdout


def models(json: options.Json = False, inspect: options.Inspect = None) -> None:
    """List the models whose drafters are known, the embedded pair first."""
    if inspect is not None:
        show_decisions(inspect, json)
        return
    known = pairs()
    if json:
        listed = [{"drafter": pair.drafter, "targets": list(pair.targets)} for pair in known]
        print_json({"embedded": "tiny", "pairs": listed})
        return
    lines = [Text.assemble(("tiny", "bold"), "  embedded, with its drafter")]
    for pair in known:
        original, *others = pair.targets
        lines.append(Text.assemble((original, "bold"), "  drafted by ", (pair.drafter, "green")))
        lines += [Text(f"  {name}", "dim") for name in others]
    stdout().print(*lines, sep="\n", soft_wrap=True)


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
