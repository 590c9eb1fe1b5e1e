"""The options that `generate` alone has."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from . import options

Prompt = Annotated[
    str | None,
    typer.Argument(help="The prompt. What is piped in comes after it; '-' puts it here."),
]
Files = Annotated[
    list[Path] | None,
    typer.Option(
        "--file",
        "-f",
        metavar="FILE",
        help="Text to add to the prompt; '-' is stdin. Repeatable.",
    ),
]
System = Annotated[
    str | None,
    options.value(
        group=options.DECODING, metavar="TEXT", help="A system message to put before the prompt."
    ),
]
Raw = Annotated[
    bool,
    options.flag(
        "--no-chat-template",
        options.DECODING,
        "Continue the prompt as it is, not as a chat message.",
    ),
]
JsonSchema = Annotated[
    Path | None,
    options.value(
        "--json-schema",
        group=options.DECODING,
        metavar="FILE",
        help="Answer with JSON that fits the schema in FILE.",
    ),
]
Compare = Annotated[
    bool,
    options.flag(
        "--compare/--no-compare",
        options.OUTPUT,
        "Decode without the drafter, too, to compare.",
    ),
]
Stats = Annotated[
    bool, options.flag("--stats", options.OUTPUT, "Show tokens, rounds, times and memory.")
]
Output = Annotated[
    Path | None,
    options.value(
        "--output",
        "-o",
        group=options.OUTPUT,
        metavar="FILE",
        help="Write to FILE, once it is complete; '-' is stdout.",
    ),
]
JsonLines = Annotated[
    bool,
    options.flag(
        "--json-lines",
        options.OUTPUT,
        "Print a JSON object for the first token and each round, and one at the end.",
    ),
]
