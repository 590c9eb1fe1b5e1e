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
Form = Callable[[Any], Any]  # a value as it is kept; None for one that is not allowed
Settings = TypeVar("Settings")

CONTEXT_SIZE = 20  # mlx-lm's
LARGEST_TREE = 1024  # rows; a verify's mask has a place for every pair of them
MAX_F32 = 3e38  # a little below the largest f32
SEED_BITS = 32
MAX_SEED = 2**SEED_BITS - 1
NONE = "none", "off"  # texts that mean None


@dataclass(frozen=True)
class Setting:
    """One setting.

    Attributes:
        default: always allowed.
        help: what it is for.
        kind: of the values: a number, bool or str; anything if `form` decides.
        least, most: of a number.
        choices: further numbers or texts that are allowed.
        form: the check of a value that is no number, text or bool.
        allowed: the values in words, where they do not follow from the above.
        metavar: of the option; without one and without `options` there is no option.
        options: names of the option, if its own is not the only one.
        aliases: what others call it: hidden options, and fields of HTTP APIs.
        samples: whether it changes nothing at temperature 0.
    """

    default: Any
    help: str
    kind: type = object
    least: float = math.inf
    most: float = -math.inf
    metavar: str = ""
    choices: tuple[Any, ...] = ()
    form: Form | None = None
    allowed: str = ""
    options: tuple[str, ...] = ()
    aliases: tuple[str, ...] = ()
    samples: bool = False

    def check(self, name: str, value: Any) -> Any:
        """The value as Python's own (it may be numpy's). Raises `SettingsError`."""
        if value is None and self.default is None:
            return None
        if self.form is not None:
            if (kept := self.form(value)) is not None:
                return kept
        elif isinstance(value, bool):
            if self.kind is bool:
                return value
        elif isinstance(value, str | Integral) and value in self.choices:
            return value if isinstance(value, str) else int(value)
        elif isinstance(value, Integral if self.kind is int else Real) and self.kind is not bool:
            number: Any = value
            if number == self.default or self.least <= number <= self.most:
                return self.kind(number)
        elif self.kind is str and isinstance(value, str) and not self.choices:
            return value
        raise SettingsError(f"{name} must be {self.values}, not {brief(value)}.")

    @property
    def values(self) -> str:
        """The allowed values in words."""
        words = [str(choice) for choice in self.choices]
        if self.least <= self.most:
            bounds = f"from {self.least:,} to {self.most:,}".replace(" to inf", " on")
            words = [f"a {'whole ' * (self.kind is int)}number {bounds}", *words]
        kinds = {bool: "True or False", str: "text"}
        listed = " or ".join(filter(None, [", ".join(words[:-1]), *words[-1:]]))
        return self.allowed or listed or kinds[self.kind]

    def parse(self, name: str, text: str) -> Any:
        """The value that a person writes. Raises `SettingsError`."""
        value: Any = None if self.default is None and text in NONE else text
        if value is not None and self.kind in (int, float, Path):
            with suppress(ValueError):  # a choice, or nothing that is allowed
                value = self.kind(text)
        return self.check(name, value)


def setting(default: Any, help: str, *described: Any, **further: Any) -> Any:
    """A field of a dataclass of settings, described by a `Setting`."""
    return field(
        default=default, metadata={"setting": Setting(default, help, *described, **further)}
    )


def check_fields(settings: Any) -> None:
    """Check the fields of a frozen dataclass of settings. Raises `SettingsError`."""
    for one in fields(settings):
        checked = one.metadata["setting"].check(one.name, getattr(settings, one.name))
        object.__setattr__(settings, one.name, checked)


def described(settings: type[Settings]) -> type[Settings]:
    """Add the descriptions of its fields to a dataclass's docstring, for `help`."""
    found = {f.name: f.metadata["setting"] for f in fields(settings)}  # type: ignore[arg-type]
    lines = [f"    {name}: {one.help} Allowed: {one.values}." for name, one in found.items()]
    settings.__doc__ = "\n".join([getdoc(settings) or "", "", "Attributes:", *lines])
    return settings


def instance_of(*kinds: type) -> Form:
    """The form of an object of these classes."""
    return lambda value: value if isinstance(value, kinds) else None


def _list_of(is_item: Callable[[Any], bool]) -> Form:
    def form(value: Any) -> Any:
        is_list = isinstance(value, Sequence) and not isinstance(value, str)
        return value if is_list and all(map(is_item, value)) else None

    return form


def _stop_strings(stop: Any) -> tuple[str, ...] | None:
    """One string or several as a tuple."""
    if not isinstance(stop, Iterable):
        return None
    strings = (stop,) if isinstance(stop, str) else tuple(stop)
    return strings if all(isinstance(text, str) and text for text in strings) else None


def _bias(bias: Any) -> dict[int, float] | None:
    """Finite numbers by token id."""
    if not isinstance(bias, Mapping) or not all(map(_is_token, bias)):
        return None
    numbers = all(isinstance(one, Real) and abs(float(one)) <= MAX_F32 for one in bias.values())
    return {int(token): float(value) for token, value in bias.items()} if numbers else None


def _is_token(value: Any) -> bool:
    return isinstance(value, Integral) and not isinstance(value, bool)


# Logits times or over these numbers must stay finite in f32.
_PENALTY = float, -MAX_F32, MAX_F32, "P"
_SIZE = int, 1, MAX_INT32


@described
@dataclass(frozen=True)
class RequestSettings:
    """The settings of a request that are the same for every target and drafter.

    Raises `SettingsError` for a value out of range or of a wrong type.
    """

    temperature: float = setting(
        0.0,
        "0 takes the likeliest; 1 samples.",
        *(float, 1e-20, 1e20, "T"),
        allowed="0 (greedy) or from 1e-20 to 1e20",
        options=("--temperature", "-t"),
        aliases=("temp",),
    )
    top_p: float = setting(
        *(1.0, "Only tokens within probability P.", float, 5e-324, 1, "P"),
        allowed="above 0 and at most 1",
        samples=True,
    )
    top_k: int = setting(
        *(0, "Only the K likeliest; 0 for all.", int, 0, math.inf, "K"), samples=True
    )
    min_p: float = setting(
        *(0.0, "Only tokens over P x the top one.", float, 0, 1, "P"), samples=True
    )
    seed: int | None = setting(
        *(None, "The same seed gives the same text.", int, 0, MAX_SEED, "N"), samples=True
    )
    logit_bias: Mapping[int, float] | None = setting(
        *(None, "Token ids, and the numbers added to their logits."),
        form=_bias,
        allowed="finite numbers by token id",
    )
    repetition_penalty: float = setting(
        *(1.0, "Over 1 avoids the last 20 tokens.", float, 1e-20, 1e20, "P"),
        aliases=("repeat_penalty",),
    )
    repetition_context_size: int = setting(CONTEXT_SIZE, "Tokens that it looks at.", *_SIZE)
    presence_penalty: float = setting(0.0, "Over 0 avoids the answer's tokens.", *_PENALTY)
    frequency_penalty: float = setting(0.0, "The same, more for frequent ones.", *_PENALTY)
    logits_processors: Sequence[LogitsProcessor] = setting(
        *((), "Further processors, called in this order after the penalties."),
        form=_list_of(callable),
        allowed="a list of functions of (tokens, logits)",
    )
    max_tokens: int = setting(
        *(256, "Stop after N tokens.", int, 0, math.inf, "N"),
        options=("--max-tokens", "-n"),
        aliases=("max_new_tokens", "num_predict", "max_completion_tokens", "max_output_tokens"),
    )
    stop: str | Sequence[str] | None = setting(
        *(None, "Stop before this text. Repeatable."),
        form=_stop_strings,
        allowed="one or more strings that are not empty",
        metavar="TEXT",
        aliases=("stop_sequences",),
    )
    stop_applies: Callable[[int, str], int] | None = setting(
        None,
        "(token, text) -> in how many of the last characters that it adds stop strings count.",
        form=lambda value: value if callable(value) else None,
        allowed="a function",
    )
    continues: bool = setting(False, "Whether a leading space of the text is kept.", bool)
    think: bool | None = setting(
        *(None, "Think before the answer, or answer at once.", bool),
        options=("--think/--no-think",),
    )
    reasoning_effort: str | None = setting(
        *(None, "Think this much: low, medium or high.", str),
        metavar="HOW",
        choices=("low", "medium", "high"),
    )
    chat_template_kwargs: Mapping[str, Any] | None = setting(
        *(None, "Further variables of the chat template."),
        form=instance_of(Mapping),
        allowed="a dict",
    )
    block_size: int | None = setting(
        *(None, "Verify N tokens per step. Default: the fastest.", int, 1, MAX_INT32, "N"),
        options=("--block-size", "-b"),
    )
    tree_budget: int | Literal["auto"] | None = setting(
        *(None, "Draft trees of N tokens, or 'auto'. Default: off.", int, 2, LARGEST_TREE, "N"),
        choices=("auto",),
    )
    kv_bits: int | None = setting(
        None,
        "Quantize the KV cache, if the model allows it.",
        *(int, math.inf, -math.inf, "4|8", (8, 4)),
    )
    salt: str = setting("", "Only requests of one salt share a prefix store's entries.", str)
    branches: Sequence[int] | None = setting(
        None,
        "Where other prompts diverge, for the prefix store. None finds it in chat messages.",
        form=_list_of(_is_token),
        allowed="positions in the prompt",
    )

    def __post_init__(self) -> None:
        check_fields(self)
        off = self.repetition_penalty == SETTINGS["repetition_penalty"].default
        if off and self.repetition_context_size != CONTEXT_SIZE:
            raise SettingsError(
                "repetition_context_size goes with a repetition_penalty: give that."
            )

    @property
    def edits_logits(self) -> bool:
        """Whether more than the model, the noise and the truncation decides a token."""
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


SETTINGS: Final[dict[str, Setting]] = {
    one.name: one.metadata["setting"] for one in fields(RequestSettings)
}
