"""Typed look-ups in a drafter's config.json, in every place where a field may stand.

The reader remembers what it looked up. At the end, every other key has to be known as harmless;
else it is an error that names the key.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Final

from ..errors import ConfigError
from ..validation import MAX_INT32, brief, is_integer, is_positive
from .packagings import COPIED, HARMLESS, NEUTRAL, PLACES, SPELLINGS, Packaging

LARGEST, SMALLEST = 1e30, 1e-30  # of a number that a network computes with, also in f32
REQUIRED: Final = object()


@dataclass(frozen=True)
class ResolvedField:
    """A field of a config, its value, and where the value was read or derived."""

    field: str
    value: Any
    source: str


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
        self.raw, self.where, self.packaging = raw, where, packaging
        self.sources: dict[str, str] = {}
        self._asked = set(PLACES)
        self._places: list[tuple[str, Mapping[str, Any]]] = []
        for place in PLACES:
            values = raw.get(place) if place else raw
            if values is not None and not isinstance(values, Mapping):
                raise self.error(place, f"must be an object, not {brief(values)}")
            self._places.append((f"{place}." if place else "", values or {}))

    def error(self, place: str, problem: str) -> ConfigError:
        """An error about a field; `place` is its name or, if it was read, its place."""
        return ConfigError(f"{self.where}: {place} {problem}.")

    def found(self, *names: str) -> list[tuple[str, Any]]:
        """Every value under these names that is not null, with its place, the winner first."""
        self._asked.update(names)
        return [
            (prefix + name, values[name])
            for prefix, values in self._places
            for name in names
            if values.get(name) is not None
        ]

    def get(self, name: str) -> Any:
        """The value of a field, or its default in this packaging; None if there is neither.

        Raises `ConfigError` if a field with several spellings contradicts itself.
        """
        values = self.found(*SPELLINGS.get(name, (name,)))
        if not values:
            default = self.packaging.defaults.get(name)
            source = "default" if default is None else f"default of {self.packaging.name}"
            self.sources.setdefault(name, source)
            return default
        (place, value), *others = values
        for other, its in others if name in SPELLINGS else ():
            if its != value or type(its) is not type(value):
                raise self.error(other, f"contradicts {place}: {brief(its)} and {brief(value)}")
        self.sources[name] = place
        return value

    def place(self, name: str) -> str:
        """Where a field was read; its name if it was not."""
        source = self.sources.get(name, "default")
        return name if source.startswith("default") else source

    def integer(
        self,
        name: str,
        default: Any = REQUIRED,
        least: int = 1,
        most: int = MAX_INT32,
        divides: int | None = None,
    ) -> Any:
        """A whole number from `least` to `most` that divides `divides`, or the default.

        Raises `ConfigError`, naming the field.
        """
        value = self.get(name)
        value = default if value is None else value
        if value is REQUIRED:
            raise self.error(name, "is missing")
        if value is None:
            return None
        if not is_integer(value, least, most):
            problem = f"must be a whole number from {least} to {most}, not {brief(value)}"
            raise self.error(self.place(name), problem)
        if divides is not None and divides % value:
            raise self.error(self.place(name), f"must divide {divides}, {value} does not")
        return int(value)

    def number(self, name: str, default: Any = None) -> Any:
        """A positive number that f32 holds, or the default."""
        value = self.get(name)
        return default if value is None else self.check_positive(self.place(name), value)

    def boolean(self, name: str, default: Any = None) -> Any:
        """A truth value, or the default."""
        value = self.get(name)
        return default if value is None else self.check_boolean(self.place(name), value)

    def mapping(self, name: str) -> Mapping[str, Any]:
        """An object, empty if absent."""
        value = self.get(name)
        if value is not None and not isinstance(value, Mapping):
            raise self.error(self.place(name), f"must be an object, not {brief(value)}")
        return value or {}

    def check_positive(self, place: str, value: Any) -> float:
        """A value as a positive number that f32 holds. Raises `ConfigError`."""
        if not is_positive(value) or not SMALLEST <= value <= LARGEST:
            raise self.error(place, f"must be a positive number, not {brief(value)}")
        return float(value)

    def check_boolean(self, place: str, value: Any) -> bool:
        """A value as a truth value. Raises `ConfigError`."""
        if not isinstance(value, bool):
            raise self.error(place, f"must be true or false, not {brief(value)}")
        return value

    def unused(self) -> list[ResolvedField]:
        """The keys that were not looked up.

        Raises `ConfigError` for one that may change the network.
        """
        unused, harmless = [], HARMLESS | (COPIED if self.packaging.copied else frozenset())
        for prefix, values in self._places:
            for name, value in values.items():
                if name in self._asked:
                    continue
                if value is not None and name not in harmless:
                    self._check_neutral(prefix + name, name, value)
                unused.append(ResolvedField(prefix + name, value, "not used"))
        return unused

    def _check_neutral(self, place: str, name: str, value: Any) -> None:
        if name not in NEUTRAL:
            raise self.error(place, "is not understood by this version")
        # In some files a 0 or an empty text stands for "none".
        if value != NEUTRAL[name] and (value or NEUTRAL[name] not in (0, False)):
            problem = f"must be {NEUTRAL[name]!r}, not {brief(value)}: that is another network"
            raise self.error(place, problem)
