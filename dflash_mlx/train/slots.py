"""The slots of drafted blocks: what each weighs, and what a wrong one costs."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Any

import mlx.core as mx
import numpy as np

from ..drafter.dflash2 import CandidateSelector, DFlash2
from ..drafter.dspark import DSpark, MarkovHead
from ..drafter.network import DFlash
from ..targets import Target
from .data import Sample
from .features import BOUND
from .losses import Mix, summed

LOGITS_AT_ONCE = 4  # arrays as large as the logits that one part of a loss and its gradient hold


def slot_weights(choices: mx.array, tokens: mx.array, inside: mx.array, gamma: float) -> mx.array:
    """Loss weights [..., B-1] of a block's slots 1..B-1.

    Args:
        choices: the target's teacher-forced choice for each slot.
        tokens: the text's token at each slot.
        inside: whether the slot lies inside the answer.
        gamma: weights decay as exp(-(k-1)/gamma).
    """
    agrees = (choices == tokens).astype(mx.float32)
    reached = mx.cumprod(agrees, axis=-1)[..., :-1]
    reached = mx.concatenate([mx.ones_like(agrees[..., :1]), reached], axis=-1)
    return inside * reached * mx.exp(-mx.arange(agrees.shape[-1]) / gamma)


@dataclass(frozen=True)
class Kept:
    """The part of a vocabulary that a loss runs over: tokens that never occur cost nothing.

    Attributes:
        tokens: their ids [V'].
        places: where each id of the whole vocabulary is among them [V], 0 for none.
        inside: whether it is [V].
    """

    tokens: mx.array
    places: mx.array
    inside: mx.array

    @classmethod
    def of(cls, tokens: mx.array, vocab_size: int) -> Kept:
        """These tokens of a vocabulary, no two the same."""
        chosen = np.array(tokens).astype(np.int32)
        places, inside = np.zeros(vocab_size, np.int32), np.zeros(vocab_size, np.bool_)
        places[chosen], inside[chosen] = np.arange(len(chosen)), True
        return cls(mx.array(chosen), mx.array(places), mx.array(inside))


def occurring(samples: Iterable[Sample], vocab_size: int) -> Kept:
    """The tokens of the samples' answers: all that can be a label where answers are the target's
    own."""
    return Kept.of(mx.array(np.unique(np.fromiter(_answered(samples), np.int32))), vocab_size)


def frequent(samples: Iterable[Sample], count: int, vocab_size: int) -> mx.array:
    """The ids [count] of the tokens that the samples' answers have most often, ascending."""
    often = np.bincount(np.fromiter(_answered(samples), np.int64), minlength=vocab_size)
    return mx.array(np.sort(np.argsort(-often, kind="stable")[:count]))


def _answered(samples: Iterable[Sample]) -> Iterator[int]:
    spans = (sample.tokens[a:b] for sample in samples for a, b in sample.answers)
    return (token for span in spans for token in span)


class SlotLoss:
    """What slots cost together, and the token drafted in each.

    Args:
        drafter, target: the pair; the drafter's own head is trained, the target's is not.
        mix: what a slot's loss is made of.
        kept: the tokens that it runs over; None is the whole vocabulary.
    """

    def __init__(self, drafter: DFlash, target: Target, mix: Mix, kept: Kept | None) -> None:
        self._drafter, self._target, self._mix, self._kept = drafter, target, mix, kept
        self._reduced = "d2t" in drafter  # its head has a row for each token that is kept
        self._rows: mx.array | None = None  # of the head, where some tokens are kept
        self._width = drafter.config.vocab_size
        if kept is not None:
            rows = drafter.lm_head.weight if self._reduced else target.head_rows(kept.tokens)
            self._rows, self._width = rows.astype(mx.float32), len(kept.tokens)
        has_markov = isinstance(drafter, DSpark) and drafter.config.markov
        self._markov = drafter.markov_head if has_markov else None
        self._selector = drafter.candidate_selector if isinstance(drafter, DFlash2) else None

    def __call__(self, hidden: mx.array, *columns: mx.array) -> tuple[mx.array, mx.array]:
        """The loss [] of slots and what was drafted in them [M].

        Args:
            hidden: of the slots, [M, D].
            columns: labels, tokens before and weights [M], and the target's likeliest tokens with
                their probabilities [M, T].
        """
        head = self._selector or self._markov
        trained = {} if head is None else head.parameters()
        count = max(1, BOUND // (4 * LOGITS_AT_ONCE * self._width))
        return summed(self._part, trained, hidden, columns, count)

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
        """The same of some slots, with the head's trained weights where it is the drafter's own."""
        kept, head = self._kept, self._selector or self._markov
        if head is not None:
            head.update(trained)
        logits = self._logits(hidden)
        if self._markov is not None:
            logits = logits + self._after(self._markov, hidden, before)
        if kept is not None:
            weights = weights * kept.inside[labels]
            shares = shares * kept.inside[tops]
            labels, tops = kept.places[labels], kept.places[tops]
        loss = self._mix.of(logits, labels, tops, shares)
        chosen = mx.argmax(mx.stop_gradient(logits), axis=-1)
        if self._selector is not None:
            ids = None if kept is None else kept.tokens
            extra, chosen = selector_loss(self._selector, hidden, logits, before, labels, ids)
            loss = loss + extra
        if kept is not None:
            chosen = kept.tokens[chosen]
        return (loss * weights).sum(), chosen

    def _logits(self, hidden: mx.array) -> mx.array:
        """Of the tokens that are kept, [M, V'] in f32."""
        config = self._drafter.config
        if self._rows is None:
            # The head computes in the target's own precision.
            hidden = hidden.astype(self._target.embed(mx.zeros((1, 1), mx.int32)).dtype)
            return self._drafter.logits(hidden[None], self._target)[0].astype(mx.float32)
        logits = (hidden @ self._rows.T) * config.output_multiplier
        cap = config.final_logit_softcapping
        logits = logits if cap is None else cap * mx.tanh(logits / cap)
        return logits * config.logit_scale

    def _after(self, markov: MarkovHead, hidden: mx.array, before: mx.array) -> mx.array:
        """What the tokens before the slots add to their logits, [M, V']."""
        inner, _ = markov.inner(hidden, before, mx.zeros((len(hidden), markov.rank)))
        after = markov.markov_w2.weight
        if self._kept is not None and not self._reduced:
            after = after[self._kept.tokens]
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
        hidden, logits: of the slots, [..., D] and [..., V].
        before, labels: the token before each slot, and the right one's place in its logits, [...].
        ids: the tokens that the logits stand for, [V]; None where they are the vocabulary.

    Returns:
        The entropies [...], 0 where the right token is no candidate, and the places chosen.
    """
    top_k = min(selector.top_k, logits.shape[-1])  # few tokens may occur in a batch
    candidates = mx.argpartition(-mx.stop_gradient(logits), top_k - 1, axis=-1)[..., :top_k]
    scores = mx.take_along_axis(logits, candidates, axis=-1)
    tokens = candidates if ids is None else ids[candidates]
    scores = scores + selector.scores(hidden, before[..., None], tokens)[..., 0, :]
    hit = candidates == labels[..., None]
    entropy = mx.logsumexp(scores, axis=-1) - (scores * hit).sum(axis=-1)
    best = mx.argmax(mx.stop_gradient(scores), axis=-1, keepdims=True)
    chosen = mx.take_along_axis(candidates, best, axis=-1)[..., 0]
    return mx.where(hit.any(axis=-1), entropy, 0), chosen
