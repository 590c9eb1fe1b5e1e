"""DSpark: a DFlash whose drafted tokens know the one before them, and say how sure they are.

All rows of a block are drafted in one pass, so none knows what the row before it became. DSpark
(DeepSeek, DeepSpec) adds to each row's logits a bias of low rank that the token before it decides:
w2 . w1[previous], possibly gated by the row's hidden state, or carried along by a small recurrent
state. The walk along the rows stays on the device. A second head may estimate for each row the
probability that it is accepted, given that all rows before it were.

Parameter names are those of the published checkpoints.
"""

from __future__ import annotations

from collections.abc import Container, Sequence
from typing import TYPE_CHECKING

import mlx.core as mx
import mlx.nn as nn

from .candidates import MOST_CANDIDATES, Ranking, Slots, top_candidates
from .config import DraftConfig, Markov
from .dflash2 import DFlash2
from .network import DFlash
from .packagings import CONFIDENCE

if TYPE_CHECKING:
    from ..sampling import DraftScores
    from .calibration import Calibration

# Scores [L, V] of each trial, their weights, hidden states [L, D], the token before the chain.
Walk = tuple[mx.array, float, mx.array, mx.array]

CONFIDENCE_ALONE = "confidence head of hidden states alone"  # a part, as the constructor takes it
LEAST_REST = 1e-6  # of a slot's probability, for what is no candidate


class MarkovHead(nn.Module):
    """The bias on a row's logits that the token before it decides.

    With e = w1[previous], the row's hidden state h and s(x) the logistic function:

        vanilla  w2 e
        gated    w2 (s(gate [h; e]) e)
        rnn      w2 tanh(out), where (g, c, out) = joint [state; e; h], and the next row's state is
                 s(g) state + (1 - s(g)) tanh(c), from 0 on
    """

    def __init__(self, config: DraftConfig, markov: Markov) -> None:
        super().__init__()
        rank, hidden = markov.rank, config.hidden_size
        self.rank = rank
        self.markov_w1 = nn.Embedding(config.vocab_size, rank)
        self.markov_w2 = nn.Linear(rank, config.draft_vocab_size, bias=False)
        if markov.type == "gated":
            self.gate_proj = nn.Linear(hidden + rank, rank)
        if markov.type == "rnn":
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

    def pairs(self, inner: mx.array, tokens: mx.array) -> mx.array:
        """The biases [L, P, C] in f32 of some tokens only, given by their rows of w2 [L, C].

        inner is [L, P, r], of each of P predecessors of a slot.
        """
        w2 = self.markov_w2
        rows = w2.weight[tokens]
        if isinstance(w2, nn.QuantizedLinear):
            biases = w2.biases[tokens] if w2.biases is not None else None
            rows = mx.dequantize(
                rows, w2.scales[tokens], biases, w2.group_size, w2.bits, mode=w2.mode
            )
        return (inner @ rows.swapaxes(-1, -2)).astype(mx.float32)


class DSpark(DFlash):
    """The DSpark drafter: used, cached and fed exactly as a DFlash one."""

    def __init__(self, config: DraftConfig, parts: Container[str] = ()) -> None:
        super().__init__(config, parts)
        rank = 0
        if config.markov is not None:
            rank = config.markov.rank
            self.markov_head = MarkovHead(config, config.markov)
        if CONFIDENCE in parts:
            width = config.hidden_size + (0 if CONFIDENCE_ALONE in parts else rank)
            self.confidence_head = {"proj": nn.Linear(width, 1)}

    @property
    def says_confidence(self) -> bool:
        """Whether it estimates how likely its drafts are accepted."""
        return "confidence_head" in self

    def choose(self, requests: Sequence[tuple[Slots, DraftScores]]) -> list[mx.array]:
        """The tokens [L] of every request, each chosen with the one before it in its logits."""
        if "markov_head" not in self:
            return super().choose(requests)
        return self.walk_batch(
            [(*scores, slots.hidden, slots.anchor) for slots, scores in requests]
        )

    def walk(self, scores: mx.array, weight: float, hidden: mx.array, anchor: mx.array) -> mx.array:
        """Choose a chain of tokens [L] by scores [L, V], from hidden states [L, D].

        The weight is what one unit of logit counts in the scores, which contain the noise of the
        target's choices; `anchor` is the token before the chain.
        """
        return self.walk_batch([(scores, weight, hidden, anchor)])[0]

    def walk_batch(self, walks: Sequence[Walk]) -> list[mx.array]:
        """The chains of many requests, given the arguments of `walk` for each.

        All are walked at the same time: the head's matrices, which are as large as the vocabulary,
        are read once a row and not once for each.
        """
        ids, head, weight = self.token_ids(), self.markov_head, self.config.logit_scale
        # The longest first, so that those that still go on are the first ones.
        order = sorted(range(len(walks)), key=lambda at: -len(walks[at][2]))
        scores = [self.narrow(walks[at][0]).astype(mx.float32) for at in order]
        weights = [weight * walks[at][1] for at in order]
        hidden = [walks[at][2] for at in order]
        previous = mx.stack([walks[at][3] for at in order])
        state, path = head.first_state(len(walks)), []
        for row in range(len(hidden[0])):
            count = sum(row < len(states) for states in hidden)
            rows = mx.stack([states[row] for states in hidden[:count]])
            bias, state = head.step(rows, previous[:count], state[:count])
            chosen = [(scores[at][row] + weights[at] * bias[at]).argmax() for at in range(count)]
            previous = mx.stack(chosen)
            previous = previous if ids is None else ids[previous]
            path.append(previous)
        chains = {
            at: mx.stack([row[place] for row in path[: len(hidden[place])]])
            for place, at in enumerate(order)
        }
        return [chains[at] for at in range(len(walks))]

    def corrected(self, logits: mx.array, hidden: mx.array, previous: mx.array) -> mx.array:
        """Logits [L, DV] in f32, bias included, of rows whose predecessors [L] are known.

        logits are the base ones [L, DV] that `logits` makes of hidden [L, D].
        """
        biases, state = [], self.markov_head.first_state(1)
        for row in range(len(previous)):
            bias, state = self.markov_head.step(hidden[row], previous[row : row + 1], state)
            biases.append(bias[0])
        return logits.astype(mx.float32) + self.config.logit_scale * mx.stack(biases)

    def confidence(self, hidden: mx.array, previous: mx.array) -> mx.array:
        """Logits [L] in f32 of a row's draft being accepted, given that all before it were.

        hidden is [L, D] of the rows, previous [L] the tokens before them, the anchor first.
        """
        proj = self.confidence_head["proj"]
        if "markov_head" in self and proj.weight.shape[-1] > hidden.shape[-1]:
            hidden = mx.concatenate([hidden, self.markov_head.markov_w1(previous)], axis=-1)
        return proj(hidden.astype(mx.float32))[:, 0].astype(mx.float32)

    def rank(self, slots: Slots, calibration: Calibration, count: int) -> Ranking:
        """The likeliest tokens of every slot, with the probability of each after each before it.

        They are the best of the rows along the greedy walk, so its chain is among them. Of what is
        no candidate the mass is taken from there, too; a recurrent state is the walk's.
        """
        if "markov_head" not in self:
            return super().rank(slots, calibration, count)
        logits, hidden, anchor, sampler = slots
        log_q, noise = sampler.foresee(self.widen(logits))
        own = self.narrow(log_q)
        noise_of_known = None if noise is None else self.narrow(noise)
        ranking = calibration.ranking(own, noise_of_known)
        weight = self.config.logit_scale / (sampler.temperature or 1.0)
        trust = 1.0 if noise is None else float(calibration.weights[0])
        biases, states = self._greedy(ranking, trust * weight, hidden, anchor)
        count = min(count, MOST_CANDIDATES, own.shape[-1])
        chosen = top_candidates(ranking + trust * weight * biases, count)  # [L, K]
        ids = self.token_ids()
        tokens = chosen if ids is None else ids[chosen]
        first = mx.broadcast_to(anchor.astype(tokens.dtype), (1, count))
        before = mx.concatenate([first, tokens[:-1]])
        inner, _ = self.markov_head.inner(
            mx.broadcast_to(hidden[:, None], (len(before), count, hidden.shape[-1])),
            before,
            mx.broadcast_to(states[:, None], (len(before), count, states.shape[-1])),
        )
        base = mx.take_along_axis(own, chosen, axis=-1)
        scores = base[:, None] + weight * self.markov_head.pairs(inner, chosen)
        walked = own + weight * biases
        total = mx.logsumexp(walked, axis=-1)
        inside = mx.logsumexp(mx.take_along_axis(walked, chosen, axis=-1), axis=-1)
        rest = total + mx.log(mx.maximum(1 - mx.exp(inside - total), LEAST_REST))
        normal = mx.logaddexp(mx.logsumexp(scores, axis=-1), rest[:, None])
        return Ranking.of(tokens, scores - normal[..., None], noise)

    def _greedy(
        self, ranking: mx.array, weight: float, hidden: mx.array, anchor: mx.array
    ) -> tuple[mx.array, mx.array]:
        """The biases [L, DV] along the best chain, and the states [L, r] before each row."""
        ids, previous = self.token_ids(), anchor[None]
        state = self.markov_head.first_state(1)
        biases, states = [], []
        for row in range(len(hidden)):
            states.append(state[0])
            bias, state = self.markov_head.step(hidden[row], previous, state)
            biases.append(bias[0])
            best = (ranking[row] + weight * bias[0]).argmax()[None]
            previous = best if ids is None else ids[best]
        return mx.stack(biases), mx.stack(states)


def network_for(config: DraftConfig) -> type[DFlash]:
    """The class of the network that a config calls for."""
    return {"dflash2": DFlash2, "dspark": DSpark}.get(config.kind, DFlash)
