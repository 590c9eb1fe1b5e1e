"""Options that several commands share. Related ones are a group, see `expand_groups`."""

from __future__ import annotations

import secrets
from collections.abc import Callable
from dataclasses import dataclass, fields
from functools import wraps
from inspect import Parameter, Signature, signature
from pathlib import Path
from typing import Annotated, Any, NamedTuple, TypeVar, dataclass_transform, get_type_hints

import typer

from dflash_mlx.errors import SettingsError
from dflash_mlx.loading.hub import Hub
from dflash_mlx.loading.quantization import Quantization
from dflash_mlx.loading.registry import EMBEDDED, LOOKUP, MTP, NONE, PACKAGED, pairs
from dflash_mlx.setting_table import SAMPLING

from .output import note

KEPT_BITS = 16  # of --draft-bits: as they are
MODEL, DECODING, OUTPUT = "Model", "Decoding", "Output"  # the panels that --help shows
DECLARED = "declared_options"  # attribute of a group: its options by name
AUTO, OFF = "auto", "off"  # of --tree-budget
# Real models to name instead of the embedded one, in 4 bits: 2.3 GB and 17 GB.
SMALL, CODER = (f"mlx-community/Qwen3-{name}-4bit" for name in ("4B", "Coder-30B-A3B-Instruct"))

Group = TypeVar("Group")


class Option(NamedTuple):
    """A declared option: its default, and what Typer knows of it."""

    default: Any
    info: Any


def option(default: Any, panel: str, metavar: str, help: str, *names: str, **limits: Any) -> Any:
    """An option with a value, ... if required; without names it is called like the parameter."""
    info = typer.Option(*names, metavar=metavar, help=help, rich_help_panel=panel, **limits)
    return Option(default, info)


def flag(name: str, panel: str, help: str) -> Any:
    """A switch."""
    return Option(False, typer.Option(name, metavar="", help=help, rich_help_panel=panel))


@dataclass_transform(frozen_default=True)
def group(declared: type[Group]) -> type[Group]:
    """Make a dataclass of a class whose fields are declared by `option` and `flag`."""
    found = {name: one for name, one in vars(declared).items() if isinstance(one, Option)}
    for name, one in found.items():
        setattr(declared, name, one.default)
    setattr(declared, DECLARED, found)
    return dataclass(frozen=True)(declared)


def setting(name: str, *names: str) -> Any:
    """The option of a sampling setting."""
    one = SAMPLING[name]
    shown = not name.endswith("penalty")
    return option(one.default, DECODING, one.metavar, one.help, *names, show_default=shown)


def argument(default: Any, help: str, **settings: Any) -> Any:
    """A word without a name."""
    return Option(default, typer.Argument(help=help, **settings))


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
    known = (one.drafter for pair in pairs() for one in pair.drafters if one.refused is None)
    names = (LOOKUP, NONE, MTP, f"{EMBEDDED}-dflash2", *known)
    return [name for name in names if name.startswith(incomplete)]


def model(default: Any, help: str) -> Any:
    """--model."""
    names = ("--model", "-m")
    return option(default, MODEL, "NAME", help, *names, autocompletion=targets_beginning)


def max_tokens(default: int, least: int = 0) -> Any:
    """--max-tokens."""
    names = ("--max-tokens", "-n")
    return option(default, DECODING, "N", "Stop after N tokens.", *names, min=least)


def block_size(help: str) -> Any:
    """--block-size."""
    return option(None, DECODING, "N", help, "--block-size", "-b", min=1)


MODEL_NAME = model(EMBEDDED, "Folder, GGUF, hub name or smollm2.")
DRAFT = option(
    None,
    MODEL,
    "NAME",
    "Drafter, smaller model, mtp (the model's head), lookup, NAME+lookup or none. "
    "Default: the known one, else mtp.",
    "--draft",
    "-d",
    autocompletion=drafters_beginning,
)
ADAPTER = option(None, MODEL, "PATH", "LoRA of mlx_lm.lora: folder or hub name.")
NO_DRAFT = flag("--no-draft", MODEL, "Decode without a drafter.")
TARGET_BITS = option(None, MODEL, "4|8", "Quantize the model's weights on load.")
OFFLINE = flag("--offline", MODEL, "Use only what is already downloaded.")
STOCK_BLAS = flag("--stock-blas", MODEL, "On Linux, keep MLX's own slow BLAS.")
TEMPERATURE = setting("temperature", "--temperature", "-t")
STOP = option(None, DECODING, "TEXT", "Stop before this text. Repeatable.")
SYSTEM = option(None, DECODING, "TEXT", "A system message.")
KV_BITS = option(None, DECODING, "4|8", "Quantize the KV cache, if the model allows it.")
VERBOSE = flag("--verbose", OUTPUT, "Explain the draft lengths; show the seed.")
JSON = flag("--json", OUTPUT, "Print one JSON object and nothing else.")


@group
class Names:
    """The model, its drafter and its adapter."""

    model: str = MODEL_NAME
    draft: str | None = DRAFT
    adapter: str | None = ADAPTER


@group
class Weights:
    """How weights are loaded. Raises `SettingsError`."""

    target_bits: int | None = TARGET_BITS
    draft_bits: int | None = option(
        None, MODEL, "4|8|16", "Quantize the drafter's on load; 16 keeps them."
    )
    draft_window: int | None = option(
        None, MODEL, "N", "Tokens that the drafter remembers. Default: all.", min=1
    )
    quant_mode: str = option("affine", MODEL, "MODE", "affine, mxfp4, mxfp8 or nvfp4.")
    group_size: int | None = option(None, MODEL, "N", "Weights per scale. Default: the mode's own.")
    kernels: str = option(AUTO, MODEL, "auto|off|exact", "Metal kernels; exact: bit for bit.")
    offline: bool = OFFLINE
    stock_blas: bool = STOCK_BLAS

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


@group
class Sampling:
    """How tokens are chosen. Raises `SettingsError`."""

    temperature: float = TEMPERATURE
    top_p: float = setting("top_p")
    top_k: int = setting("top_k")
    min_p: float = setting("min_p")
    seed: int | None = setting("seed")
    repetition_penalty: float = setting("repetition_penalty")
    presence_penalty: float = setting("presence_penalty")
    frequency_penalty: float = setting("frequency_penalty")

    def __post_init__(self) -> None:  # before MLX starts, and before a note about these options
        for name, value in vars(self).items():
            SAMPLING[name].check(name, value)

    @property
    def given(self) -> dict[str, Any]:
        """The settings that are not the defaults."""
        return {name: one for name, one in vars(self).items() if one != SAMPLING[name].default}

    def settings(self) -> dict[str, Any]:
        """Of `stream_generate`, with a seed if one is needed; notes options without effect."""
        settings = dict(vars(self))
        given = [name for name in self.given if not name.endswith("penalty")]
        if given and not self.temperature:
            note(f"{', '.join(map(spelled, given))} has no effect at temperature 0.")
        if self.temperature > 0 and self.seed is None:
            # Drawn here, so that plain decoding can use the same one.
            settings["seed"] = secrets.randbits(32)
        return settings


@group
class Thinking:
    """Whether and how much an answer thinks first, where the chat template knows it."""

    think: bool = flag("--think", DECODING, "Think before the answer.")
    no_think: bool = flag("--no-think", DECODING, "Answer at once.")
    reasoning_effort: str | None = option(
        None, DECODING, "HOW", "Think this much: low, medium or high."
    )

    def settings(self) -> dict[str, Any]:
        """Of `stream_generate`."""
        think = True if self.think else (False if self.no_think else None)
        return {"think": think, "reasoning_effort": self.reasoning_effort}

    def variables(self, tokenizer: Any) -> dict[str, Any]:
        """Of the chat template; warns of what it does not know. Raises `SettingsError`."""
        from dflash_mlx.prompt import thinking_variables

        return thinking_variables(tokenizer, **self.settings())


@group
class StepOptions:
    """What a step drafts and verifies. Raises `SettingsError`."""

    block_size: int | None = block_size("Verify N tokens in each step. Default: what is fastest.")
    tree_budget: str = option(OFF, DECODING, "N", "Draft trees of N tokens, or 'auto'.")
    kv_bits: int | None = KV_BITS
    no_policy: bool = flag(
        "--no-policy", DECODING, "Always draft whole blocks, even where that is slower."
    )

    def __post_init__(self) -> None:
        check_kv_bits(self.kv_bits)


def check_kv_bits(bits: int | None) -> None:
    """Raise `SettingsError` for a wrong value of --kv-bits."""
    if bits not in (None, 4, 8):
        raise SettingsError(f"--kv-bits must be 4 or 8, not {bits}.")


def tree_rows(text: str) -> int | str | None:
    """The value of --tree-budget; None is chains. Raises `SettingsError`."""
    if text in (AUTO, OFF):
        return AUTO if text == AUTO else None
    if not text.isdecimal():
        raise SettingsError(f"--tree-budget must be a number, {AUTO} or {OFF}, not {text!r}.")
    return int(text)


def spelled(parameter: str) -> str:
    """A parameter as an option of the command line."""
    return f"--{parameter.replace('_', '-')}"


def is_given(parameter: str, context: typer.Context) -> bool:
    """Whether an option was given on the command line."""
    source = context.get_parameter_source(parameter)
    return source is not None and source.name == "COMMANDLINE"


def refuse(context: typer.Context, reason: str, *parameters: str) -> None:
    """Raise `SettingsError` with the reason if one of these options was given, and not off."""
    for parameter in context.command.params:
        if parameter.name in parameters and is_given(parameter.name, context):
            if context.params[parameter.name] not in (False, OFF):
                raise SettingsError(f"{parameter.opts[0]} {reason}.")


def expand_groups(command: Callable[..., None]) -> Callable[..., None]:
    """Turn the options of a command into parameters for Typer, those of its groups among them.

    `chat(*, names: Names, stop: list[str] | None = STOP)` has the parameters model, draft and stop.
    """
    groups: dict[str, Any] = {}
    parameters = []
    hints = get_type_hints(command, include_extras=True)
    for name, parameter in signature(command).parameters.items():
        if hasattr(hints[name], DECLARED):
            groups[name] = hints[name]
            types = get_type_hints(hints[name])
            declared = getattr(hints[name], DECLARED).items()
            parameters += [_parameter(field, types[field], one) for field, one in declared]
        else:
            parameters.append(_parameter(name, hints[name], parameter.default))

    @wraps(command)
    def grouped(**given: Any) -> None:
        for name, group in groups.items():
            given[name] = group(**{field.name: given.pop(field.name) for field in fields(group)})
        command(**given)

    vars(grouped)["__signature__"] = Signature(parameters)
    grouped.__annotations__ = {one.name: one.annotation for one in parameters}
    return grouped


def _parameter(name: str, kind: Any, default: Any) -> Parameter:
    if isinstance(default, Option):
        kind = Annotated[kind, default.info]
        default = Parameter.empty if default.default is ... else default.default
    return Parameter(name, Parameter.KEYWORD_ONLY, default=default, annotation=kind)
