"""What a drafted slot costs: cross entropy, KL divergence, total variation; in bounded memory.

A slot's logits are as wide as the vocabulary, and there are thousands of slots in a step. So slots
are taken some at a time, and the gradient of each part is found together with its value (as fused
cross-entropy kernels do): of the logits nothing is left when the next part begins.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import mlx.core as mx
from mlx.utils import tree_flatten, tree_unflatten

from ..errors import SettingsError

# (trained parameters, hidden states [C, D], *more arrays of C rows) -> (their summed loss, chosen)
Part = Callable[..., tuple[mx.array, mx.array]]


@dataclass(frozen=True)
class Mix:
    """How much of each loss there is in a slot's.

    Attributes:
        cross_entropy: -log q of the target's choice.
        kl: the divergence of the draft's q from the target's p, over p's likeliest tokens.
        total_variation: 1 - sum min(p, q), which is how often sampling would reject the draft
            (arXiv 2211.17192, section 3.1); over the same tokens.
    """

    cross_entropy: float = 1.0
    kl: float = 0.0
    total_variation: float = 0.0

    def __post_init__(self) -> None:
        parts = (self.cross_entropy, self.kl, self.total_variation)
        if min(parts) < 0 or not sum(parts) < float("inf") or not sum(parts):
            raise SettingsError("The parts of a loss are numbers from 0 on, one of them above 0.")

    @property
    def reads_shares(self) -> bool:
        """Whether the target's probabilities matter, not its choices alone."""
        return self.kl > 0 or self.total_variation > 0

    def of(self, logits: mx.array, labels: mx.array, tops: mx.array, shares: mx.array) -> mx.array:
        """The loss of each slot [C], from its logits [C, V].

        Args:
            labels: the target's choices [C].
            tops, shares: its likeliest tokens and their probabilities [C, T]; 0 is no opinion.
        """
        found: Any = _log_total(logits)
        total = found[0]
        loss = mx.zeros(labels.shape)
        if self.cross_entropy:
            chosen = mx.take_along_axis(logits, labels[:, None], axis=-1)
            loss = loss + self.cross_entropy * (total - chosen)[:, 0]
        if self.reads_shares:
            log_q = mx.take_along_axis(logits, tops, axis=-1) - total
            # Of p only this much is known, so it is the whole of it here.
            p = shares / mx.maximum(shares.sum(axis=-1, keepdims=True), 1e-9)
            if self.kl:
                log_p = mx.log(mx.maximum(p, 1e-9))
                loss = loss + self.kl * (p * (log_p - log_q)).sum(axis=-1)
            if self.total_variation:
                common = mx.minimum(p, mx.exp(log_q)).sum(axis=-1)
                loss = loss + self.total_variation * (1 - common)
        return loss


@mx.custom_function
def _log_total(logits: mx.array) -> tuple[mx.array, mx.array]:
    """The log-sum-exp [..., 1] of logits [..., V], and their softmax, which is its gradient.

    Exponentials are what a loss costs on a CPU (13 ns each, a sum 0.4), and the gradient of MLX's
    own log-sum-exp takes them once more.
    """
    q = mx.softmax(logits, axis=-1)
    # Of the largest logit, log q is its distance from the log-sum-exp.
    top = logits.max(axis=-1, keepdims=True)
    return top - mx.log(q.max(axis=-1, keepdims=True)), q


@_log_total.vjp
def _log_total_back(logits: mx.array, cotangents: Any, outputs: Any) -> mx.array:
    """The gradient of the first output alone: nothing is made of the second."""
    return cotangents[0] * outputs[1]


def summed(
    part: Part, trained: Any, hidden: mx.array, others: Sequence[mx.array], rows: int
) -> tuple[mx.array, mx.array]:
    """The sum of `part` over all slots, `rows` at a time, and what it chose for each.

    The gradient reaches `trained`, a tree of arrays, and `hidden`; `others` have none.

    Args:
        hidden: [M, D].
        others: arrays of M rows each.
        rows: slots that exist at once.
    """
    names = [name for name, _ in tree_flatten(trained)]
    count, length = len(names), hidden.shape[0]
    gradient = mx.value_and_grad(part, argnums=(0, 1))

    @mx.custom_function
    def run(*arrays: mx.array) -> tuple[mx.array, ...]:
        """The sum [], what was chosen, and the gradients of `hidden` and of `trained`."""
        tree = tree_unflatten(list(zip(names, arrays[:count], strict=True))) if count else {}
        value, chosen = mx.array(0.0), []
        inward: list[mx.array] = []
        outward = [mx.zeros_like(array) for array in arrays[:count]]
        for start in range(0, length, rows):
            piece = [array[start : start + rows] for array in arrays[count:]]
            # Nothing of a part is computed before the last one is done: all at once, as MLX would
            # otherwise see fit, they would hold the logits of every slot.
            if inward:
                piece = mx.depends(piece, [value, inward[-1]])
            (loss, picks), (own, toward) = gradient(tree, *piece)
            value = value + loss
            chosen.append(picks)
            inward.append(toward)
            outward = [a + b for a, (_, b) in zip(outward, tree_flatten(own), strict=True)]
        return (value, mx.concatenate(chosen), mx.concatenate(inward), *outward)

    @run.vjp
    def back(arrays: Any, cotangents: Any, outputs: Any) -> list[mx.array]:
        scale, (inward, *outward) = cotangents[0], outputs[2:]
        rest = [mx.zeros_like(array) for array in arrays[count + 1 :]]
        return [*(scale * array for array in outward), scale * inward, *rest]

    flat = [array for _, array in tree_flatten(trained)]
    found: Any = run(*flat, hidden, *others)
    value, chosen = found[:2]
    return value, mx.stop_gradient(chosen)
