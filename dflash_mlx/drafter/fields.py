"""Typed look-ups in a drafter's config.json, in every place that a field may stand.

Nothing is passed over: what is looked up is remembered with its place, and at the end every key
that nobody asked for is either known to be harmless or an error that names it.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from ..errors import ConfigError
from ..validation import MAX_INT32, brief, is_integer, is_positive
from .packagings import (
    INSIDE_A_TARGET,
    OTHER_VALUES,
    PLACES,
    SPELLINGS,
    Packaging,
    harmless,
)

LARGEST, SMALLEST = 1e30, 1e-30  # of a number that a network computes with, in f32 too


@dataclass(frozen=True)
class Decision:
    """One resolved field of a config: what it is and where that was read or derived."""

    field: str
    value: Any
    source: str


class Fields:
    """The fields of one config.

    Args:
        raw: the parsed JSON object.
        where: starts the error messages.
        packaging: what absent fields mean.

    Attributes:
        sources: the place that each field was read from.
        overruled: by place, values that another place's wins over.
    """

    def __init__(self, raw: Mapping[str, Any], where: str, packaging: Packaging) -> None:
        self.raw, self.where, self.packaging = raw, where, packaging
        self.sources: dict[str, str] = {}
        self.overruled: dict[str, Decision] = {}
        self._asked = set(PLACES)
        self._places: list[tuple[str, Mapping[str, Any]]] = []
        for place in PLACES:
            values = raw.get(place) if place else raw
            if values is not None and not isinstance(values, Mapping):
                raise self.error(place, f"must be an object, not {brief(values)}")
            self._places.append((f"{place}." if place else "", values or {}))

    def error(self, name: str, problem: str) -> ConfigError:
        """An error about a field, named where it stands first."""
        place = next((prefix for prefix, values in self._places if name in values), "")
        return ConfigError(f"{self.where}: {place}{name} {problem}.")

    def found(self, *names: str) -> Iterator[tuple[str, Any]]:
        """Every value under these names that is not null, with its place, the winner first."""
        self._asked.update(names)
        for prefix, values in self._places:
            for name in names:
                if values.get(name) is not None:
                    yield prefix + name, values[name]

    def found_at_root(self, *names: str) -> None:
        """These were read before, at the root: they say what packaging it is."""
        self._asked.update(names)
        self.sources.update((name, name) for name in names if self.raw.get(name) is not None)

    def get(self, name: str) -> Any:
        """A field's value, or what this packaging takes it to be; None if that says nothing."""
        values = list(self.found(name))
        if not values:
            default = self.packaging.defaults.get(name)
            said = f"default of {self.packaging.name}" if default is not None else "default"
            self.sources.setdefault(name, said)
            return default
        (self.sources[name], value), *others = values
        for place, other in others:
            if other != value:
                self.overruled[place] = Decision(
                    place, other, f"not used: {self.sources[name]} wins"
                )
        return value

    def one(self, field: str) -> tuple[str, Any] | None:
        """The place and value of a field with several spellings; None where none is there.

        Raises `ConfigError` when they contradict each other.
        """
        values = list(self.found(*SPELLINGS[field]))
        for place, value in values[1:]:
            if value != values[0][1] or type(value) is not type(values[0][1]):
                raise ConfigError(
                    f"{self.where}: {place} contradicts {values[0][0]}: {brief(value)} and "
                    f"{brief(values[0][1])}."
                )
        return values[0] if values else None

    def flag(self, field: str, default: bool | None = None) -> bool | None:
        """A truth value with several spellings."""
        said = self.one(field)
        self.sources[field] = said[0] if said else "default"
        return self.truth(*said) if said else default

    def integer(
        self,
        name: str,
        default: int | None = None,
        minimum: int = 1,
        below: int | None = None,
        divides: int | None = None,
        most: int = MAX_INT32,
    ) -> int:
        """A whole number from `minimum` to `most`, below `below`, that divides `divides`.

        Raises `ConfigError`, naming the field.
        """
        value = self.get(name)
        if value is None:
            value = default
        if value is None:
            raise self.error(name, "is missing")
        if not is_integer(value, minimum):
            problem = f"must be a whole number of at least {minimum}, not {brief(value)}"
            raise self.error(name, problem)
        if value > most:
            raise self.error(name, f"must be {most} at most, not {value}")
        if below is not None and value >= below:
            raise self.error(name, f"must be below {below}, not {value}")
        if divides is not None and divides % value:
            raise self.error(name, f"must divide {divides}, {value} does not")
        return int(value)

    def optional_integer(self, name: str, **bounds: Any) -> int | None:
        """A whole number if one is given; the bounds are those of `integer`."""
        return None if self.get(name) is None else self.integer(name, **bounds)

    def number(self, name: str, default: float) -> float:
        """A positive number that f32 holds."""
        value = self.optional_number(name)
        return default if value is None else value

    def optional_number(self, name: str) -> float | None:
        """A positive number if one is given."""
        value = self.get(name)
        return None if value is None else self.positive(self.sources[name], value)

    def positive(self, place: str, value: Any) -> float:
        """A value as a positive number that f32 holds. Raises `ConfigError`, naming its place."""
        if not is_positive(value) or not SMALLEST <= value <= LARGEST:
            raise ConfigError(
                f"{self.where}: {place} must be a positive number, not {brief(value)}."
            )
        return float(value)

    def boolean(self, name: str) -> bool:
        """A truth value, false if absent."""
        value = self.get(name)
        return False if value is None else self.truth(self.sources[name], value)

    def truth(self, place: str, value: Any) -> bool:
        """A value as a truth value. Raises `ConfigError`, naming its place."""
        if not isinstance(value, bool):
            raise ConfigError(f"{self.where}: {place} must be true or false, not {brief(value)}.")
        return value

    def mapping(self, name: str) -> Mapping[str, Any]:
        """An object, empty if absent."""
        value = self.get(name)
        if value is not None and not isinstance(value, Mapping):
            raise self.error(name, f"must be an object, not {brief(value)}")
        return value or {}

    def check_all_known(self) -> list[Decision]:
        """The keys that are there and not used, with the reason.

        Raises `ConfigError` for a key that nobody asked for and that is not known to be harmless.
        """
        unused, known = list(self.overruled.values()), harmless(self.packaging)
        for prefix, values in self._places:
            for name, value in values.items():
                if name in self._asked:
                    continue
                if value is None or name in known:
                    reason = "null" if value is None else known[name]
                    unused.append(Decision(prefix + name, value, f"not used: {reason}"))
                elif name not in OTHER_VALUES:
                    raise ConfigError(f"{self.where}: {prefix}{name} {_unknown(name)}.")
                else:
                    neutral, network = OTHER_VALUES[name]
                    # A 0 or an empty text stands for "none" in some files.
                    if value != neutral and (value or neutral not in (0, False)):
                        raise ConfigError(
                            f"{self.where}: {prefix}{name} must be {neutral!r}, not "
                            f"{brief(value)}: that would be {network}, another network."
                        )
                    unused.append(Decision(prefix + name, value, "as this network has it"))
        return unused


def _unknown(name: str) -> str:
    if name.startswith(INSIDE_A_TARGET):
        return "belongs to a drafter that is part of its target, which is another network"
    return "is not understood by this version"
