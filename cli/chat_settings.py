"""What `/set` of a chat changes: how the next answers' tokens are chosen, and how many."""

from __future__ import annotations

import secrets
from typing import Any

from dflash_mlx.errors import SettingsError

SAMPLING = {"temperature": float, "top_p": float, "top_k": int, "min_p": float, "seed": int}
NONE = "none"  # what removes a seed, or a system message
NAMES: dict[str, type[int] | type[float]] = {**SAMPLING, "max_tokens": int}


def change(settings: dict[str, Any], name: str, text: str, vocabulary: int | None = None) -> None:
    """Change one of the settings of `stream_generate`; a temperature brings a seed if need be.

    Raises `SettingsError` for another name or a value that is none, and changes nothing.
    """
    if name not in NAMES:
        raise SettingsError(f"There is no setting {name!r}: /set knows {', '.join(NAMES)}.")
    kind = NAMES[name]
    try:
        value = None if (name, text) == ("seed", NONE) else kind(text)
    except ValueError as error:
        number = "a whole number" if kind is int else "a number"
        raise SettingsError(f"{name} is {number}, not {text!r}.") from error
    if name == "max_tokens" and value is not None and value < 0:
        raise SettingsError(f"max_tokens must be 0 or more, not {text}.")
    changed = settings | {name: value}
    if changed["temperature"] > 0 and changed["seed"] is None:
        changed["seed"] = secrets.randbits(32)
    check(changed, vocabulary)
    settings |= changed


def check(settings: dict[str, Any], vocabulary: int | None) -> None:
    """Raise `SettingsError` for what makes no sense, or not with so many tokens, if known."""
    from dflash_mlx.settings import SamplingSettings

    sampling = SamplingSettings(**{key: settings[key] for key in SAMPLING})
    if vocabulary is not None:
        sampling.check_vocabulary(vocabulary)


def idle(settings: dict[str, Any], name: str) -> bool:
    """Whether a setting changes nothing, for the likeliest token is picked."""
    return not settings["temperature"] and name in SAMPLING and name != "temperature"


def shown(settings: dict[str, Any]) -> list[str]:
    """The settings that can be changed, one a line."""
    return [f"{name:12} {NONE if (v := settings[name]) is None else v}" for name in NAMES]
