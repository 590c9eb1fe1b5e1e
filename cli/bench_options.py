"""The options that `bench` alone has."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

from dflash_mlx.bench.suites import SUITES

from .options import DECODING, OUTPUT, value

WHAT = "What is measured"  # the group that --help shows
EMBEDDED = "embedded"
SOME = 10  # prompts of a suite of the hub, unless --limit says otherwise

BlockSize = Annotated[
    int | None,
    value(
        "--block-size",
        "-b",
        group=DECODING,
        metavar="N",
        help="Tokens verified at once; by default the drafter's own.",
        min=1,
    ),
]
Suite = Annotated[
    list[str] | None,
    value(
        group=WHAT,
        metavar="NAME",
        help=f"{EMBEDDED} (the default), {', '.join(SUITES)}; can be given several times.",
    ),
]
Prompts = Annotated[
    Path | None,
    value(
        group=WHAT,
        metavar="FILE",
        help='JSONL of {"prompt" or "messages", "category", "answer"} instead of a suite.',
    ),
]
Limit = Annotated[
    int | None,
    value(
        group=WHAT,
        metavar="N",
        help=f"At most N prompts of each category; by default {SOME} of a suite of the hub, "
        "all of others.",
        min=1,
    ),
]
Repeats = Annotated[
    int, value(group=WHAT, metavar="N", help="Runs of each prompt in each way.", min=1)
]
ContextLength = Annotated[
    str | None,
    value(group=WHAT, metavar="N,N", help="Make prompts so long by text before them."),
]
Trees = Annotated[
    str | None,
    value(group=WHAT, metavar="N|auto", help="Draft trees as well, of N tokens or as many as pay."),
]
TreeBudgets = Annotated[
    str | None,
    value(
        "--tree-budget",
        group=WHAT,
        metavar="N,N",
        help="Instead: chains against draft trees of these sizes.",
    ),
]
OpenAI = Annotated[
    str | None,
    value(
        group=WHAT,
        metavar="URL",
        help="Instead: ask an OpenAI-compatible server; --model is its name there.",
    ),
]
Out = Annotated[
    Path | None,
    value(
        group=OUTPUT,
        metavar="DIR",
        help="Write JSON, CSV, Markdown and plots into this folder.",
    ),
]
Plot = Annotated[
    Path | None,
    value(group=OUTPUT, metavar="FILE", help="Where to draw what --tree-budget finds."),
]
