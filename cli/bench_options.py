"""The options that `bench` alone has."""

from __future__ import annotations

from enum import StrEnum
from pathlib import Path
from typing import Annotated

from dflash_mlx.bench.suites import SUITES

from .options import DECODING, OUTPUT, flag, named, value

WHAT = "What is measured"  # the group that --help shows
EMBEDDED = "embedded"
SOME = 10  # prompts of a suite of the hub, unless --limit says otherwise


class ProtocolName(StrEnum):
    """Whose way to measure, see `bench.protocol`."""

    zlab = "zlab"


# The prefill brings the first token, so it takes two to have a speed.
MaxTokens = Annotated[
    int,
    value("--max-tokens", "-n", group=DECODING, metavar="N", help="Stop after N tokens.", min=2),
]
BlockSize = Annotated[
    int | None,
    value(
        "--block-size",
        "-b",
        group=DECODING,
        metavar="N",
        help="Tokens to verify at once. Default: the drafter's own block size.",
        min=1,
    ),
]
Suite = Annotated[
    list[str] | None,
    value(
        group=WHAT,
        metavar="NAME",
        help=f"{EMBEDDED} (the default), {', '.join(SUITES)}. Repeatable.",
    ),
]
Prompts = Annotated[
    Path | None,
    value(
        group=WHAT,
        metavar="FILE",
        help='JSONL of {"prompt" or "messages", "category", "answer"} to use instead.',
    ),
]
Data = Annotated[
    Path | None,
    value(
        group=WHAT,
        metavar="DIR",
        help="Read suites from this folder, not from the hub: files with the same columns.",
    ),
]
Protocol = Annotated[
    ProtocolName | None,
    value(
        group=WHAT,
        metavar="NAME",
        help="zlab: the prompts, lengths and means of z-lab's papers; one run of each prompt.",
    ),
]
Limit = Annotated[
    int | None,
    value(
        group=WHAT,
        metavar="N",
        help=f"At most N prompts per category. Default: {SOME} for suites from the hub, all "
        "otherwise.",
        min=1,
    ),
]
Repeats = Annotated[
    int, value(group=WHAT, metavar="N", help="Times to run each prompt, each way.", min=1)
]
ContextLength = Annotated[
    str | None,
    value(group=WHAT, metavar="N,N", help="Pad prompts to these lengths with other prompts' text."),
]
TreeBudget = Annotated[
    str,
    value(
        "--tree-budget",
        group=WHAT,
        metavar="N",
        help="Also measure draft trees of N tokens, or 'auto'.",
    ),
]
Trees = Annotated[
    str | None,
    value(
        group=WHAT,
        metavar="N,N",
        help="Instead, compare chains with draft trees of these sizes.",
    ),
]
Counts = Annotated[bool, flag("--counts", WHAT, "Instead, count what a round asks of the device.")]
OpenAI = Annotated[
    str | None,
    value(
        group=WHAT,
        metavar="URL",
        help="Instead, measure an OpenAI-compatible server; --model is its name there.",
    ),
]
Concurrency = Annotated[
    str | None,
    value(
        group=WHAT,
        metavar="N,N",
        help="Measure the server of --openai under so many clients at once.",
    ),
]
Out = Annotated[
    Path | None,
    value(
        group=OUTPUT,
        metavar="DIR",
        help="Write JSON, CSV, Markdown and plots to this folder.",
        parser=named,
    ),
]
Plot = Annotated[
    Path | None,
    value(
        group=OUTPUT, metavar="FILE", help="Save a plot of the --trees comparison.", parser=named
    ),
]
