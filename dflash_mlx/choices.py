"""A round's choices, on their way from the device to the host: all of them in one array.

What is lazy can be read together with what other requests decide, so a round waits once for all.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import mlx.core as mx

from .errors import SettingsError

NO_CHOICE = -1  # in the place of a token, where there is no number to choose by


def chosen(token: int) -> int:
    """The token that a row which is kept has chosen. (After a wrong draft anything may come.)

    Raises `SettingsError` where processors, penalties or a bias leave no number to choose by.
    """
    if token == NO_CHOICE:
        raise SettingsError(
            "No token can be chosen: logits_processors, penalties or logit_bias leave NaN, an "
            "infinite number, or nothing but -inf in the logits."
        )
    return token


class Choices(NamedTuple):
    """What a step brings back from the device, of N rows.

    Attributes:
        tokens: the proposal's.
        choices: the target's, after each of them.
    """

    tokens: list[int]
    choices: list[int]


class Decision(NamedTuple):
    """A step's choices while they are still on the device.

    Attributes:
        values: [M] int32, lazy; they are for `read`, once they are on the host.
        tokens: the proposal's, if they are on the host: then they are not among the values.
        rows: N, the proposal's.
    """

    values: mx.array
    tokens: list[int] | None
    rows: int

    @classmethod
    def of(cls, tokens: Sequence[int] | mx.array, choices: mx.array) -> Decision:
        """Of a proposal's tokens [N], and the choices [N] int32 after them."""
        if isinstance(tokens, mx.array):
            return cls(mx.concatenate([tokens.astype(mx.int32), choices]), None, len(tokens))
        return cls(choices, list(map(int, tokens)), len(tokens))

    @property
    def next_anchor(self) -> mx.array:
        """The choice [1] after the last row; the text goes on with it if all rows are accepted."""
        return self.values[-1:]

    def read(self, values: list[int]) -> Choices:
        """The choices in the values."""
        if self.tokens is None:
            return Choices(values[: self.rows], values[self.rows :])
        return Choices(self.tokens, values)
