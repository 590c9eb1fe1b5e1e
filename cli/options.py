"""Options that several commands share. Related ones are a group, see `expand_groups`."""

from __future__ import annotations

import secrets
from collections.abc import Callable, Mapping
from dataclasses import MISSING, Field, dataclass, field, fields, is_dataclass
from functools import wraps
from inspect import Parameter, Signature, signature
from pathlib import Path
from typing import Annotated, Any, get_type_hints

import typer

from dflash_mlx.loading.hub import Hub
from dflash_mlx.loading.quantization import Quantization
from dflash_mlx.loading.registry import EMBEDDED, LOOKUP, MTP, NONE, PACKAGED, pairs
from dflash_mlx.settings import SEED_BITS, SETTINGS, RequestSettings, Setting

from .output import note

KEPT_BITS = 16  # of --draft-bits: as they are
MODEL, DECODING, OUTPUT = "Model", "Decoding", "Output"  # the panels that --help shows
AUTO = "auto"  # of --tree-budget
MAX_TOKENS = 4096  # of an answer, in every command that answers
HOT = 2  # the highest temperature that the APIs of others allow
STEPS = ("block_size", "tree_budget", "kv_bits")  # settings of a whole conversation
# Real models to name instead of the embedded one, in 4 bits: 2.3 GB and 17 GB.
SMALL, CODER = (f"mlx-community/Qwen3-{name}-4bit" for name in ("4B", "Coder-30B-A3B-Instruct"))


def spelled(parameter: str) -> str:
    """A parameter as an option of the command line."""
    return f"--{parameter.replace('_', '-')}"


ALIASES = {spelled(alias): spelled(name) for name, one in SETTINGS.items() for alias in one.aliases}
ALIASES |= {"--draft-model": "--draft", "--no-thinking": "--no-think"}


def option(default: Any, panel: str, metavar: str, help: str, *names: str, **limits: Any) -> Any:
    """An option with a value, ... if required; without names it is called like the parameter."""
    info = typer.Option(*names, metavar=metavar, help=help, rich_help_panel=panel, **limits)
    return _declared(default, info)


def flag(name: str, panel: str, help: str) -> Any:
    """A switch."""
    return option(False, panel, "", help, name)


def argument(default: Any, help: str, **settings: Any) -> Any:
    """A word without a name."""
    return _declared(default, typer.Argument(help=help, **settings))


def setting(
    name: str,
    default: Any = None,
    help: str = "",
    panel: str = DECODING,
    table: Mapping[str, Setting] = SETTINGS,
) -> Any:
    """The option of a setting, which its description checks."""
    one = table[name]
    shown = one.options[0] if one.options else spelled(name)
    info = typer.Option(
        *one.options,
        metavar=one.metavar,
        help=help or one.help,
        rich_help_panel=panel,
        show_default=not name.endswith("penalty"),
        callback=lambda value: one.parse(shown, value),
    )
    kinds: dict[type, Any] = {bool: bool | None, object: list[str] | None}
    kind = kinds.get(one.kind, str | None)  # `parse` reads numbers
    return _declared(one.default if default is None else default, info, kind)


def settings(*names: str, of: Any = RequestSettings, panel: str = DECODING, **defaults: Any) -> Any:
    """The options of a dataclass's settings, all if none is named, for a command as a dict."""
    table = {one.name: one.metadata["setting"] for one in fields(of)}
    chosen = names or [name for name, one in table.items() if one.metavar or one.options]
    return {one: setting(one, defaults.get(one), panel=panel, table=table) for one in chosen}


def _declared(default: Any, info: Any, kind: Any = None) -> Any:
    """A field of a group of options, or the default of a command's parameter."""
    metadata = {"info": info, "kind": kind}
    return field(default=MISSING if default is ... else default, metadata=metadata)


def named(path: str) -> Path:
    """The path of an option. An empty one, as of an unset variable, would be the current folder."""
    if not path:
        raise typer.BadParameter("the name is empty")
    return Path(path)


def targets_beginning(incomplete: str) -> list[str]:
    """The known models that a shell may complete a name to."""
    names = [*PACKAGED]
    for pair in pairs():
        names += [pair.download, *pair.targets]
    return [name for name in dict.fromkeys(names) if name.startswith(incomplete)]


def drafters_beginning(incomplete: str) -> list[str]:
    """The known drafters that a shell may complete a name to."""
    known = (one.drafter for pair in pairs() for one in pair.drafters if one.refused is None)
    names = (LOOKUP, NONE, MTP, f"{EMBEDDED}-dflash2", *known)
    return [name for name in names if name.startswith(incomplete)]


def model(default: Any, help: str) -> Any:
    """--model."""
    names = ("--model", "-m")
    return option(default, MODEL, "NAME", help, *names, autocompletion=targets_beginning)


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
ADAPTER = option(None, MODEL, "PATH", "LoRA of mlx_lm.lora or PEFT: folder or name.")
TARGET_BITS = option(None, MODEL, "4|8", "Quantize the model's weights on load.")
OFFLINE = flag("--offline", MODEL, "Use only what is already downloaded.")
STOCK_BLAS = flag("--stock-blas", MODEL, "On Linux, keep MLX's own slow BLAS.")
SYSTEM = option(None, DECODING, "TEXT", "A system message.")
VERBOSE = flag("--verbose", OUTPUT, "Explain the draft lengths; show the seed.")
JSON = flag("--json", OUTPUT, "Print one JSON object and nothing else.")


@dataclass(frozen=True)
class Names:
    """The model, its drafter and its adapter."""

    model: str = MODEL_NAME
    draft: str | None = DRAFT
    adapter: str | None = ADAPTER


@dataclass(frozen=True)
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
    kernels: str = option(
        AUTO, MODEL, "auto|off|exact", "Metal kernels; exact: bit-identical to plain decoding."
    )
    offline: bool = OFFLINE
    stock_blas: bool = STOCK_BLAS

    def __post_init__(self) -> None:
        kept = self.draft_bits == KEPT_BITS
        for bits in (self.target_bits, None if kept else self.draft_bits):
            Quantization.of(bits, self.quant_mode, self.group_size)

    @property
    def settings(self) -> dict[str, Any]:
        """Of `dflash_mlx.load`, without the bits of the two models."""
        quantization = {"mode": self.quant_mode, "group_size": self.group_size}
        return {**quantization, "hub": Hub(offline=self.offline), "kernels": self.kernels}


@dataclass(frozen=True)
class Drafting:
    """What drafts, and how much."""

    no_draft: bool = flag("--no-draft", MODEL, "Decode without a drafter.")
    no_policy: bool = flag(
        "--no-policy", DECODING, "Draft whole blocks, even where that is slower."
    )


def with_seed(settings: Mapping[str, Any]) -> dict[str, Any]:
    """The settings with a seed if one is needed, so that a second run can use the same."""
    if settings["temperature"] > 0 and settings["seed"] is None:
        return {**settings, "seed": secrets.randbits(SEED_BITS)}
    return dict(settings)


def note_without_effect(settings: Mapping[str, Any], shown: Callable[[str], str] = spelled) -> None:
    """Say which settings change nothing at temperature 0, and that a high one makes noise."""
    samples = [name for name, value in settings.items() if SETTINGS[name].samples]
    useless = [name for name in samples if settings[name] != SETTINGS[name].default]
    if useless and not settings["temperature"]:
        note(f"{', '.join(map(shown, useless))} has no effect at temperature 0.")
    if settings["temperature"] > HOT:
        note(f"At temperature {settings['temperature']:g} any token may come: 0.2 to 1 is usual.")


def given(context: typer.Context) -> set[str]:
    """The parameters that were given on the command line."""
    sources = {name: context.get_parameter_source(name) for name in context.params}
    return {name for name, source in sources.items() if source and source.name == "COMMANDLINE"}


def typed(context: typer.Context) -> list[str]:
    """The options that were given, for another command that has them, too."""
    chosen = [one for one in context.command.params if one.name in given(context)]
    values = [(one.opts[0], context.params[str(one.name)]) for one in chosen]
    return [name if value is True else f"{name}={value}" for name, value in values]


def expand_groups(command: Callable[..., None]) -> Callable[..., None]:
    """Turn the options of a command into parameters for Typer, those of its groups among them.

    A group is a dataclass, `chat(*, names: Names)`, or the dict of `settings`.
    """
    groups: dict[str, tuple[Any, list[str]]] = {}
    parameters = []
    hints = get_type_hints(command, include_extras=True)
    for name, parameter in signature(command).parameters.items():
        made, default = hints[name], parameter.default
        if is_dataclass(made):
            types = get_type_hints(made)
            groups[name] = made, [one.name for one in fields(made)]
            parameters += [_parameter(one.name, one, types[one.name]) for one in fields(made)]
        elif isinstance(default, dict):
            groups[name] = dict, list(default)
            parameters += [_parameter(one, declared) for one, declared in default.items()]
        else:
            parameters.append(_parameter(name, default, made))

    @wraps(command)
    def grouped(**given: Any) -> None:
        for name, (make, names) in groups.items():
            given[name] = make(**{one: given.pop(one) for one in names})
        command(**given)

    vars(grouped)["__signature__"] = Signature(parameters)
    grouped.__annotations__ = {one.name: one.annotation for one in parameters}
    return grouped


def _parameter(name: str, default: Any, kind: Any = str | None) -> Parameter:
    if isinstance(default, Field):
        kind = Annotated[default.metadata["kind"] or kind, default.metadata["info"]]
        default = Parameter.empty if default.default is MISSING else default.default
    return Parameter(name, Parameter.KEYWORD_ONLY, default=default, annotation=kind)
