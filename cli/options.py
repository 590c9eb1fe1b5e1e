"""The options that several commands share."""

from __future__ import annotations

import secrets
from enum import StrEnum
from pathlib import Path
from typing import Annotated, Any

import typer

MODEL, DECODING, OUTPUT = "Model", "Decoding", "Output"  # the groups that --help shows


class Bits(StrEnum):
    """Widths of quantized weights."""

    four = "4"
    eight = "8"


class QuantMode(StrEnum):
    """Ways to quantize weights, see `mx.quantize`."""

    affine = "affine"
    mxfp4 = "mxfp4"
    mxfp8 = "mxfp8"
    nvfp4 = "nvfp4"


def flag(name: str, help: str, group: str) -> Any:
    """A switch; Typer would show it with a value to be given."""
    return typer.Option(name, metavar="", help=help, rich_help_panel=group)


def _value(*names: str, metavar: str, help: str, group: str, **limits: Any) -> Any:
    return typer.Option(*names, metavar=metavar, help=help, rich_help_panel=group, **limits)


Model = Annotated[
    str,
    _value(
        "--model",
        "-m",
        metavar="NAME",
        help="A hub repository, a folder, or tiny.",
        group=MODEL,
    ),
]
Draft = Annotated[
    str | None,
    _value(
        "--draft",
        "-d",
        metavar="NAME",
        help="The drafter; known ones are found by themselves. lookup drafts from the text itself, "
        "NAME+lookup beside a network, none not at all.",
        group=MODEL,
    ),
]
NoDraft = Annotated[bool, flag("--no-draft", "Decode plainly, without a drafter.", MODEL)]
TargetBits = Annotated[
    Bits | None,
    _value(
        "--target-bits", metavar="4|8", help="Quantize the model's weights on load.", group=MODEL
    ),
]
DraftBits = Annotated[
    Bits | None,
    _value(
        "--draft-bits", metavar="4|8", help="Quantize the drafter's weights on load.", group=MODEL
    ),
]
Quantize = Annotated[
    QuantMode,
    _value(
        "--quant-mode",
        metavar="MODE",
        help="To affine, mxfp4, mxfp8 or nvfp4.",
        group=MODEL,
    ),
]
GroupSize = Annotated[
    int | None,
    _value(
        "--group-size",
        metavar="N",
        help="Weights that share a scale; by default the mode's.",
        group=MODEL,
    ),
]
Exact = Annotated[
    bool | None,
    flag(
        "--exact/--no-exact",
        "On Metal, drafted text equal to plain text bit for bit; default: where measured free.",
        MODEL,
    ),
]
Offline = Annotated[bool, flag("--offline", "Use what is downloaded, ask no network.", MODEL)]
StockBlas = Annotated[
    bool, flag("--stock-blas", "On Linux: keep the slow BLAS that comes with MLX.", MODEL)
]
MaxTokens = Annotated[
    int,
    _value("--max-tokens", "-n", metavar="N", help="End after N tokens.", group=DECODING, min=0),
]
BlockSize = Annotated[
    int | None,
    _value(
        "--block-size",
        "-b",
        metavar="N",
        help="Tokens verified at once; by default as many as are fastest, by measured costs.",
        group=DECODING,
        min=1,
    ),
]
TreeBudget = Annotated[
    str,
    _value(
        "--tree-budget",
        metavar="N",
        help="Verify trees of N tokens, or 'auto'.",
        group=DECODING,
    ),
]
KvBits = Annotated[
    Bits | None,
    _value(
        "--kv-bits",
        metavar="4|8",
        help="Keep the model's keys and values in fewer bits, where it can.",
        group=DECODING,
    ),
]
NoPolicy = Annotated[
    bool,
    flag("--no-policy", "Draft whole blocks, even where fewer rows or none are faster.", DECODING),
]
Temperature = Annotated[
    float,
    _value(
        "--temperature",
        "-t",
        metavar="T",
        help="0 takes the likeliest token, 1 samples.",
        group=DECODING,
    ),
]
TopP = Annotated[
    float,
    _value("--top-p", metavar="P", help="Sample from the likeliest P of all.", group=DECODING),
]
TopK = Annotated[
    int, _value("--top-k", metavar="K", help="Sample from the likeliest K tokens.", group=DECODING)
]
MinP = Annotated[
    float,
    _value(
        "--min-p",
        metavar="P",
        help="Sample from tokens at least P times as likely as the likeliest.",
        group=DECODING,
    ),
]
Seed = Annotated[
    int | None,
    _value(
        "--seed",
        metavar="N",
        help="Of what is random: the same seed is the same text, drafted or not.",
        group=DECODING,
    ),
]
Stop = Annotated[
    list[str] | None,
    _value(
        "--stop",
        metavar="TEXT",
        help="End before this text; can be given several times.",
        group=DECODING,
    ),
]
Verbose = Annotated[
    bool,
    flag("--verbose", "Say how many rows each round had and why, and the seed.", OUTPUT),
]
Json = Annotated[bool, flag("--json", "Print one JSON object and nothing else.", OUTPUT)]
Inspect = Annotated[
    Path | None,
    typer.Option(
        "--inspect",
        metavar="PATH",
        help="Show how a drafter's folder or config.json is understood, field by field.",
        rich_help_panel=OUTPUT,
    ),
]


def sampling(
    temperature: float, top_p: float, top_k: int, min_p: float, seed: int | None
) -> dict[str, Any]:
    """The settings of `stream_generate` that say how tokens are chosen, with a seed if needed."""
    if temperature > 0 and seed is None:
        seed = secrets.randbits(32)  # drawn here, so that plain decoding can have the same
    return {
        "temperature": temperature,
        "top_p": top_p,
        "top_k": top_k,
        "min_p": min_p,
        "seed": seed,
    }
