"""Options that several commands share. Related options form a group (`expand_groups`)."""

from __future__ import annotations

import secrets
from collections.abc import Callable, Mapping
from dataclasses import MISSING, Field, dataclass, field, fields, is_dataclass
from functools import wraps
from inspect import Parameter, Signature, signature
from typing import Annotated, Any, Final, get_type_hints

import typer

from dflash_mlx.loading.hub import Hub
from dflash_mlx.loading.quantization import Quantization
from dflash_mlx.loading.registry import EMBEDDED, LOOKUP, MTP, NONE, PACKAGED, pairs
from dflash_mlx.settings import SEED_BITS, SETTINGS, RequestSettings, Setting, settings_of

from .output import note

KEPT_BITS = 16  # the value of --draft-bits that does not quantize
# The panels that --help shows.
MODEL = "Model"
DECODING = "Decoding"
OUTPUT = "Output"
AUTO: Final = "auto"  # the value of --tree-budget and --kernels that means: choose for me
MAX_TOKENS = 4096  # the default of every command that answers
HIGHEST_USUAL_TEMPERATURE = 2  # what the APIs of others allow
CONVERSATION_SETTINGS = ("block_size", "tree_budget", "kv_bits")  # fixed for a conversation
# Real models to name instead of the embedded one, in 4 bits: 2.3 GB and 17 GB.
SMALL = "mlx-community/Qwen3-4B-4bit"
CODER = "mlx-community/Qwen3-Coder-30B-A3B-Instruct-4bit"


def option_name(parameter: str) -> str:
    """Return the option of the command line that belongs to a parameter."""
    return f"--{parameter.replace('_', '-')}"


# Hidden options: other names of settings.
ALIASES = {
    option_name(alias): option_name(name)
    for name, described in SETTINGS.items()
    for alias in described.aliases
}
ALIASES |= {"--draft-model": "--draft", "--no-thinking": "--no-think"}


def option(
    default: Any,
    *names: str,
    panel: str,
    help: str,
    metavar: str = "",
    **limits: Any,
) -> Any:
    """Declare an option with a value.

    Args:
        default: the default value; ... for an option that is required.
        names: the names, if they do not follow from the parameter's.
        panel: the panel of --help that shows the option.
        help: the text of --help.
        metavar: what --help calls the value.
        limits: more arguments of `typer.Option`, such as `min`.
    """
    info = typer.Option(*names, metavar=metavar, help=help, rich_help_panel=panel, **limits)
    return _declare(default, info)


def flag(name: str, *, panel: str, help: str) -> Any:
    """Declare a switch that is off by default."""
    return option(False, name, panel=panel, help=help)


def argument(default: Any, help: str, **settings: Any) -> Any:
    """Declare an argument that has no option name."""
    return _declare(default, typer.Argument(help=help, **settings))


def setting(
    name: str,
    *,
    default: Any = None,
    help: str = "",
    panel: str = DECODING,
    table: Mapping[str, Setting] = SETTINGS,
) -> Any:
    """Declare the option of a setting, whose description checks the value."""
    described = table[name]
    shown_name = described.options[0] if described.options else option_name(name)
    info = typer.Option(
        *described.options,
        metavar=described.metavar,
        help=help or described.help,
        rich_help_panel=panel,
        show_default=not name.endswith("penalty"),
        callback=lambda value: described.parse(shown_name, value),
    )
    kinds: dict[type, Any] = {bool: bool | None, object: list[str] | None}
    kind = kinds.get(described.kind, str | None)  # `parse` reads numbers
    return _declare(described.default if default is None else default, info, kind)


def settings(*names: str, of: Any = RequestSettings, panel: str = DECODING, **defaults: Any) -> Any:
    """Declare the options of a settings dataclass. The command gets their values as a dict.

    Args:
        names: the settings; all that have options if none is named.
        of: the dataclass.
        panel: the panel of --help that shows them.
        defaults: default values that differ from the dataclass's.
    """
    table = settings_of(of)
    if not names:
        names = tuple(
            name for name, described in table.items() if described.metavar or described.options
        )
    return {
        name: setting(name, default=defaults.get(name), panel=panel, table=table) for name in names
    }


def _declare(default: Any, info: Any, kind: Any = None) -> Any:
    """Make a field of a group of options, or the default of a command's parameter."""
    metadata = {"info": info, "kind": kind}
    return field(default=MISSING if default is ... else default, metadata=metadata)


def complete_target(incomplete: str) -> list[str]:
    """Return the known models whose names begin with a text, for completion in a shell."""
    names = list(PACKAGED)
    for pair in pairs():
        names += [pair.download, *pair.targets]
    return [name for name in dict.fromkeys(names) if name.startswith(incomplete)]


def complete_drafter(incomplete: str) -> list[str]:
    """Return the known drafters whose names begin with a text, for completion in a shell."""
    names = [LOOKUP, NONE, MTP, f"{EMBEDDED}-dflash2"]
    for pair in pairs():
        names += [facts.drafter for facts in pair.drafters if facts.refused is None]
    return [name for name in names if name.startswith(incomplete)]


def model(default: Any, help: str) -> Any:
    """Declare --model."""
    return option(
        default,
        "--model",
        "-m",
        panel=MODEL,
        metavar="NAME",
        help=help,
        autocompletion=complete_target,
    )


MODEL_NAME = model(EMBEDDED, "Folder, GGUF, hub name or smollm2.")
DRAFT = option(
    None,
    "--draft",
    "-d",
    panel=MODEL,
    metavar="NAME",
    help="Drafter, smaller model, mtp (the model's head), lookup, NAME+lookup or none. "
    "Default: the known one, else mtp.",
    autocompletion=complete_drafter,
)
ADAPTER = option(
    None,
    panel=MODEL,
    metavar="PATH",
    help="LoRA adapter (mlx_lm.lora or PEFT): folder or hub name.",
)
TARGET_BITS = option(
    None,
    panel=MODEL,
    metavar="4|8",
    help="Quantize the model's weights on load.",
)
OFFLINE = flag("--offline", panel=MODEL, help="Use only what is already downloaded.")
STOCK_BLAS = flag("--stock-blas", panel=MODEL, help="On Linux, keep MLX's own slow BLAS.")
SYSTEM = option(None, panel=DECODING, metavar="TEXT", help="A system message.")
VERBOSE = flag("--verbose", panel=OUTPUT, help="Explain the draft lengths; show the seed.")
JSON = flag("--json", panel=OUTPUT, help="Print one JSON object and nothing else.")


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
        None,
        panel=MODEL,
        metavar="4|8|16",
        help="Quantize the drafter on load; 16 leaves it as it is.",
    )
    draft_window: int | None = option(
        None,
        panel=MODEL,
        metavar="N",
        help="How many tokens the drafter remembers. Default: all.",
        min=1,
    )
    quant_mode: str = option(
        "affine",
        panel=MODEL,
        metavar="MODE",
        help="How to quantize: affine, mxfp4, mxfp8 or nvfp4.",
    )
    group_size: int | None = option(
        None,
        panel=MODEL,
        metavar="N",
        help="How many weights share a scale. Default: the mode's.",
    )
    kernels: str = option(
        AUTO,
        panel=MODEL,
        metavar="auto|off|exact",
        help="Metal kernels. exact: bit-identical to plain decoding.",
    )
    offline: bool = OFFLINE
    stock_blas: bool = STOCK_BLAS

    def __post_init__(self) -> None:
        draft_bits = None if self.draft_bits == KEPT_BITS else self.draft_bits
        for bits in (self.target_bits, draft_bits):
            Quantization.of(bits, self.quant_mode, self.group_size)

    @property
    def settings(self) -> dict[str, Any]:
        """Arguments of `dflash_mlx.load`, except the bits of the two models."""
        return {
            "mode": self.quant_mode,
            "group_size": self.group_size,
            "hub": Hub(offline=self.offline),
            "kernels": self.kernels,
        }


@dataclass(frozen=True)
class Drafting:
    """Whether to draft, and how many tokens."""

    no_draft: bool = flag("--no-draft", panel=MODEL, help="Decode without a drafter.")
    no_policy: bool = flag(
        "--no-policy",
        panel=DECODING,
        help="Always draft full blocks, even if that is slower.",
    )


def with_seed(settings: Mapping[str, Any]) -> dict[str, Any]:
    """Add a seed to the settings if they need one, so that a second run can use the same."""
    if settings["temperature"] > 0 and settings["seed"] is None:
        return {**settings, "seed": secrets.randbits(SEED_BITS)}
    return dict(settings)


def note_without_effect(
    settings: Mapping[str, Any], display_name: Callable[[str], str] = option_name
) -> None:
    """Print which settings have no effect at temperature 0, and warn of a high temperature."""
    samples = [name for name in settings if SETTINGS[name].samples]
    useless = [name for name in samples if settings[name] != SETTINGS[name].default]
    temperature = settings["temperature"]
    if useless and not temperature:
        note(f"{', '.join(map(display_name, useless))} has no effect at temperature 0.")
    if temperature > HIGHEST_USUAL_TEMPERATURE:
        note(f"At temperature {temperature:g}, any token may be chosen: 0.2 to 1 is usual.")


def given(context: typer.Context) -> set[str]:
    """Return the parameters that were given on the command line."""
    sources = {name: context.get_parameter_source(name) for name in context.params}
    return {name for name, source in sources.items() if source and source.name == "COMMANDLINE"}


def given_options(context: typer.Context) -> list[str]:
    """Return the options that were given, to pass them on to another command."""
    arguments = []
    for parameter in context.command.params:
        if parameter.name in given(context):
            name = parameter.opts[0]
            value = context.params[str(parameter.name)]
            arguments.append(name if value is True else f"{name}={value}")
    return arguments


def expand_groups(command: Callable[..., None]) -> Callable[..., None]:
    """Replace the groups of options in a command's signature by their options, for Typer.

    A group is a dataclass, as in `chat(*, names: Names)`, or the dict of `settings`.
    """
    # Parameter of the command -> the class of the group, and the names of its options.
    groups: dict[str, tuple[Any, list[str]]] = {}
    parameters: list[Parameter] = []
    hints = get_type_hints(command, include_extras=True)
    for name, parameter in signature(command).parameters.items():
        kind = hints[name]
        if is_dataclass(kind):
            declarations = fields(kind)
            types = get_type_hints(kind)
            groups[name] = (kind, [declaration.name for declaration in declarations])
            for declaration in declarations:
                parameters.append(
                    _parameter(declaration.name, declaration, types[declaration.name])
                )
        elif isinstance(parameter.default, dict):
            groups[name] = (dict, list(parameter.default))
            for key, declaration in parameter.default.items():
                parameters.append(_parameter(key, declaration))
        else:
            parameters.append(_parameter(name, parameter.default, kind))

    @wraps(command)
    def call_with_groups(**arguments: Any) -> None:
        for name, (make_group, keys) in groups.items():
            arguments[name] = make_group(**{key: arguments.pop(key) for key in keys})
        command(**arguments)

    vars(call_with_groups)["__signature__"] = Signature(parameters)
    call_with_groups.__annotations__ = {
        parameter.name: parameter.annotation for parameter in parameters
    }
    return call_with_groups


def _parameter(name: str, default: Any, kind: Any = str | None) -> Parameter:
    """Make a parameter of a command for Typer."""
    if isinstance(default, Field):
        kind = Annotated[default.metadata["kind"] or kind, default.metadata["info"]]
        default = Parameter.empty if default.default is MISSING else default.default
    return Parameter(name, Parameter.KEYWORD_ONLY, default=default, annotation=kind)
