"""The loss of drafted slots: cross entropy and KL divergence, in bounded memory.

The logits of all slots of a step would fill the memory. So slots are processed in parts, and the
gradient of each part is computed together with its value, like in fused cross-entropy kernels.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import mlx.core as mx
from mlx.utils import tree_flatten, tree_unflatten

from ..drafter.dflash import DFlash
from ..drafter.dflash2 import CandidateSelector, DFlash2
from ..drafter.dspark import DSpark, MarkovHead
from ..targets import Target
from .features import BOUND

# (trained parameters, hidden states [C, D], *more arrays of C rows) -> (summed loss, drafts [C])
Part = Callable[..., tuple[mx.array, mx.array]]


@dataclass(frozen=True)
class LossWeights:
    """Weights of the two losses of a slot.

    Attributes:
        cross_entropy: -log q of the target's choice.
        kl: the divergence of the draft's q from the target's p, over p's likeliest tokens.
    """

    cross_entropy: float = 1.0
    kl: float = 0.0

    def of(self, logits: mx.array, labels: mx.array, tops: mx.array, shares: mx.array) -> mx.array:
        """The loss of each slot [C], from its logits [C, V].

        Args:
            labels: the target's choices [C].
            tops, shares: its likeliest tokens and their probabilities [C, T]; 0 is unknown.
        """
        total = mx.logsumexp(logits, axis=-1, keepdims=True)
        loss = mx.zeros(labels.shape)
        if self.cross_entropy:
            chosen = mx.take_along_axis(logits, labels[:, None], axis=-1)
            loss = loss + self.cross_entropy * (total - chosen)[:, 0]
        if self.kl:
            log_q = mx.take_along_axis(logits, tops, axis=-1) - total
            # Only these probabilities are known, so they are normalized to 1.
            p = shares / mx.maximum(shares.sum(axis=-1, keepdims=True), 1e-9)
            log_p = mx.log(mx.maximum(p, 1e-9))
            loss = loss + self.kl * (p * (log_p - log_q)).sum(axis=-1)
        return loss


def summed(
    part: Part, trained: Any, hidden: mx.array, others: Sequence[mx.array], rows: int
) -> tuple[mx.array, mx.array]:
    """Sum the loss over all slots, `rows` slots at a time.

    Args:
        part: the function that computes the loss of some slots.
        trained: a tree of parameters, which get gradients.
        hidden: hidden states [M, D], which get gradients.
        others: arrays of M rows each, which get none.
        rows: slots per part.

    Returns:
        The sum, and the draft of each slot.
    """
    names = [name for name, _ in tree_flatten(trained)]
    count = len(names)
    length = hidden.shape[0]
    gradient = mx.value_and_grad(part, argnums=(0, 1))

    @mx.custom_function
    def run(*arrays: mx.array) -> tuple[mx.array, ...]:
        """The sum [], the drafts, and the gradients of `hidden` and of `trained`."""
        tree = tree_unflatten(list(zip(names, arrays[:count], strict=True))) if count else {}
        value = mx.array(0.0)
        chosen = []
        hidden_gradients: list[mx.array] = []
        sums = [mx.zeros_like(array) for array in arrays[:count]]
        for start in range(0, length, rows):
            piece = [array[start : start + rows] for array in arrays[count:]]
            # Otherwise MLX may compute all parts at once and hold the logits of every slot.
            if hidden_gradients:
                piece = mx.depends(piece, [value, hidden_gradients[-1]])
            (loss, picks), gradients = gradient(tree, *piece)
            parameter_gradients, hidden_gradient = gradients
            value = value + loss
            chosen.append(picks)
            hidden_gradients.append(hidden_gradient)
            flat_gradients = [array for _, array in tree_flatten(parameter_gradients)]
            sums = list(map(mx.add, sums, flat_gradients))
        return (value, mx.concatenate(chosen), mx.concatenate(hidden_gradients), *sums)

    @run.vjp
    def back(arrays: Any, cotangents: Any, outputs: Any) -> list[mx.array]:
        scale = cotangents[0]
        (hidden_gradients, *sums) = outputs[2:]
        rest = [mx.zeros_like(array) for array in arrays[count + 1 :]]
        return [*(scale * array for array in sums), scale * hidden_gradients, *rest]

    flat = [array for _, array in tree_flatten(trained)]
    run_outputs: Any = run(*flat, hidden, *others)
    value, chosen = run_outputs[:2]
    return value, mx.stop_gradient(chosen)


# A part and its gradient need this many arrays of the size of its logits.
LOGITS_AT_ONCE = 4


def slot_weights(choices: mx.array, tokens: mx.array, inside: mx.array, gamma: float) -> mx.array:
    """Weights [..., B-1] of a block's slots 1..B-1, 0 after the first disagreement.

    Args:
        choices: the target's teacher-forced choice for each slot.
        tokens: the text's token at each slot.
        inside: whether the slot is inside the answer.
        gamma: weights decay as exp(-(k-1)/gamma).
    """
    agrees = (choices == tokens).astype(mx.float32)
    reached = mx.cumprod(agrees, axis=-1)[..., :-1]
    reached = mx.concatenate([mx.ones_like(agrees[..., :1]), reached], axis=-1)
    return inside * reached * mx.exp(-mx.arange(agrees.shape[-1]) / gamma)


class SlotLoss:
    """The summed loss of slots, and the token drafted in each.

    Args:
        drafter, target: the pair. The drafter's own head is trained, the target's is not.
        loss_weights: weights of the losses.
        tokens: the tokens [V'] that the loss is restricted to, so that others cost no time; None
            for the whole vocabulary.
    """

    def __init__(
        self,
        drafter: DFlash,
        target: Target,
        loss_weights: LossWeights,
        tokens: mx.array | None,
    ) -> None:
        self._drafter = drafter
        self._target = target
        self._mix = loss_weights
        self._tokens = tokens
        self._width = drafter.config.vocab_size
        if tokens is not None:
            reduced = drafter.token_ids() is not None
            rows = drafter.lm_head.weight if reduced else target.head_rows(tokens)
            self._rows = rows.astype(mx.float32)
            self._width = len(tokens)
            # The index of each token in `tokens`, or -1.
            self._places = mx.full((drafter.config.vocab_size,), -1)
            self._places[tokens] = mx.arange(len(tokens))
        has_markov = isinstance(drafter, DSpark)
        self._markov = drafter.markov_head if has_markov else None
        self._selector = drafter.candidate_selector if isinstance(drafter, DFlash2) else None

    def __call__(
        self,
        hidden: mx.array,
        labels: mx.array,
        before: mx.array,
        weights: mx.array,
        tops: mx.array,
        shares: mx.array,
    ) -> tuple[mx.array, mx.array]:
        """The summed loss [] of slots and their drafts [M].

        Args:
            hidden: of the slots, [M, D].
            labels: the target's choices [M].
            before: the tokens before them [M].
            weights: of the slots, [M].
            tops, shares: the target's likeliest tokens and their probabilities [M, T].
        """
        columns = (labels, before, weights, tops, shares)
        head = self._selector or self._markov
        trained = {} if head is None else head.parameters()
        # A logit has 4 bytes.
        count = max(1, BOUND // (4 * LOGITS_AT_ONCE * self._width))
        return summed(self._part, trained=trained, hidden=hidden, others=columns, rows=count)

    def _part(
        self,
        trained: Any,
        hidden: mx.array,
        labels: mx.array,
        before: mx.array,
        weights: mx.array,
        tops: mx.array,
        shares: mx.array,
    ) -> tuple[mx.array, mx.array]:
        """Loss and drafts of some slots. `trained`: the parameters of a selector or Markov head."""
        known_tokens = self._tokens
        head = self._selector or self._markov
        if head is not None:
            head.update(trained)
        logits = self._logits(hidden)
        if self._markov is not None:
            logits = logits + self._after(self._markov, hidden, before)
        if known_tokens is not None:
            labels = self._places[labels]
            tops = self._places[tops]
            weights = weights * (labels >= 0)
            shares = shares * (tops >= 0)
            labels = mx.maximum(labels, 0)
            tops = mx.maximum(tops, 0)
        loss = self._mix.of(logits, labels=labels, tops=tops, shares=shares)
        chosen = mx.argmax(mx.stop_gradient(logits), axis=-1)
        if self._selector is not None:
            extra, chosen = selector_loss(
                self._selector,
                hidden=hidden,
                logits=logits,
                before=before,
                labels=labels,
                ids=known_tokens,
            )
            loss = loss + extra
        if known_tokens is not None:
            chosen = known_tokens[chosen]
        return (loss * weights).sum(), chosen

    def _logits(self, hidden: mx.array) -> mx.array:
        """Logits of the known tokens, [M, V'] in f32."""
        config = self._drafter.config
        if self._tokens is None:
            # The head computes in the target's own precision.
            hidden = hidden.astype(self._target.embed(mx.zeros((1, 1), mx.int32)).dtype)
            return self._drafter.logits(hidden[None], self._target)[0].astype(mx.float32)
        logits = (hidden @ self._rows.T) * config.output_multiplier
        cap = config.final_logit_softcapping
        logits = logits if cap is None else cap * mx.tanh(logits / cap)
        return logits * config.logit_scale

    def _after(self, markov: MarkovHead, hidden: mx.array, before: mx.array) -> mx.array:
        """What the Markov head adds to the logits, given the previous tokens, [M, V']."""
        inner, _ = markov.inner(hidden, before, mx.zeros((len(hidden), markov.rank)))
        after = markov.markov_w2.weight
        if self._tokens is not None and len(after) > len(self._tokens):
            after = after[self._tokens]
        return self._drafter.config.logit_scale * (inner @ after.T)


def selector_loss(
    selector: CandidateSelector,
    hidden: mx.array,
    logits: mx.array,
    before: mx.array,
    labels: mx.array,
    ids: mx.array | None = None,
) -> tuple[mx.array, mx.array]:
    """The candidate selector's cross entropy over its top-k, given the true predecessors.

    Args:
        selector: the selector.
        hidden, logits: of the slots, [..., D] and [..., V].
        before: the token before each slot, [...].
        labels: the index of the right token in the logits, [...].
        ids: the token ids of the logits [V]; None for the whole vocabulary.

    Returns:
        The entropies [...], which are 0 if the right token is not a candidate, and the chosen
        indices.
    """
    top_k = min(selector.top_k, logits.shape[-1])  # a subset may be small
    candidates = mx.argpartition(-mx.stop_gradient(logits), top_k - 1, axis=-1)[..., :top_k]
    scores = mx.take_along_axis(logits, candidates, axis=-1)
    tokens = candidates if ids is None else ids[candidates]
    scores = scores + selector.scores(hidden, before[..., None], tokens)[..., 0, :]
    hit = candidates == labels[..., None]
    entropy = mx.logsumexp(scores, axis=-1) - (scores * hit).sum(axis=-1)
    best = mx.argmax(mx.stop_gradient(scores), axis=-1, keepdims=True)
    chosen = mx.take_along_axis(candidates, best, axis=-1)[..., 0]
    return mx.where(hit.any(axis=-1), entropy, 0), chosen
