"""A step's choices on their way from the device to the host.

They are lazy, so that the choices of many requests can be read with one wait.
"""

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


class Decision(NamedTuple):
    """A step's choices while they are still on the device.

    Attributes:
        values: [M] int32, lazy: the input of `read`.
        tokens: the proposal's, if they are on the host; else the values contain them.
        rows: N of the proposal.
    """

    values: mx.array
    tokens: list[int] | None
    rows: int

    @classmethod
    def of(cls, tokens: Sequence[int] | mx.array, choices: mx.array) -> Decision:
        """The decision for a proposal's tokens [N] and the choices [N] int32 after them."""
        if isinstance(tokens, mx.array):
            return cls(mx.concatenate([tokens.astype(mx.int32), choices]), None, len(tokens))
        return cls(choices, list(map(int, tokens)), len(tokens))

    @property
    def next_anchor(self) -> mx.array:
        """The choice [1] after the last row: the next anchor, if all rows are accepted."""
        return self.values[-1:]

    def read(self, values: list[int]) -> Choices:
        """The choices, from `values` on the host."""
        if self.tokens is None:
            return Choices(values[: self.rows], values[self.rows :])
        return Choices(self.tokens, values)
