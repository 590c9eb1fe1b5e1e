"""A step's choices, read from the device."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import mlx.core as mx

from .errors import SettingsError

NO_CHOICE = -1  # in place of a token, if the logits leave none


def chosen(token: int) -> int:
    """The token that an accepted row has chosen.

    Raises `SettingsError` if processors, penalties or a bias left no token to choose. After a
    rejected draft that is no error, so only accepted rows are checked.
    """
    if token == NO_CHOICE:
        raise SettingsError(
            "No token can be chosen: logits_processors, penalties or logit_bias leave NaN, an "
            "infinite number, or nothing but -inf in the logits."
        )
    return token


class Choices(NamedTuple):
    """The N rows of a step, read from the device.

    Attributes:
        tokens: the proposal's.
        choices: the target's token after each row.
    """

    tokens: list[int]
    choices: list[int]


def read_choices(tokens: Sequence[int] | mx.array, values: list[int]) -> Choices:
    """A step's choices, from a proposal's tokens and what `Sampler.decide` returned, as a list."""
    if isinstance(tokens, mx.array):
        return Choices(values[: len(tokens)], values[len(tokens) :])
    return Choices(list(tokens), values)
