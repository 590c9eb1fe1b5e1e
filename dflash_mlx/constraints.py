"""Constraints on the next token, such as grammars, applied to all rows of a step at once.

A logits processor gets one row at a time and reads its history on the host, which waits for the
device. A grammar would wait for every drafted and every verified token. A constraint gets token ids
on the host, for many rows at once. So a step waits once for its drafts, and once more for each
draft that breaks a constraint. While constraints check the target's rows, the device computes their
logits.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, Protocol, runtime_checkable

import mlx.core as mx
import numpy as np


@runtime_checkable
class TokenConstraint(Protocol):
    """Says which tokens may follow an answer. It serves one request."""

    def follows(self, answer: Sequence[int], tokens: Sequence[int]) -> int:
        """Return how many of these tokens, in order, may follow the answer."""

    def allowed(self, answer: Sequence[int]) -> np.ndarray | None:
        """Return which tokens may follow, [V] of bool.

        Returns None if all may follow, or the text has ended.
        """


class ConstraintSet:
    """The constraints of one request, and its answer so far. A token must meet all of them.

    Args:
        constraints: any number of constraints.
    """

    def __init__(self, constraints: Sequence[TokenConstraint]) -> None:
        self._constraints = list(constraints)
        self._answer: list[int] = []

    def commit(self, tokens: Sequence[int]) -> None:
        """Add tokens to the answer."""
        self._answer += tokens

    def masks(self, tokens: mx.array, paths: Sequence[Sequence[int]]) -> list[np.ndarray | None]:
        """Return which tokens may follow each row, [V] of bool; None if all may.

        Args:
            tokens: the tokens of all rows, [N].
            paths: for each row, the rows from below the anchor to the row itself.
        """
        ids: Any = tokens.tolist()
        masks = []
        for path in paths:
            drafted = [ids[row] for row in path]
            masks.append(self._allowed([*self._answer, *drafted]))
        return masks

    def restrict_row(self, logits: mx.array, drafted: Sequence[int]) -> mx.array:
        """Set the logits [1, V] of tokens that may not follow these drafts to -inf."""
        return masked(logits, [self._allowed([*self._answer, *drafted])])

    def drafts(
        self,
        logits: mx.array,
        noise: mx.array | None,
        to_scores: Callable[[mx.array], mx.array],
        before: Sequence[int] = (),
    ) -> mx.array:
        """Return the drafter's scores [L, V], restricted where its choice breaks a constraint.

        Args:
            logits: the drafter's logits, [L, V].
            noise: [L, V], added to the scores to choose drafts; None for greedy drafts.
            to_scores: turns logits into scores, like `sampling.token_scores`.
            before: tokens that were drafted before these.
        """

        def choose(scores: mx.array, slot: int) -> list[int]:
            """Choose a draft for each row of scores, the first of which belongs to `slot`."""
            if noise is not None:
                scores = scores + noise[slot : slot + len(scores)]
            tokens: Any = scores.argmax(axis=-1).tolist()
            return tokens

        scores = to_scores(logits)
        drafts = choose(scores, 0)
        answer = [*self._answer, *before]
        rows = []
        slot = 0
        while slot < len(logits):
            valid = min(
                constraint.follows(answer, drafts[slot:]) for constraint in self._constraints
            )
            rows.append(scores[slot : slot + valid])
            answer += drafts[slot : slot + valid]
            slot += valid
            mask = self._allowed(answer) if slot < len(logits) else None
            if mask is None:  # all slots are done, or the text ends here
                rows.append(scores[slot:])
                break
            row = to_scores(masked(logits[slot : slot + 1], [mask]))
            rows.append(row)
            if np.count_nonzero(mask) == 1:  # do not wait for the device to choose it
                answer += np.flatnonzero(mask).tolist()
            else:
                answer += choose(row, slot)
            slot += 1
        return mx.concatenate(rows)

    def _allowed(self, answer: Sequence[int]) -> np.ndarray | None:
        """Return the tokens that all constraints allow, [V] of bool; None if all may follow."""
        masks = [constraint.allowed(answer) for constraint in self._constraints]
        restrictions = [mask for mask in masks if mask is not None]
        return np.logical_and.reduce(restrictions) if restrictions else None


def masked(logits: mx.array, masks: Sequence[np.ndarray | None]) -> mx.array:
    """Set the logits [N, V] to -inf where a row's mask [V] is False."""
    if all(mask is None for mask in masks):
        return logits
    all_allowed = np.ones(logits.shape[-1], bool)
    rows = np.stack([all_allowed if mask is None else mask for mask in masks])
    return mx.where(mx.array(rows), logits, -mx.inf)
