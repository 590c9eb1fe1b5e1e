"""A round's choices, on their way from the device to the host: all of them in one array.

What is lazy can be read together with what other requests decide, so a round waits once for all.
"""

from __future__ import annotations

import struct
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
    """What a round brings back from the device, of N rows.

    Attributes:
        tokens: the proposal's.
        choices: the target's, after each of them.
        certainty: if asked for, the probability of the target's favourite after each of them; of a
            chain, after the last one that is kept, alone.
    """

    tokens: list[int]
    choices: list[int]
    certainty: list[float] | None


class Decision(NamedTuple):
    """A round's choices while they are still on the device.

    Attributes:
        values: [M] int32, lazy; they are for `read`, once they are on the host.
        tokens: the proposal's, where they are on the host: then they are not among the values.
        rows: N, the proposal's.
        certain: how many certainties are among them.
        slots: L of the drafts that are read along; 0 for none.
    """

    values: mx.array
    tokens: list[int] | None
    rows: int
    certain: int
    slots: int

    @classmethod
    def of(
        cls,
        tokens: Sequence[int] | mx.array,
        choices: mx.array,
        sure: mx.array | None,
        drafts: mx.array | None,
    ) -> Decision:
        """Of a proposal's tokens [N], and the choices [N] int32 after them.

        `sure` [C] f32 are the certainties; `drafts` [T, L] were not proposed, and are to be judged.
        """
        known, parts = None, [choices]
        if isinstance(tokens, mx.array):
            parts = [tokens.astype(mx.int32), choices]
        else:
            known = list(map(int, tokens))
        if sure is not None:
            parts.append(sure.view(mx.int32))  # its bits: an array has one dtype
        if drafts is not None:
            parts.append(drafts.flatten().astype(mx.int32))
        slots = 0 if drafts is None else drafts.shape[1]
        certain = 0 if sure is None else sure.shape[0]
        values = parts[0] if len(parts) == 1 else mx.concatenate(parts)
        return cls(values, known, len(tokens), certain, slots)

    @property
    def next_anchor(self) -> mx.array:
        """The choice [1] after the last row; where all rows are kept the text goes on with it."""
        end = self.rows if self.tokens is not None else 2 * self.rows
        return self.values[end - 1 : end]

    def read(self, values: list[int]) -> tuple[Choices, list[list[int]]]:
        """The choices in the values, and the drafts that were read along."""
        tokens, slots, sure = self.tokens, self.slots, None
        if tokens is None:
            tokens, values = values[: self.rows], values[self.rows :]
        choices, end = values[: self.rows], self.rows + self.certain
        if self.certain:
            bits = struct.pack(f"{self.certain}i", *values[self.rows : end])
            sure = [*struct.unpack(f"{self.certain}f", bits)]
        drafts = [values[at : at + slots] for at in range(end, len(values), slots)] if slots else []
        return Choices(tokens, choices, sure), drafts
