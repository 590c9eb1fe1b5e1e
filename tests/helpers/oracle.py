"""Oracles: drafters that are given the answer, and draft right tokens as often as a test wants.

With a random drafter, acceptance would not be tested, and with a perfect one, rollback would not
be. Nothing here imports the library's drafters: an oracle has the methods that the loop calls.
"""

import random
from collections.abc import Callable, Sequence

import mlx.core as mx

from dflash_mlx.proposal import Proposal


class Oracle:
    """Drafts the target's own tokens: each draft position is right with probability `p`.

    With `script`, step s is right in exactly its first `script[s]` draft positions instead. An
    oracle is also its own session, so every request needs a new one. It checks that the loop gives
    it the features of every committed token once and in order, and the right anchor.
    """

    def __init__(
        self,
        prompt: Sequence[int],
        answer: Sequence[int],
        vocab_size: int,
        p: float = 1.0,
        script: Sequence[int] | None = None,
        seed: int = 0,
        tap_layers: tuple[int, ...] = (),
    ) -> None:
        self.tap_layers = tap_layers
        self.p = p
        self.script = script
        self.text = [*prompt, *answer]
        self.vocab_size = vocab_size
        self.random = random.Random(seed)
        self.taps: list[mx.array] = []  # the features that it got, [1, S, K*D] each
        self.widths: list[int] = []  # the requested width of each step

    def start(self, target, sampler) -> "Oracle":
        self.features = len(self.tap_layers) * target.hidden_size
        return self

    def extend(self, taps: mx.array) -> None:
        assert taps.shape[0] == 1 and taps.shape[2] == self.features
        self.taps.append(taps)

    def propose(self, anchor: int, width: int) -> Proposal:
        position = sum(taps.shape[1] for taps in self.taps)
        assert anchor == self.text[position], "the anchor is not the token that was committed last"
        assert width >= 1
        right_slots = self.script[len(self.widths)] if self.script is not None else None
        self.widths.append(width)
        tokens = [anchor]
        for slot in range(width - 1):
            if right_slots is None:
                is_right = self.random.random() < self.p
            else:
                is_right = slot < right_slots
            tokens.append(self._token(position + 1 + slot, is_right))
        return Proposal(tokens)

    def _token(self, position: int, is_right: bool) -> int:
        if position >= len(self.text):  # after the end of the answer, which no draft can match
            return self.random.randrange(self.vocab_size)
        offset = self.random.randrange(1, self.vocab_size)
        if is_right:
            return self.text[position]
        return (self.text[position] + offset) % self.vocab_size


class FunctionDrafter:
    """A drafter whose proposals a function of the test makes, from the anchor and the width."""

    tap_layers = ()

    def __init__(self, proposal: Callable[[int, int], Proposal]) -> None:
        self.proposal = proposal

    def start(self, target, sampler) -> "FunctionDrafter":
        return self

    def extend(self, taps: mx.array) -> None:
        pass

    def propose(self, anchor: int, width: int) -> Proposal:
        return self.proposal(anchor, width)


def random_tree(rng: random.Random, rows: int, vocab_size: int = 256) -> Proposal:
    """A tree of random tokens with at least one branch; about half of its nodes extend a path."""
    while True:
        parents = [-1]
        for row in range(1, rows):
            parents.append(row - 1 if rng.random() < 0.5 else rng.randrange(row))
        proposal = Proposal([rng.randrange(vocab_size) for _ in parents], tuple(parents))
        if not proposal.is_chain:
            return proposal


def separate_paths(target, text: Sequence[int], proposal: Proposal) -> mx.array:
    """Logits [N, V] of a tree's nodes after a text, with each path read as a separate chain."""
    rows: dict[int, mx.array] = {}
    for path in sorted(proposal.paths(), key=len, reverse=True):
        path = [0, *path]
        if path[-1] in rows:
            continue  # a part of a longer path
        session = target.start()
        list(session.prefill(text))
        logits, _ = session.verify(Proposal([proposal.tokens[row] for row in path]))
        rows |= dict(zip(path, logits, strict=True))
    return mx.stack([rows[row] for row in range(len(proposal))])
