"""The options that `bench` alone has."""

from __future__ import annotations

from enum import StrEnum
from pathlib import Path
from typing import Annotated

import typer

from dflash_mlx.bench.suites import SUITES

from . import options

WHAT = "What is measured"  # the group that --help shows
EMBEDDED = "embedded"
SOME = 10  # prompts of a suite of the hub, unless --limit says otherwise


class ProtocolName(StrEnum):
    """Whose way to measure, see `bench.protocol`."""

    zlab = "zlab"


BlockSize = Annotated[
    int | None,
    typer.Option(
        "--block-size",
        "-b",
        metavar="N",
        min=1,
        help="Tokens verified at once; by default the drafter's own.",
        rich_help_panel=options.DECODING,
    ),
]
Suite = Annotated[
    list[str] | None,
    typer.Option(
        metavar="NAME",
        help=f"{EMBEDDED} (the default), {', '.join(SUITES)}; can be given several times.",
        rich_help_panel=WHAT,
    ),
]
Prompts = Annotated[
    Path | None,
    typer.Option(
        metavar="FILE",
        help='JSONL of {"prompt" or "messages", "category", "answer"} instead of a suite.',
        rich_help_panel=WHAT,
    ),
]
Data = Annotated[
    Path | None,
    typer.Option(
        metavar="DIR",
        help="Read suites from this folder, not from the hub: files with the same columns.",
        rich_help_panel=WHAT,
    ),
]
Protocol = Annotated[
    ProtocolName | None,
    typer.Option(
        metavar="NAME",
        help="zlab: the prompts, lengths and means of z-lab's papers; one run of each prompt.",
        rich_help_panel=WHAT,
    ),
]
Limit = Annotated[
    int | None,
    typer.Option(
        min=1,
        metavar="N",
        help=f"At most N prompts of each category; by default {SOME} of a suite of the hub, "
        "all of others.",
        rich_help_panel=WHAT,
    ),
]
Repeats = Annotated[
    int,
    typer.Option(min=1, metavar="N", help="Runs of each prompt in each way.", rich_help_panel=WHAT),
]
ContextLength = Annotated[
    str | None,
    typer.Option(
        metavar="N,N",
        help="Make prompts so long by text before them.",
        rich_help_panel=WHAT,
    ),
]
Trees = Annotated[
    str | None,
    typer.Option(
        metavar="N|auto",
        help="Draft trees as well, of N tokens or as many as pay.",
        rich_help_panel=WHAT,
    ),
]
Policy = Annotated[
    bool,
    options.flag(
        "--policy",
        "Instead: is drafting ever slower than not, with four drafters from good to useless?",
        WHAT,
    ),
]
Sampling = Annotated[
    bool,
    options.flag(
        "--sampling",
        "Instead: tokens per round, by temperature and way to draft.",
        WHAT,
    ),
]
Kernels = Annotated[
    bool,
    options.flag(
        "--kernels",
        "Instead: MLX's kernels against ours for the model's shapes; decides from then on.",
        WHAT,
    ),
]
TreeBudgets = Annotated[
    str | None,
    typer.Option(
        "--tree-budget",
        metavar="N,N",
        help="Instead: chains against draft trees of these sizes.",
        rich_help_panel=WHAT,
    ),
]
OpenAI = Annotated[
    str | None,
    typer.Option(
        metavar="URL",
        help="Instead: ask an OpenAI-compatible server; --model is its name there.",
        rich_help_panel=WHAT,
    ),
]
Out = Annotated[
    Path | None,
    typer.Option(
        metavar="DIR",
        help="Write JSON, CSV, Markdown and plots into this folder.",
        rich_help_panel=options.OUTPUT,
    ),
]
Plot = Annotated[
    Path | None,
    typer.Option(
        metavar="FILE",
        help="Where to draw what --tree-budget finds.",
        rich_help_panel=options.OUTPUT,
    ),
]
