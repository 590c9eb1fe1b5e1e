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
    options.value(
        group=options.DECODING,
        metavar="TEXT",
        help="What the model is told before the question; by default nothing.",
    ),
]
Raw = Annotated[
    bool,
    options.flag("--no-chat-template", options.DECODING, "Continue the prompt as it is."),
]
Compare = Annotated[
    bool,
    options.flag(
        "--compare/--no-compare",
        options.OUTPUT,
        "Decode plainly as well: shows the speedup, and that the text is the same.",
    ),
]
Stats = Annotated[
    bool,
    options.flag("--stats", options.OUTPUT, "Count tokens, rounds, seconds and memory."),
]
Output = Annotated[
    Path | None,
    options.value(
        "--output",
        "-o",
        group=options.OUTPUT,
        metavar="FILE",
        help="Write what would go to stdout to FILE, when it is whole.",
    ),
]
