"""Options that several commands share. Related ones are a dataclass, see `expand_groups`."""

from __future__ import annotations

import secrets
from collections.abc import Callable
from dataclasses import MISSING, dataclass, fields, is_dataclass
from functools import wraps
from inspect import Parameter, Signature, signature
from pathlib import Path
from typing import Annotated, Any, get_type_hints

import typer

from dflash_mlx.errors import SettingsError
from dflash_mlx.loading.hub import Hub
from dflash_mlx.loading.quantization import Quantization
from dflash_mlx.loading.registry import EMBEDDED, LOOKUP, MTP, NONE, PACKAGED, pairs

from .output import note

KEPT_BITS = 16  # of --draft-bits: as they are
MODEL, DECODING, OUTPUT = "Model", "Decoding", "Output"  # the groups that --help shows
AUTO, OFF = "auto", "off"  # of --tree-budget
# Real models to name instead of the embedded one, in 4 bits: 2.3 GB and 17 GB.
SMALL, CODER = (f"mlx-community/Qwen3-{name}-4bit" for name in ("4B", "Coder-30B-A3B-Instruct"))


def option(group: str, metavar: str, help: str, *names: str, **limits: Any) -> Any:
    """An option with a value; without names it is called like the parameter."""
    return typer.Option(*names, metavar=metavar, help=help, rich_help_panel=group, **limits)


def flag(name: str, group: str, help: str) -> Any:
    """A switch."""
    return typer.Option(name, metavar="", help=help, rich_help_panel=group)


def four_or_eight(bits: int | None) -> int | None:
    """A callback."""
    if bits not in (None, 4, 8):
        raise typer.BadParameter(f"must be 4 or 8, not {bits}")
    return bits


def named(path: str) -> Path:
    """The path of an option. An empty one, as of an unset variable, would be the current folder."""
    if not path:
        raise typer.BadParameter("the name is empty")
    return Path(path)


def targets_beginning(incomplete: str) -> list[str]:
    """The known models that a shell may complete a name to."""
    names = (*PACKAGED, *(name for pair in pairs() for name in pair.targets))
    return [name for name in names if name.startswith(incomplete)]


def drafters_beginning(incomplete: str) -> list[str]:
    """The known drafters that a shell may complete a name to."""
    names = (LOOKUP, NONE, MTP, f"{EMBEDDED}-dflash2", *(pair.drafter for pair in pairs()))
    return [name for name in names if name.startswith(incomplete)]


Model = Annotated[
    str,
    option(
        MODEL,
        "NAME",
        "Folder, GGUF, hub name or smollm2.",
        "--model",
        "-m",
        autocompletion=targets_beginning,
    ),
]
Draft = Annotated[
    str | None,
    option(
        MODEL,
        "NAME",
        "Drafter, smaller model, mtp (the model's head), lookup, NAME+lookup or none. "
        "Default: the known one, else mtp.",
        "--draft",
        "-d",
        autocompletion=drafters_beginning,
    ),
]
NoDraft = Annotated[bool, flag("--no-draft", MODEL, "Decode without a drafter.")]
TargetBits = Annotated[int | None, option(MODEL, "4|8", "Quantize the model's weights on load.")]
DraftBits = Annotated[
    int | None, option(MODEL, "4|8|16", "Quantize the drafter's on load; 16 keeps them.")
]
DraftWindow = Annotated[
    int | None, option(MODEL, "N", "Tokens that the drafter remembers. Default: all.", min=1)
]
Mode = Annotated[str, option(MODEL, "MODE", "affine, mxfp4, mxfp8 or nvfp4.")]
GroupSize = Annotated[int | None, option(MODEL, "N", "Weights per scale. Default: the mode's own.")]
KernelsOption = Annotated[
    str, option(MODEL, "auto|off|exact", "Metal kernels; exact: bit for bit.", "--kernels")
]
Offline = Annotated[bool, flag("--offline", MODEL, "Use only what is already downloaded.")]
StockBlas = Annotated[bool, flag("--stock-blas", MODEL, "On Linux, keep MLX's own slow BLAS.")]
MaxTokens = Annotated[
    int, option(DECODING, "N", "Stop after N tokens.", "--max-tokens", "-n", min=0)
]
Temperature = Annotated[
    float,
    option(DECODING, "T", "0 picks the likeliest token; 1 samples.", "--temperature", "-t", min=0),
]
TopP = Annotated[float, option(DECODING, "P", "Only tokens within probability P.", min=0, max=1)]
TopK = Annotated[int, option(DECODING, "K", "Only the K likeliest tokens; 0 for all.", min=0)]
MinP = Annotated[float, option(DECODING, "P", "Only tokens over P x the top one.", min=0, max=1)]
Seed = Annotated[
    int | None, option(DECODING, "N", "The same seed gives the same text, drafted or not.", min=0)
]
Stop = Annotated[list[str] | None, option(DECODING, "TEXT", "Stop before this text. Repeatable.")]
Think = Annotated[bool, flag("--think", DECODING, "Think before the answer.")]
NoThink = Annotated[bool, flag("--no-think", DECODING, "Answer at once.")]
Effort = Annotated[str | None, option(DECODING, "HOW", "Think this much: low, medium or high.")]
BlockSize = Annotated[
    int | None,
    option(
        DECODING,
        "N",
        "Verify N tokens in each step. Default: what is fastest.",
        "--block-size",
        "-b",
        min=1,
    ),
]
TreeBudget = Annotated[str, option(DECODING, "N", "Draft trees of N tokens, or 'auto'.")]
KvBits = Annotated[
    int | None,
    option(
        DECODING, "4|8", "Quantize the KV cache, if the model allows it.", callback=four_or_eight
    ),
]
NoPolicy = Annotated[
    bool, flag("--no-policy", DECODING, "Always draft whole blocks, even where that is slower.")
]
Verbose = Annotated[bool, flag("--verbose", OUTPUT, "Explain the draft lengths; show the seed.")]
Json = Annotated[bool, flag("--json", OUTPUT, "Print one JSON object and nothing else.")]


@dataclass(frozen=True)
class Names:
    """The model and its drafter."""

    model: Model = EMBEDDED
    draft: Draft = None


@dataclass(frozen=True)
class Weights:
    """How weights are loaded. Raises `SettingsError`."""

    target_bits: TargetBits = None
    draft_bits: DraftBits = None
    draft_window: DraftWindow = None
    quant_mode: Mode = "affine"
    group_size: GroupSize = None
    kernels: KernelsOption = "auto"
    offline: Offline = False
    stock_blas: StockBlas = False

    def __post_init__(self) -> None:
        kept = self.draft_bits == KEPT_BITS
        for bits in (self.target_bits, None if kept else self.draft_bits):
            Quantization.of(bits, self.quant_mode, self.group_size)

    @property
    def settings(self) -> dict[str, Any]:
        """Of `dflash_mlx.load`, without the bits of the two models."""
        return {
            "mode": self.quant_mode,
            "group_size": self.group_size,
            "hub": Hub(offline=self.offline),
        }


@dataclass(frozen=True)
class Sampling:
    """How tokens are chosen. Raises `SettingsError`."""

    temperature: Temperature = 0.0
    top_p: TopP = 1.0
    top_k: TopK = 0
    min_p: MinP = 0.0
    seed: Seed = None

    def __post_init__(self) -> None:  # before MLX starts, and before a note about these options
        if not self.top_p > 0:
            raise SettingsError("top_p must be above 0 and at most 1.")
        if (self.seed or 0) >= 2**32:
            raise SettingsError(f"seed must be from 0 to 2**32 - 1, not {self.seed}.")

    def settings(self) -> dict[str, Any]:
        """Of `stream_generate`, with a seed if one is needed; notes options without effect."""
        settings = dict(vars(self))
        given = [name for name, value in settings.items() if value != getattr(Sampling, name)]
        if given and not self.temperature:
            note(f"{', '.join(map(spelled, given))} has no effect at temperature 0.")
        if self.temperature > 0 and self.seed is None:
            # Drawn here, so that plain decoding can use the same one.
            settings["seed"] = secrets.randbits(32)
        return settings


@dataclass(frozen=True)
class Thinking:
    """Whether and how much an answer thinks first, where the chat template knows it."""

    think: Think = False
    no_think: NoThink = False
    reasoning_effort: Effort = None

    def settings(self) -> dict[str, Any]:
        """Of `stream_generate`."""
        think = True if self.think else (False if self.no_think else None)
        return {"think": think, "reasoning_effort": self.reasoning_effort}

    def variables(self, tokenizer: Any) -> dict[str, Any]:
        """Of the chat template; warns of what it does not know. Raises `SettingsError`."""
        from dflash_mlx.prompt import thinking_variables

        return thinking_variables(tokenizer, **self.settings())


@dataclass(frozen=True)
class StepOptions:
    """What a step drafts and verifies."""

    block_size: BlockSize = None
    tree_budget: TreeBudget = OFF
    kv_bits: KvBits = None
    no_policy: NoPolicy = False


def tree_rows(text: str) -> int | str | None:
    """The value of --tree-budget; None is chains. Raises `typer.BadParameter`."""
    if text in (AUTO, OFF):
        return AUTO if text == AUTO else None
    if not text.isdecimal():
        wanted = f"must be a number, {AUTO} or {OFF}, not {text}"
        raise typer.BadParameter(wanted, param_hint="--tree-budget")
    return int(text)


def spelled(parameter: str) -> str:
    """A parameter as an option of the command line."""
    return f"--{parameter.replace('_', '-')}"


def is_given(parameter: str, context: typer.Context) -> bool:
    """Whether an option was given on the command line."""
    source = context.get_parameter_source(parameter)
    return source is not None and source.name == "COMMANDLINE"


def refuse(context: typer.Context, reason: str, *parameters: str) -> None:
    """Raise `BadParameter` with the reason if one of these options was given, and not off."""
    for parameter in context.command.params:
        if parameter.name in parameters and is_given(parameter.name, context):
            if context.params[parameter.name] not in (False, OFF):
                raise typer.BadParameter(reason, context, param_hint=parameter.opts[0])


def expand_groups(command: Callable[..., None]) -> Callable[..., None]:
    """Replace each dataclass parameter of a command by parameters for its fields.

    `chat(*, names: Names, stop: Stop)` becomes `chat(*, model: Model, draft: Draft, stop: Stop)`.
    Annotations and defaults of the fields declare the options, like those of parameters in Typer.
    """
    groups: dict[str, Any] = {}
    parameters = []
    hints = get_type_hints(command, include_extras=True)
    for name, parameter in signature(command).parameters.items():
        if is_dataclass(hints[name]):
            groups[name] = hints[name]
            parameters += _fields(hints[name])
        else:
            parameters.append(parameter.replace(annotation=hints[name]))

    @wraps(command)
    def grouped(**given: Any) -> None:
        for name, group in groups.items():
            given[name] = group(**{field.name: given.pop(field.name) for field in fields(group)})
        command(**given)

    vars(grouped)["__signature__"] = Signature(parameters)
    grouped.__annotations__ = {one.name: one.annotation for one in parameters}
    return grouped


def _fields(group: Any) -> list[Parameter]:
    hints = get_type_hints(group, include_extras=True)
    return [
        Parameter(
            field.name,
            Parameter.KEYWORD_ONLY,
            default=Parameter.empty if field.default is MISSING else field.default,
            annotation=hints[field.name],
        )
        for field in fields(group)
    ]
