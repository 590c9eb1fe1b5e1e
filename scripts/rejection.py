"""Speculative sampling by rejection (arXiv 2211.17192), for comparison only.

It accepts as often as any method can, 1 - TV(p, q), and its text has the right distribution. But it
is another text than plain decoding's, whatever the seed, so nobody can check it by looking.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import mlx.core as mx
import numpy as np

from dflash_mlx.drafter.protocol import Drafter
from dflash_mlx.sampling import Sampler, Trials
from dflash_mlx.settings import SamplingSettings
from dflash_mlx.targets import Target


class _Drawing(Sampler):
    """Drafts by drawing each token from q on its own, and remembers the rows of q."""

    def trials(self, logits: mx.array) -> Trials:
        scores = self.scores(logits)
        self.q = mx.softmax(scores, axis=-1)
        return [scores + mx.random.gumbel(scores.shape)], [1.0]

    def settle(self, blocks: Sequence[mx.array]) -> mx.array:
        return blocks[0]


def rejection_rounds(
    target: Target,
    drafter: Drafter,
    prompt: list[int],
    tokens: int,
    settings: SamplingSettings,
    width: int,
) -> int:
    """The rounds that rejection sampling takes for so many tokens after a prompt.

    Nothing ends the text before, so that texts of different wording stay comparable.
    """
    rng = np.random.default_rng(settings.seed)
    mx.random.seed(settings.seed or 0)
    sampler = _Drawing(settings, prompt)
    session, drafting = target.start(drafter.tap_layers), drafter.start(target, sampler)
    for _, taps in session.prefill(prompt[:-1]):
        drafting.extend(taps)
    anchor, made, rounds = prompt[-1], 0, 0
    while made < tokens:
        rows = min(width, tokens - made)
        proposal = drafting.propose(anchor, rows)
        logits, taps = session.verify(proposal)
        p = np.array(mx.softmax(sampler.scores(logits), axis=-1), np.float64)
        drafts: Any = mx.array(proposal.tokens)[1:].tolist()  # type: ignore[arg-type]
        q = np.array(sampler.q, np.float64) if drafts else p
        accepted, anchor = _accept(drafts, p, q, rng)
        session.commit(range(accepted + 1))
        drafting.extend(taps[:, : accepted + 1])
        made, rounds = made + accepted + 1, rounds + 1
    return rounds


def _accept(
    drafts: list[int], p: np.ndarray, q: np.ndarray, rng: np.random.Generator
) -> tuple[int, int]:
    """How many drafts are kept, and the token after them."""
    for slot, token in enumerate(drafts):
        if rng.random() * q[slot, token] < p[slot, token]:
            continue
        left = np.maximum(p[slot] - q[slot], 0)
        return slot, int(rng.choice(len(left), p=left / left.sum()))
    last = p[len(drafts)]
    return len(drafts), int(rng.choice(len(last), p=last / last.sum()))
