"""The options that several commands share, each declared once; those of a kind are a dataclass."""

from __future__ import annotations

import secrets
from dataclasses import dataclass
from enum import StrEnum
from pathlib import Path
from typing import Annotated, Any

import typer

from dflash_mlx.loading.hub import Hub
from dflash_mlx.loading.registry import EMBEDDED, LOOKUP, NONE, PACKAGED, pairs

from .output import note

MODEL, DECODING, OUTPUT = "Model", "Decoding", "Output"  # the groups that --help shows
AUTO, OFF = "auto", "off"  # of --tree-budget


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


def flag(name: str, group: str, help: str) -> Any:
    """A switch; Typer would show it with a value to be given."""
    return typer.Option(name, metavar="", help=help, rich_help_panel=group)


def value(*names: str, group: str, metavar: str, help: str, **limits: Any) -> Any:
    """An option with a value; without a name it is called like the parameter."""
    return typer.Option(*names, metavar=metavar, help=help, rich_help_panel=group, **limits)


def named(path: str) -> Path:
    """The path of an option. An empty one, as of a variable that is not set, would be "here"."""
    if not path:
        raise typer.BadParameter("the name is empty.")
    return Path(path)


def targets_beginning(incomplete: str) -> list[str]:
    """The known models that a shell may complete a name to."""
    names = (*PACKAGED, *(name for pair in pairs() for name in pair.targets))
    return [name for name in names if name.startswith(incomplete)]


def drafters_beginning(incomplete: str) -> list[str]:
    """What drafts, likewise."""
    names = (LOOKUP, NONE, f"{EMBEDDED}-dflash2", *(pair.drafter for pair in pairs()))
    return [name for name in names if name.startswith(incomplete)]


Model = Annotated[
    str,
    value(
        "--model",
        "-m",
        group=MODEL,
        metavar="NAME",
        help="Folder, GGUF file, hub name, smollm2.",
        autocompletion=targets_beginning,
    ),
]
NoDraft = Annotated[bool, flag("--no-draft", MODEL, "Decode without a drafter.")]
TargetBits = Annotated[
    Bits | None, value(group=MODEL, metavar="4|8", help="Quantize the model's weights on load.")
]
Offline = Annotated[bool, flag("--offline", MODEL, "Use only what is already downloaded.")]
StockBlas = Annotated[
    bool, flag("--stock-blas", MODEL, "On Linux, keep the slow BLAS that ships with MLX.")
]
MaxTokens = Annotated[
    int,
    value("--max-tokens", "-n", group=DECODING, metavar="N", help="Stop after N tokens.", min=0),
]
Temperature = Annotated[
    float,
    value(
        "--temperature",
        "-t",
        group=DECODING,
        metavar="T",
        help="0 picks the likeliest token; 1 samples.",
        min=0,
    ),
]
KvBits = Annotated[
    Bits | None,
    value(group=DECODING, metavar="4|8", help="Quantize the KV cache, if the model allows it."),
]
Stop = Annotated[
    list[str] | None,
    value(group=DECODING, metavar="TEXT", help="Stop before this text. Repeatable."),
]
Verbose = Annotated[
    bool, flag("--verbose", OUTPUT, "Explain the width of the rounds, and show the seed.")
]
Json = Annotated[bool, flag("--json", OUTPUT, "Print one JSON object and nothing else.")]


@dataclass(frozen=True)
class Names:
    """Which model, and what drafts for it."""

    model: Model = "tiny"
    draft: Annotated[
        str | None,
        value(
            "--draft",
            "-d",
            group=MODEL,
            metavar="NAME",
            help="The drafter; unless given, the known one and, beside it, 'lookup', which "
            "drafts from the text itself. NAME+lookup is such a pair, 'none' does not draft.",
            autocompletion=drafters_beginning,
        ),
    ] = None


@dataclass(frozen=True)
class Weights:
    """How weights are found, quantized and multiplied."""

    target_bits: TargetBits = None
    draft_bits: Annotated[
        Bits | None,
        value(group=MODEL, metavar="4|8", help="Quantize the drafter's weights on load."),
    ] = None
    quant_mode: Annotated[
        QuantMode,
        value(group=MODEL, metavar="MODE", help="One of affine, mxfp4, mxfp8, nvfp4."),
    ] = QuantMode.affine
    group_size: Annotated[
        int | None,
        value(group=MODEL, metavar="N", help="Weights per scale. Default: the mode's own."),
    ] = None
    exact: Annotated[
        bool | None,
        flag(
            "--exact/--no-exact",
            MODEL,
            "Bit for bit, on Metal. Default: where it costs nothing.",
        ),
    ] = None
    offline: Offline = False
    stock_blas: StockBlas = False

    def __post_init__(self) -> None:
        """Raise `typer.BadParameter` for how to quantize without what."""
        if self.target_bits is None and self.draft_bits is None:
            given = {"--quant-mode": self.quant_mode is not QuantMode.affine}
            given["--group-size"] = self.group_size is not None
            if alone := [option for option, is_there in given.items() if is_there]:
                raise typer.BadParameter(
                    "goes with --target-bits or --draft-bits", param_hint=alone[0]
                )

    @property
    def settings(self) -> dict[str, Any]:
        """Of `dflash_mlx.load`, but for the bits of both models."""
        return {
            "mode": self.quant_mode.value,
            "group_size": self.group_size,
            "hub": Hub(offline=self.offline),
        }


@dataclass(frozen=True)
class Sampling:
    """How tokens are chosen."""

    temperature: Temperature = 0.0
    top_p: Annotated[
        float,
        value(
            group=DECODING,
            metavar="P",
            help="Likeliest tokens only, up to probability P.",
            min=0,
            max=1,
        ),
    ] = 1.0
    top_k: Annotated[
        int,
        value(
            group=DECODING,
            metavar="K",
            help="Sample from the K most likely tokens; 0 means all.",
            min=0,
        ),
    ] = 0
    min_p: Annotated[
        float,
        value(
            group=DECODING,
            metavar="P",
            help="Ignore tokens under P times the top probability.",
            min=0,
            max=1,
        ),
    ] = 0.0
    seed: Annotated[
        int | None,
        value(
            group=DECODING,
            metavar="N",
            help="The same seed gives the same text, drafted or not.",
            min=0,
        ),
    ] = None

    def settings(self) -> dict[str, Any]:
        """Of `stream_generate`, with a seed if one is needed; what has no effect is said."""
        settings = dict(vars(self))
        given = [name for name, value in settings.items() if value != getattr(Sampling, name)]
        if given and not self.temperature:
            say_idle(", ".join(map(spelled, given)))
        if self.temperature > 0 and self.seed is None:
            # Drawn here, so that plain decoding can have the same.
            settings["seed"] = secrets.randbits(32)
        return settings


@dataclass(frozen=True)
class Rounds:
    """How much is drafted and verified at once."""

    block_size: Annotated[
        int | None,
        value(
            "--block-size",
            "-b",
            group=DECODING,
            metavar="N",
            help="Tokens to verify at once. Default: what is fastest.",
            min=1,
        ),
    ] = None
    tree_budget: Annotated[
        str, value(group=DECODING, metavar="N", help="Verify draft trees of N tokens, or 'auto'.")
    ] = OFF
    kv_bits: KvBits = None
    no_policy: Annotated[
        bool, flag("--no-policy", DECODING, "Always draft whole blocks, even where that is slower.")
    ] = False


def tree_rows(text: str) -> int | str | None:
    """What --tree-budget says; None is chains. Raises `typer.BadParameter`."""
    if text == OFF:
        return None
    if text == AUTO:
        return AUTO
    if not (text.isdecimal() and int(text) > 1):
        raise typer.BadParameter(
            f"{text} is neither a number from 2 on, nor {AUTO}, nor {OFF}",
            param_hint="--tree-budget",
        )
    return int(text)


def bits_of(bits: Bits | None) -> int | None:
    """The number an option stands for."""
    return None if bits is None else int(bits.value)


def say_idle(settings: str) -> None:
    """Say that settings of sampling have no effect."""
    note(f"At temperature 0 the most likely token is picked: {settings} changes nothing.")


def spelled(parameter: str) -> str:
    """A parameter as the option that it is on the command line."""
    return f"--{parameter.replace('_', '-')}"


def is_given(parameter: str, context: typer.Context) -> bool:
    """Whether an option was given, and is not its default."""
    source = context.get_parameter_source(parameter)
    return source is not None and source.name == "COMMANDLINE"
