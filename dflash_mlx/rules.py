"""Rules about which tokens may follow a text, asked for all rows of a round at once.

A logits processor is shown one row after the other and reads its history on the host, which waits
for the device each time: a grammar would wait for every token drafted and every row verified. A
rule is asked for many rows with token ids that are on the host already. A round then waits for the
device once for its drafts, and once more for each that breaks a rule that leaves a choice. While
the target's rows are asked about, the device computes them.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, Protocol, runtime_checkable

import mlx.core as mx
import numpy as np


@runtime_checkable
class Rule(Protocol):
    """Says which tokens may follow an answer. It serves one request."""

    def follows(self, answer: Sequence[int], tokens: Sequence[int]) -> int:
        """How many of these tokens, one after the other, may follow the answer."""

    def allowed(self, answer: Sequence[int]) -> np.ndarray | None:
        """Which tokens may follow, [V] of bool; None where all may, or the text has ended."""


class Rules:
    """The rules of one request, and its answer so far.

    Args:
        rules: any number, all of which hold.
    """

    def __init__(self, rules: Sequence[Rule]) -> None:
        self._rules, self._answer = list(rules), list[int]()

    def __bool__(self) -> bool:
        """Whether there are any."""
        return bool(self._rules)

    def commit(self, tokens: Sequence[int]) -> None:
        """The answer goes on by these."""
        self._answer += tokens

    def restrict(
        self, logits: mx.array, tokens: mx.array, paths: Sequence[Sequence[int]]
    ) -> mx.array:
        """Logits [N, V] with -inf for what may not follow each row.

        Args:
            tokens: of the rows, [N].
            paths: each row's rows after the anchor.
        """
        mx.async_eval(logits)
        ids: Any = tokens.tolist()
        answers = ([*self._answer, *(ids[row] for row in path)] for path in paths)
        return _where(logits, [self._allowed(answer) for answer in answers])

    def restrict_row(self, logits: mx.array, drafted: Sequence[int]) -> mx.array:
        """Logits [1, V] after these drafts, with -inf for what may not follow."""
        return _where(logits, [self._allowed([*self._answer, *drafted])])

    def drafts(
        self,
        logits: mx.array,
        noise: mx.array | None,
        sharpness: float,
        scores_of: Callable[[mx.array], mx.array],
    ) -> mx.array:
        """The drafter's scores [L, V], restricted where its own choice breaks a rule.

        Args:
            logits: of the drafter, [L, V].
            noise, sharpness: a draft is the best of scores times `sharpness` plus noise.
            scores_of: logits; see `Sampler.scores`.
        """

        def best(scores: mx.array, first: int) -> list[int]:
            if noise is not None:
                scores = sharpness * scores + noise[first : first + len(scores)]
            chosen: Any = scores.argmax(axis=-1).tolist()
            return chosen

        scores = scores_of(logits)
        wanted, answer, slot = best(scores, 0), [*self._answer], 0
        rows = []
        while slot < len(logits):
            right = min(rule.follows(answer, wanted[slot:]) for rule in self._rules)
            rows.append(scores[slot : slot + right])
            answer += wanted[slot : slot + right]
            slot += right
            mask = self._allowed(answer) if slot < len(logits) else None
            if mask is None:  # all is drafted, or the text ends
                rows.append(scores[slot:])
                break
            row = scores_of(_where(logits[slot : slot + 1], [mask]))
            rows.append(row)
            only = np.flatnonzero(mask) if np.count_nonzero(mask) == 1 else None
            answer += best(row, slot) if only is None else only.tolist()
            slot += 1
        return mx.concatenate(rows)

    def _allowed(self, answer: Sequence[int]) -> np.ndarray | None:
        """What all rules allow."""
        masks = [rule.allowed(answer) for rule in self._rules]
        told = [mask for mask in masks if mask is not None]
        return np.logical_and.reduce(told) if told else None


def _where(logits: mx.array, masks: Sequence[np.ndarray | None]) -> mx.array:
    """Logits [N, V] with -inf where a row's mask [V] says no."""
    if all(mask is None for mask in masks):
        return logits
    everything = np.ones(logits.shape[-1], bool)
    rows = np.stack([everything if mask is None else mask for mask in masks])
    return mx.where(mx.array(rows), logits, -mx.inf)
