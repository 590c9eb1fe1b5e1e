"""A step's choices, read from the device."""

from __future__ import annotations

from typing import NamedTuple

import mlx.core as mx

from .errors import SettingsError
from .proposal import Proposal

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


def read_choices(proposal: Proposal, values: list[int]) -> Choices:
    """The choices of a step, from what `Sampler.decide` returned, read from the device."""
    tokens = proposal.tokens
    if isinstance(tokens, mx.array):
        return Choices(values[: len(proposal)], values[len(proposal) :])
    return Choices(list(tokens), values)
