"""A target that writes a given text: what it says after anything else is of no account.

It stands for a model that copies what it was shown, which no model small enough for a test does.
"""

from collections.abc import Sequence

import mlx.core as mx
import numpy as np
from bigrams import MadeUpTarget


class Scripted(MadeUpTarget):
    """Its greedy text after `prompt` is `answer`; chains and trees are read alike."""

    num_layers, hidden_size = 4, 8
    can_pipeline = False  # it reads its rows on the host

    def __init__(self, prompt: Sequence[int], answer: Sequence[int], vocab_size: int) -> None:
        super().__init__(vocab_size)
        self.text = [*prompt, *answer]
        self.rows: list[int] = []  # of each forward

    def read(self, tokens, last):
        self.position += len(tokens)
        logits = np.zeros((1, self.vocab_size), np.float32)
        logits[0, self.text[self.position]] = 20.0
        return mx.array(logits), mx.zeros((1, len(tokens), 0))

    def verify(self, proposal):
        tokens = np.array(proposal.tokens).tolist()
        logits = np.zeros((len(tokens), self.vocab_size), np.float32)
        for row, path in enumerate(proposal.paths()):
            at = self.position + len(path) + 1
            right = [tokens[node] for node in path] == self.text[self.position + 1 : at]
            next_token = self.text[at] if right and at < len(self.text) else 0
            logits[row, next_token] = 20.0
        self.rows.append(len(tokens))
        return mx.array(logits), mx.zeros((1, len(tokens), 0))
