"""The settings of a request, each described once: its values, its help and its names.

The checks of `dm.GenerationSettings`, the options of the command line, `/set` of the chat and the
fields of the HTTP APIs are made from these descriptions. MLX is not imported here.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, fields
from inspect import getdoc
from numbers import Integral, Real
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final, Literal, TypeVar

from .errors import SettingsError
from .validation import MAX_INT32, brief

if TYPE_CHECKING:
    import mlx.core as mx

# (token ids [H] so far, logits [1, V]) -> logits [1, V], as in mlx-lm. It must be a pure function:
# it sees drafts that are rejected later, and may see one history twice.
LogitsProcessor = Callable[["mx.array", "mx.array"], "mx.array"]
# Converts a value to the form that is kept. Returns None for a value that is not allowed.
Converter = Callable[[Any], Any]
Settings = TypeVar("Settings")

CONTEXT_SIZE = 20  # tokens that the repetition penalty looks at by default, as in mlx-lm
LARGEST_TREE = 1024  # rows; a tree's mask has an entry for every pair of rows
MAX_F32 = 3e38  # a little below the largest f32
SEED_BITS = 32
MAX_SEED = 2**SEED_BITS - 1
NONE_WORDS = ("none", "off")  # what a person writes for None


@dataclass(frozen=True, kw_only=True)
class Setting:
    """One setting.

    Attributes:
        default: the default value, which is always allowed.
        help: what the setting is for.
        kind: the type of the values: a number, bool or str; any object if `convert` checks them.
        minimum, maximum: the range of a number. Without a minimum only `choices` are allowed.
        metavar: what the help calls the value. A setting without `metavar` and `options` has no
            option on the command line.
        choices: more numbers or texts that are allowed.
        convert: checks a value that is not a number, text or bool.
        allowed: the allowed values in words, if they do not follow from the attributes above.
        options: the names of the option, if they differ from the setting's name.
        aliases: other names: hidden options, and fields of HTTP APIs.
        samples: True if the setting changes nothing at temperature 0.
    """

    default: Any
    help: str
    kind: type = object
    minimum: float | None = None
    maximum: float = math.inf
    metavar: str = ""
    choices: tuple[Any, ...] = ()
    convert: Converter | None = None
    allowed: str = ""
    options: tuple[str, ...] = ()
    aliases: tuple[str, ...] = ()
    samples: bool = False

    def check(self, name: str, value: Any) -> Any:
        """Return the value as a type of Python, even if it was numpy's. Raises `SettingsError`."""
        if value is None and self.default is None:
            return None
        if self.convert is not None:
            converted = self.convert(value)
            if converted is not None:
                return converted
        elif isinstance(value, bool):
            if self.kind is bool:
                return value
        elif isinstance(value, str | Integral) and value in self.choices:
            return value if isinstance(value, str) else int(value)
        elif self._is_number(value):
            if value == self.default or self._in_range(value):
                return self.kind(value)
        elif self.kind is str and isinstance(value, str) and not self.choices:
            return value
        raise SettingsError(f"{name} must be {self.allowed_values}, not {brief(value)}.")

    def _is_number(self, value: Any) -> bool:
        """Whether this setting takes numbers, and the value is one of its kind."""
        if self.kind is int:
            return isinstance(value, Integral)
        return self.kind is not bool and isinstance(value, Real)

    def _in_range(self, number: Any) -> bool:
        return self.minimum is not None and self.minimum <= number <= self.maximum

    @property
    def allowed_values(self) -> str:
        """The allowed values in words."""
        if self.allowed:
            return self.allowed
        alternatives = [str(choice) for choice in self.choices]
        if self.minimum is not None:
            number = "a whole number" if self.kind is int else "a number"
            upper = "on" if self.maximum == math.inf else f"to {self.maximum:,}"
            alternatives.insert(0, f"{number} from {self.minimum:,} {upper}")
        if not alternatives:
            return "True or False" if self.kind is bool else "text"
        if len(alternatives) == 1:
            return alternatives[0]
        return f"{', '.join(alternatives[:-1])} or {alternatives[-1]}"

    def parse(self, name: str, text: str) -> Any:
        """Return the value that a person wrote as text. Raises `SettingsError`."""
        value: Any = text
        if self.default is None and text in NONE_WORDS:
            value = None
        elif text is not None and self.kind in (int, float, Path):
            with suppress(ValueError):  # text that is no number may be a choice
                value = self.kind(text)
        return self.check(name, value)


def setting(default: Any, help: str, **attributes: Any) -> Any:
    """Declare a field of a dataclass of settings. The arguments are those of `Setting`."""
    described = Setting(default=default, help=help, **attributes)
    return field(default=default, metadata={"setting": described})


def settings_of(settings: Any) -> dict[str, Setting]:
    """Map the names of a settings dataclass's fields to their descriptions."""
    return {field.name: field.metadata["setting"] for field in fields(settings)}


def check_fields(settings: Any) -> None:
    """Check the fields of a frozen dataclass of settings. Raises `SettingsError`."""
    for name, described in settings_of(settings).items():
        checked = described.check(name, getattr(settings, name))
        object.__setattr__(settings, name, checked)


def with_field_docs(settings: type[Settings]) -> type[Settings]:
    """Add the descriptions of the fields to a dataclass's docstring, for `help`."""
    lines = [
        f"    {name}: {described.help} Allowed: {described.allowed_values}."
        for name, described in settings_of(settings).items()
    ]
    settings.__doc__ = "\n".join([getdoc(settings) or "", "", "Attributes:", *lines])
    return settings


def instance_of(*kinds: type) -> Converter:
    """Make a converter that keeps instances of these classes."""
    return lambda value: value if isinstance(value, kinds) else None


def _list_of(is_item: Callable[[Any], bool]) -> Converter:
    """Make a converter that keeps lists whose items all pass a check."""

    def convert(value: Any) -> Any:
        is_list = isinstance(value, Sequence) and not isinstance(value, str)
        return value if is_list and all(map(is_item, value)) else None

    return convert


def _stop_strings(stop: Any) -> tuple[str, ...] | None:
    """Convert one string, or several, to a tuple."""
    if not isinstance(stop, Iterable):
        return None
    strings = (stop,) if isinstance(stop, str) else tuple(stop)
    return strings if all(isinstance(text, str) and text for text in strings) else None


def _bias(bias: Any) -> dict[int, float] | None:
    """Convert a mapping from token ids to finite numbers."""
    if not isinstance(bias, Mapping) or not all(map(_is_token, bias)):
        return None
    if not all(isinstance(value, Real) and abs(float(value)) <= MAX_F32 for value in bias.values()):
        return None
    return {int(token): float(value) for token, value in bias.items()}


def _is_token(value: Any) -> bool:
    return isinstance(value, Integral) and not isinstance(value, bool)


@with_field_docs
@dataclass(frozen=True)
class RequestSettings:
    """The settings of a request that are the same for every target and drafter.

    Raises `SettingsError` for a value out of range or of a wrong type.
    """

    temperature: float = setting(
        0.0,
        "Randomness; 0 is greedy.",
        kind=float,
        minimum=1e-20,
        maximum=1e20,
        metavar="T",
        allowed="0 (greedy) or from 1e-20 to 1e20",
        options=("--temperature", "-t"),
        aliases=("temp",),
    )
    top_p: float = setting(
        1.0,
        "Sample from the top tokens that add up to P.",
        kind=float,
        minimum=5e-324,
        maximum=1,
        metavar="P",
        allowed="above 0 and at most 1",
        samples=True,
    )
    top_k: int = setting(
        0,
        "Sample from the top K tokens; 0 for all.",
        kind=int,
        minimum=0,
        metavar="K",
        samples=True,
    )
    min_p: float = setting(
        0.0,
        "Drop tokens less than P times as likely as the top one.",
        kind=float,
        minimum=0,
        maximum=1,
        metavar="P",
        samples=True,
    )
    seed: int | None = setting(
        None,
        "The same seed gives the same text.",
        kind=int,
        minimum=0,
        maximum=MAX_SEED,
        metavar="N",
        samples=True,
    )
    logit_bias: Mapping[int, float] | None = setting(
        None,
        "Maps token ids to numbers that are added to their logits.",
        convert=_bias,
        allowed="finite numbers by token id",
    )
    repetition_penalty: float = setting(
        1.0,
        "Penalize tokens among the last 20; 1 is off.",
        kind=float,
        minimum=1e-20,  # logits are divided and multiplied by it, and must stay finite in f32
        maximum=1e20,
        metavar="P",
        aliases=("repeat_penalty",),
    )
    repetition_context_size: int = setting(
        CONTEXT_SIZE,
        "How many of the last tokens repetition_penalty looks at.",
        kind=int,
        minimum=1,
        maximum=MAX_INT32,
    )
    presence_penalty: float = setting(
        0.0,
        "Penalize tokens that are already in the answer.",
        kind=float,
        minimum=-MAX_F32,
        maximum=MAX_F32,
        metavar="P",
    )
    frequency_penalty: float = setting(
        0.0,
        "Penalize tokens by how often they are in the answer.",
        kind=float,
        minimum=-MAX_F32,
        maximum=MAX_F32,
        metavar="P",
    )
    logits_processors: Sequence[LogitsProcessor] = setting(
        (),
        "Logits processors, called in this order after the penalties.",
        convert=_list_of(callable),
        allowed="a list of functions of (tokens, logits)",
    )
    max_tokens: int = setting(
        256,
        "Stop after N tokens.",
        kind=int,
        minimum=0,
        metavar="N",
        options=("--max-tokens", "-n"),
        aliases=("max_new_tokens", "num_predict", "max_completion_tokens", "max_output_tokens"),
    )
    stop: str | Sequence[str] | None = setting(
        None,
        "Stop before this text. Repeatable.",
        convert=_stop_strings,
        allowed="one or more strings that are not empty",
        metavar="TEXT",
        aliases=("stop_sequences",),
    )
    stop_applies: Callable[[int, str], int] | None = setting(
        None,
        "(token, its text) -> how many of that text's last characters may match a stop string.",
        convert=lambda value: value if callable(value) else None,
        allowed="a function",
    )
    continues: bool = setting(
        False,
        "Keep the leading space of the answer, because it continues another text.",
        kind=bool,
    )
    think: bool | None = setting(
        None,
        "Think before answering, or answer directly.",
        kind=bool,
        options=("--think/--no-think",),
    )
    reasoning_effort: str | None = setting(
        None,
        "How much to think: low, medium or high.",
        kind=str,
        metavar="HOW",
        choices=("low", "medium", "high"),
    )
    chat_template_kwargs: Mapping[str, Any] | None = setting(
        None,
        "More variables for the chat template.",
        convert=instance_of(Mapping),
        allowed="a dict",
    )
    block_size: int | None = setting(
        None,
        "Verify N tokens per step. Default: the fastest.",
        kind=int,
        minimum=1,
        maximum=MAX_INT32,
        metavar="N",
        options=("--block-size", "-b"),
    )
    tree_budget: int | Literal["auto"] | None = setting(
        None,
        "Draft trees of N tokens, or 'auto'. Default: off.",
        kind=int,
        minimum=2,
        maximum=LARGEST_TREE,
        metavar="N",
        choices=("auto",),
    )
    kv_bits: int | None = setting(
        None,
        "Quantize the KV cache, if the model allows it.",
        kind=int,
        metavar="4|8",
        choices=(8, 4),
    )
    salt: str = setting(
        "",
        "Only requests with the same salt share entries of a prefix store.",
        kind=str,
    )
    branches: Sequence[int] | None = setting(
        None,
        "Where other prompts may diverge, for the prefix store. None: derived from the messages.",
        convert=_list_of(_is_token),
        allowed="positions in the prompt",
    )

    def __post_init__(self) -> None:
        check_fields(self)
        is_off = self.repetition_penalty == SETTINGS["repetition_penalty"].default
        if is_off and self.repetition_context_size != CONTEXT_SIZE:
            raise SettingsError("repetition_context_size needs a repetition_penalty: set that too.")

    @property
    def edits_logits(self) -> bool:
        """Whether a bias, a penalty or a processor changes the model's logits."""
        penalized = self.repetition_penalty != 1 or self.presence_penalty or self.frequency_penalty
        return bool(penalized or self.logit_bias or self.logits_processors)

    def check_vocabulary(self, size: int) -> None:
        """Raise `SettingsError` for a token that a vocabulary of this size does not have."""
        if self.top_k > size:
            raise SettingsError(
                f"top_k {brief(self.top_k)} is more than the vocabulary's {size} tokens."
            )
        for token in self.logit_bias or ():
            if not 0 <= token < size:
                raise SettingsError(
                    f"logit_bias: the vocabulary of {size} has no token {brief(token)}."
                )


SETTINGS: Final = settings_of(RequestSettings)
