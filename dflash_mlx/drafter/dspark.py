"""DSpark: a DFlash in which each drafted token depends on the one before it.

All rows of a block are drafted in one pass, so none knows the token of the row before it. DSpark
(DeepSeek, DeepSpec) adds to each row's logits a bias of low rank that depends on that token:
w2 . w1[previous], possibly gated by the row's hidden state, or with a small recurrent state. The
walk along the rows stays on the device. Confidence heads of checkpoints are not read.

Parameter names are those of the published checkpoints.
"""

from __future__ import annotations

from collections.abc import Container, Sequence

import mlx.core as mx
import mlx.nn as nn

from .candidates import CandidateTokens, DraftScores, likeliest
from .config import DraftConfig
from .dflash import DFlash


class MarkovHead(nn.Module):
    """The bias on a row's logits that depends on the token before it.

    With e = w1[previous], the row's hidden state h and s(x) the logistic function:

        vanilla  w2 e
        gated    w2 (s(gate [h; e]) e)
        rnn      w2 tanh(out), where (g, c, out) = joint [state; e; h], and the next row's state is
                 s(g) state + (1 - s(g)) tanh(c), from 0 on
    """

    def __init__(self, config: DraftConfig) -> None:
        super().__init__()
        rank, hidden = config.markov_rank, config.hidden_size
        self.rank = rank
        self.markov_w1 = nn.Embedding(config.vocab_size, rank)
        self.markov_w2 = nn.Linear(rank, config.draft_vocab_size, bias=False)
        if config.markov_head_type == "gated":
            self.gate_proj = nn.Linear(hidden + rank, rank)
        if config.markov_head_type == "rnn":
            self.joint_proj = nn.Linear(hidden + 2 * rank, 3 * rank)

    def first_state(self, count: int) -> mx.array:
        """The states [count, r] before the first row."""
        return mx.zeros((count, self.rank))

    def inner(
        self, hidden: mx.array, previous: mx.array, state: mx.array
    ) -> tuple[mx.array, mx.array]:
        """What `markov_w2` multiplies, and the next state, both [..., r].

        hidden is [..., D], previous token ids [...], state [..., r].
        """
        e = self.markov_w1(previous)
        if "gate_proj" in self:
            return mx.sigmoid(self.gate_proj(mx.concatenate([hidden, e], axis=-1))) * e, state
        if "joint_proj" not in self:
            return e, state
        joint = self.joint_proj(mx.concatenate([state.astype(e.dtype), e, hidden], axis=-1))
        gate, candidate, out = mx.split(joint, 3, axis=-1)
        gate = mx.sigmoid(gate)
        return mx.tanh(out), gate * state + (1 - gate) * mx.tanh(candidate)

    def step(
        self, hidden: mx.array, previous: mx.array, state: mx.array
    ) -> tuple[mx.array, mx.array]:
        """The biases [G, DV] in f32 of one row after each of G tokens [G], and the next states.

        Its hidden state is [D], or one for each, [G, D]; states are [G, r].
        """
        hidden = mx.broadcast_to(hidden, (len(previous), hidden.shape[-1]))
        inner, state = self.inner(hidden, previous, state)
        return self.markov_w2(inner).astype(mx.float32), state


class DSpark(DFlash):
    """The DSpark drafter: used, cached and fed exactly as a DFlash one."""

    def __init__(self, config: DraftConfig, parts: Container[str] = ()) -> None:
        super().__init__(config, parts)
        self.markov_head = MarkovHead(config)

    def choose(self, requests: Sequence[DraftScores]) -> list[mx.array]:
        """The tokens [L] of every request, each chosen with the one before it in its logits."""
        return [tokens for tokens, _ in self._walk(requests)]

    def candidates(self, slots: DraftScores, count: int) -> CandidateTokens:
        """The likeliest tokens of every slot, given the likeliest tokens before it."""
        [(_, scores)] = self._walk([slots])
        return likeliest(scores, count, self.token_ids())

    def _walk(self, requests: Sequence[DraftScores]) -> list[tuple[mx.array, mx.array]]:
        """The best tokens [L] of every request, and the scores [L, DV] with the Markov biases.

        The requests advance together: each row reads the head's matrices, which are as large as the
        vocabulary, once for all of them.
        """
        ids, head, scale = self.token_ids(), self.markov_head, self.config.logit_scale
        # The longest first: those that still go on are the first ones.
        order = sorted(range(len(requests)), key=lambda at: -len(requests[at].hidden))
        slots = [requests[at] for at in order]
        own = [self.to_draft_vocab(one.scores).astype(mx.float32) for one in slots]
        previous = mx.array([one.anchor for one in slots])
        state = head.first_state(len(slots))
        walked: list[tuple[list[mx.array], list[mx.array]]] = [([], []) for _ in requests]
        for row in range(len(slots[0].hidden)):
            going = [one for one in slots if row < len(one.hidden)]
            rows = mx.stack([one.hidden[row] for one in going])
            bias, state = head.step(rows, previous[: len(going)], state[: len(going)])
            weights = [scale * one.weight for one in going]
            scores = [own[at][row] + weights[at] * bias[at] for at in range(len(going))]
            best = mx.stack([one.argmax() for one in scores])
            previous = best if ids is None else ids[best]
            for place, score in enumerate(scores):
                tokens, biased = walked[order[place]]
                tokens.append(previous[place])
                biased.append(score)
        return [(mx.stack(tokens), mx.stack(scores)) for tokens, scores in walked]
