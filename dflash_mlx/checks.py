"""What is handed to the library, judged before anything is done with it."""

from __future__ import annotations

from typing import Any

from .drafter.protocol import Drafter
from .errors import SettingsError
from .reading import MOST_WHOLE, is_whole, shown


def whole(name: str, value: Any, least: int = 1, most: int = MOST_WHOLE) -> int:
    """A setting that is a whole number, numpy's too, as Python's. Raises `SettingsError`."""
    if not is_whole(value, least, most):
        range_ = f"from {least:,} to {most:,}"
        raise SettingsError(f"{name} must be a whole number {range_}, not {shown(value)}.")
    return int(value)


def check_kind(name: str, value: Any, kind: Any, how: str) -> None:
    """Raise `SettingsError` unless a value is None, or a `kind`, as what `how` makes is.

    The class itself is none: it has what is asked for, but nothing can be done with it.
    """
    if value is not None and (isinstance(value, type) or not isinstance(value, kind)):
        raise SettingsError(f"{name} must be None or such as {how}, not {shown(value)}.")


def check_pair(target: Any, drafter: Any) -> None:
    """Raise `SettingsError` for what is no target, or no drafter; that may be None."""
    if not hasattr(target, "tokenizer") or isinstance(target, type):
        raise SettingsError(f"target must be such as dm.load_target(...), not {shown(target)}.")
    check_kind("drafter", drafter, Drafter, "dm.load_drafter(...)")
