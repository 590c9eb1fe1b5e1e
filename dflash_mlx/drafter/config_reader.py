"""Checked look-ups in a drafter's config.json, in every place where a field may stand.

The reader remembers which keys it looked up. At the end, any other key is an error if it is known
to mean another network. Otherwise a warning names it.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Mapping
from typing import Any, Final, NamedTuple

from ..errors import ConfigError
from ..validation import MAX_INT32, brief, is_integer, is_positive
from .networks import IGNORED_KEYS, PLACES, REQUIRED_VALUES, SPELLINGS, TARGET_KEYS, Packaging

# A warning names at most this many unknown keys.
MAX_NAMED_KEYS = 12
# As a default, it says that the field must be there.
REQUIRED: Final = object()


class FieldCheck(NamedTuple):
    """What a value must be: a test, and words for the error message."""

    holds: Callable[[Any], bool]
    words: str


def whole(most: int = MAX_INT32, least: int = 1) -> FieldCheck:
    """Check for a whole number from `least` to `most`."""
    words = f"a whole number from {least} to {most}"
    return FieldCheck(lambda value: is_integer(value, least, most), words)


def one_of(*values: Any) -> FieldCheck:
    """Check for one of these values."""
    return FieldCheck(lambda value: value in values, f"one of {', '.join(map(str, values))}")


ANY = FieldCheck(lambda value: True, "anything")
BOOLEAN = FieldCheck(lambda value: isinstance(value, bool), "true or false")
OBJECT = FieldCheck(lambda value: isinstance(value, Mapping), "an object")
# Larger and smaller numbers do not fit f32 and int64.
POSITIVE = FieldCheck(
    lambda value: is_positive(value) and 1e-15 < value < 1e15, "a positive number"
)


class ConfigReader:
    """Reads the fields of one config.

    Args:
        raw: the parsed JSON object.
        where: starts the error messages.
        packaging: says what absent fields mean.

    Attributes:
        sources: the place that each field was read from.
    """

    def __init__(self, raw: Mapping[str, Any], where: str, packaging: Packaging) -> None:
        self.where = where
        self.packaging = packaging
        self.sources: dict[str, str] = {}
        self._unknown: list[str] = []  # places of values that nobody knows
        self._asked = set(PLACES)
        self._places: list[tuple[str, Mapping[str, Any]]] = []
        for place in PLACES:
            values = self.check(place, raw.get(place) or {}, OBJECT) if place else raw
            self._places.append((f"{place}." if place else "", values))

    def error(self, place: str, problem: str) -> ConfigError:
        """Make an error about a field. `place` is where it was read, or its name."""
        return ConfigError(f"{self.where}: {place} {problem}.")

    def check(self, place: str, value: Any, check: FieldCheck) -> Any:
        """Return the value. Raises `ConfigError` unless the check holds."""
        if not check.holds(value):
            raise self.error(place, f"must be {check.words}, not {brief(value)}")
        return value

    def found(self, *names: str) -> list[tuple[str, Any]]:
        """Return all values under these names that are not null, with their places.

        The first one is the value that counts.
        """
        self._asked.update(names)
        return [
            (prefix + name, values[name])
            for prefix, values in self._places
            for name in names
            if values.get(name) is not None
        ]

    def get(self, name: str, check: FieldCheck = ANY, default: Any = None) -> Any:
        """Return the value of a field, or its default in this packaging, or `default`.

        Raises `ConfigError`, naming the field, if it is missing, fails its check or has several
        spellings that differ.
        """
        values = self.found(*SPELLINGS.get(name, (name,)))
        if values:
            place, value = values[0]
            self.sources[name] = place
            others = values[1:] if name in SPELLINGS else []
            for other_place, other_value in others:
                if other_value != value:
                    problem = f"contradicts {place}: {brief(other_value)} and {brief(value)}"
                    raise self.error(other_place, problem)
        else:
            place = name
            value = self.packaging.defaults.get(name)
            is_our_default = value is None
            self.sources[name] = (
                "default" if is_our_default else f"default of {self.packaging.name}"
            )
        if value is None and default is REQUIRED:
            raise self.error(name, "is missing")
        return default if value is None else self.check(place, value, check)

    def place(self, name: str) -> str:
        """The place where a field was read, or its name if it was not in the file."""
        source = self.sources.get(name, "default")
        return name if source.startswith("default") else source

    def unused(self) -> dict[str, Any]:
        """Return the values that were not looked up, by their place.

        Warns of unknown keys: they cannot change the text, but drafts may be worse. Raises
        `ConfigError` for a key that means another network.
        """
        unused = {
            prefix + name: value
            for prefix, values in self._places
            for name, value in values.items()
            if name not in self._asked
        }
        for place, value in unused.items():
            name = place.rpartition(".")[2]
            allowed = REQUIRED_VALUES.get(name)
            if allowed is None or (self.packaging.embeds_target_config and name in TARGET_KEYS):
                self.ignore(place, value)
            # In some files a null, false, 0 or empty text stands for "none". That is an error only
            # where the allowed value is not such a "none" itself.
            elif value is not None and value not in allowed and (value or allowed[0]):
                words = " or ".join(map(repr, allowed))
                raise self.error(place, f"must be {words}, not {brief(value)}")
        if self._unknown:
            named = ", ".join(self._unknown[:MAX_NAMED_KEYS])
            if len(self._unknown) > MAX_NAMED_KEYS:
                named += f" and {len(self._unknown) - MAX_NAMED_KEYS} more"
            # The warning names this line, not the caller's: a file is read several times, and
            # Python shows a warning of one line once.
            warnings.warn(
                f"dflash-mlx: {self.where}: keys that are not used: {named}. The text is right in "
                "any case, but if they change the drafter's network, it drafts badly.",
                stacklevel=1,
            )
        return unused

    def ignore(self, place: str, value: Any) -> None:
        """Note an unused value for the warning, unless any config may have such a key."""
        if value is not None and not IGNORED_KEYS.fullmatch(place.rpartition(".")[2]):
            self._unknown.append(place)
