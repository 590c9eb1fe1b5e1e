"""Constraints on the next token, such as grammars, applied to all rows of a step at once.

A logits processor gets one row at a time and reads its history on the host, which waits for the
device: a grammar would wait for every drafted and every verified token. A constraint gets token ids
on the host, for many rows. So a step waits once for its drafts, and once more per draft that breaks
a constraint. While it is applied to the target's rows, the device computes their logits.
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
        """How many of these tokens, in order, may follow the answer."""

    def allowed(self, answer: Sequence[int]) -> np.ndarray | None:
        """Which tokens may follow, [V] of bool; None if all may, or the text has ended."""


class ConstraintSet:
    """The constraints of one request, all of which hold, and its answer so far.

    Args:
        constraints: any number of them.
    """

    def __init__(self, constraints: Sequence[TokenConstraint]) -> None:
        self._constraints, self._answer = list(constraints), list[int]()

    def commit(self, tokens: Sequence[int]) -> None:
        """Add tokens to the answer."""
        self._answer += tokens

    def masks(self, tokens: mx.array, paths: Sequence[Sequence[int]]) -> list[np.ndarray | None]:
        """For each row, which tokens may follow, [V] of bool; None if all may.

        Args:
            tokens: of all rows, [N].
            paths: for each row, the rows from below the anchor to itself.
        """
        ids: Any = tokens.tolist()
        return [self._allowed([*self._answer, *(ids[row] for row in path)]) for path in paths]

    def restrict_row(self, logits: mx.array, drafted: Sequence[int]) -> mx.array:
        """Logits [1, V] after these drafts, with -inf for tokens that may not follow."""
        return masked(logits, [self._allowed([*self._answer, *drafted])])

    def drafts(
        self,
        logits: mx.array,
        noise: mx.array | None,
        scores_of: Callable[[mx.array], mx.array],
        before: Sequence[int] = (),
    ) -> mx.array:
        """The drafter's scores [L, V], restricted where its own choice breaks a constraint.

        Args:
            logits: of the drafter, [L, V].
            noise: [L, V], added to the scores to choose drafts; None for greedy drafts.
            scores_of: turns logits into scores; see `sampling.token_scores`.
            before: tokens that were drafted before these.
        """

        def best(scores: mx.array, first: int) -> list[int]:
            if noise is not None:
                scores = scores + noise[first : first + len(scores)]
            chosen: Any = scores.argmax(axis=-1).tolist()
            return chosen

        scores = scores_of(logits)
        wanted, answer, slot = best(scores, 0), [*self._answer, *before], 0
        rows = []
        while slot < len(logits):
            right = min(one.follows(answer, wanted[slot:]) for one in self._constraints)
            rows.append(scores[slot : slot + right])
            answer += wanted[slot : slot + right]
            slot += right
            mask = self._allowed(answer) if slot < len(logits) else None
            if mask is None:  # all slots are done, or the text ends here
                rows.append(scores[slot:])
                break
            row = scores_of(masked(logits[slot : slot + 1], [mask]))
            rows.append(row)
            only = np.flatnonzero(mask) if np.count_nonzero(mask) == 1 else None
            answer += best(row, slot) if only is None else only.tolist()
            slot += 1
        return mx.concatenate(rows)

    def _allowed(self, answer: Sequence[int]) -> np.ndarray | None:
        """The tokens that all constraints allow; None if all tokens are."""
        masks = [mask for one in self._constraints if (mask := one.allowed(answer)) is not None]
        return np.logical_and.reduce(masks) if masks else None


def masked(logits: mx.array, masks: Sequence[np.ndarray | None]) -> mx.array:
    """Logits [N, V] with -inf where a row's mask [V] is False."""
    if all(mask is None for mask in masks):
        return logits
    everything = np.ones(logits.shape[-1], bool)
    rows = np.stack([everything if mask is None else mask for mask in masks])
    return mx.where(mx.array(rows), logits, -mx.inf)
