"""The numbers that say how tokens are chosen, each described once.

`SamplingSettings` checks by this table; the command line's options and `/set` are made from it. It
imports nothing slow.
"""

from __future__ import annotations

import math
from numbers import Integral, Real
from typing import Any, Final, NamedTuple

from .errors import SettingsError
from .validation import brief

MAX_F32 = 3e38  # a little below the largest f32
SEED_BITS = 32


class Setting(NamedTuple):
    """A number: its default, which is always allowed, its type and range, and its help."""

    default: float | None
    kind: type[int] | type[float]
    least: float
    most: float
    range: str
    metavar: str
    help: str

    def check(self, name: str, value: Any) -> Any:
        """The value as Python's own number (it may be numpy's). Raises `SettingsError`."""
        if value is None and self.default is None:
            return None
        number = isinstance(value, Integral if self.kind is int else Real)
        if number and not isinstance(value, bool):
            if value == self.default or self.least <= value <= self.most:
                return self.kind(value)
        raise SettingsError(f"{name} must be {self.range}, not {brief(value)}.")


# Logits times or over these numbers must stay finite in f32.
_PENALTY = (-MAX_F32, MAX_F32, "from -3e38 to 3e38 (0 is off)", "P")
SAMPLING: Final = {
    "temperature": Setting(
        0.0,
        float,
        1e-20,
        1e20,
        "0 (greedy) or from 1e-20 to 1e20",
        "T",
        "0 picks the likeliest token; 1 samples.",
    ),
    "top_p": Setting(
        1.0, float, 5e-324, 1, "above 0 and at most 1", "P", "Only tokens within probability P."
    ),
    "top_k": Setting(
        0, int, 0, math.inf, "0 (off) or more", "K", "Only the K likeliest tokens; 0 for all."
    ),
    "min_p": Setting(0.0, float, 0, 1, "from 0 to 1", "P", "Only tokens over P x the top one."),
    "seed": Setting(
        None,
        int,
        0,
        2**SEED_BITS - 1,
        "from 0 to 2**32 - 1",
        "N",
        "The same seed gives the same text, drafted or not.",
    ),
    "repetition_penalty": Setting(
        1.0,
        float,
        1e-20,
        1e20,
        "from 1e-20 to 1e20 (1 is off)",
        "P",
        "Over 1 avoids the last 20 tokens.",
    ),
    "presence_penalty": Setting(0.0, float, *_PENALTY, "Over 0 avoids the last 20 tokens."),
    "frequency_penalty": Setting(0.0, float, *_PENALTY, "The same, more for frequent ones."),
}
