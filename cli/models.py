"""`dflash-mlx models`: which targets have a drafter."""

from __future__ import annotations

from rich.text import Text

from dflash_mlx.registry import pairs

from . import options
from .screen import print_json, stdout


def models(json: options.Json = False) -> None:
    """List the models whose drafters are known, the embedded pair first."""
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
