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

from .candidates import CandidateTokens, DraftScores, top_tokens
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
        rank = config.markov_rank
        hidden = config.hidden_size
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
        """Compute the input of `markov_w2` and the next state, both [..., r].

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

    def candidates(self, draft: DraftScores, count: int) -> CandidateTokens:
        """The most probable tokens of every slot, given the best tokens before it."""
        [(_, scores)] = self._walk([draft])
        return top_tokens(scores, count, self.token_ids())

    def _walk(self, requests: Sequence[DraftScores]) -> list[tuple[mx.array, mx.array]]:
        """The best tokens [L] of every request, and the scores [L, DV] with the Markov biases.

        The requests advance together: each row reads the head's matrices, which are as large as the
        vocabulary, once for all of them.
        """
        ids = self.token_ids()
        head = self.markov_head
        scale = self.config.logit_scale
        # The longest drafts come first, so those that still have rows are always the first ones.
        order = sorted(range(len(requests)), key=lambda index: -len(requests[index].hidden))
        drafts = [requests[index] for index in order]
        block_scores = [self.to_draft_vocab(draft.scores).astype(mx.float32) for draft in drafts]
        previous = mx.array([draft.anchor for draft in drafts])
        state = head.first_state(len(drafts))
        tokens: list[list[mx.array]] = [[] for _ in requests]
        scores: list[list[mx.array]] = [[] for _ in requests]
        for row in range(len(drafts[0].hidden)):
            count = sum(row < len(draft.hidden) for draft in drafts)
            hidden = mx.stack([draft.hidden[row] for draft in drafts[:count]])
            bias, state = head.step(hidden, previous[:count], state[:count])
            row_scores = [
                block_scores[place][row] + scale * drafts[place].weight * bias[place]
                for place in range(count)
            ]
            best = mx.stack([request_scores.argmax() for request_scores in row_scores])
            previous = best if ids is None else ids[best]
            for place in range(count):
                tokens[order[place]].append(previous[place])
                scores[order[place]].append(row_scores[place])
        return [
            (mx.stack(tokens[index]), mx.stack(scores[index])) for index in range(len(requests))
        ]
