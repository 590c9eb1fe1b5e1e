"""The options that `generate` alone has."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from . import options

Prompt = Annotated[
    str | None,
    typer.Argument(help="The question; '-', or nothing in a pipe, reads it from stdin."),
]
File = Annotated[
    Path | None,
    typer.Option("--file", "-f", metavar="FILE", help="Read the question from FILE instead."),
]
System = Annotated[
    str | None,
    typer.Option(
        metavar="TEXT",
        help="What the model is told before the question; by default nothing.",
        rich_help_panel=options.DECODING,
    ),
]
Raw = Annotated[
    bool,
    options.flag("--no-chat-template", "Continue the prompt as it is.", options.DECODING),
]
Compare = Annotated[
    bool,
    options.flag(
        "--compare/--no-compare",
        "Decode plainly as well: shows the speedup, and that the text is the same.",
        options.OUTPUT,
    ),
]
Stats = Annotated[
    bool,
    options.flag("--stats", "Count tokens, rounds, seconds and memory.", options.OUTPUT),
]
Output = Annotated[
    Path | None,
    typer.Option(
        "--output",
        "-o",
        metavar="FILE",
        help="Write what would go to stdout to FILE, when it is whole.",
        rich_help_panel=options.OUTPUT,
    ),
]
