"""Drafters of chains and trees that know the answer, and are right as often as a test wants.

A random drafter never exercises acceptance and a perfect one never exercises rollback. Nothing here
imports the library's drafters: an oracle is anything that has the shape the loop asks for.
"""

import random
from collections.abc import Callable, Sequence

import mlx.core as mx

from dflash_mlx.proposal import Proposal


class Oracle:
    """Drafts the target's own tokens: each draft position is right with probability `p`.

    With `script`, step s is right in exactly its first `script[s]` draft positions instead. An
    oracle is its own session too, so a new one is made for every request. It checks that the loop
    gives it the features of every committed token, once, in order, and the last one as the anchor.
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
        self.taps: list[mx.array] = []  # what the loop handed over, [1, S, K*D] each
        self.widths: list[int] = []  # what the loop asked for, in each step

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
        right = self.script[len(self.widths)] if self.script is not None else None
        self.widths.append(width)
        tokens = [anchor]
        for slot in range(width - 1):
            good = self.random.random() < self.p if right is None else slot < right
            tokens.append(self._token(position + 1 + slot, good))
        return Proposal(tokens)

    def _token(self, position: int, good: bool) -> int:
        if position >= len(self.text):  # past what the target said: no slot can be right or wrong
            return self.random.randrange(self.vocab_size)
        wrong = self.random.randrange(1, self.vocab_size)
        return (self.text[position] + (0 if good else wrong)) % self.vocab_size


class Proposes:
    """A drafter that proposes what a test says, whatever it is asked."""

    tap_layers = ()

    def __init__(self, proposal: Callable[[int, int], Proposal]) -> None:
        self.proposal = proposal

    def start(self, target, sampler) -> "Proposes":
        return self

    def extend(self, taps: mx.array) -> None:
        pass

    def propose(self, anchor: int, width: int) -> Proposal:
        return self.proposal(anchor, width)


def random_tree(rng: random.Random, rows: int, vocab_size: int = 256) -> Proposal:
    """A tree of random tokens with branches: half its nodes follow the node before them."""
    while True:
        parents = [-1]
        for row in range(1, rows):
            parents.append(row - 1 if rng.random() < 0.5 else rng.randrange(row))
        proposal = Proposal([rng.randrange(vocab_size) for _ in parents], tuple(parents))
        if not proposal.is_chain:
            return proposal


def separate_paths(target, text: Sequence[int], proposal: Proposal) -> mx.array:
    """Logits [N, V] of a tree's nodes after a text, every path read by a request of its own."""
    rows: dict[int, mx.array] = {}
    for path in sorted(proposal.paths(), key=len, reverse=True):
        path = [0, *path]
        if path[-1] in rows:
            continue  # on the way to a leaf that was read before
        session = target.start()
        list(session.prefill(text))
        logits, _ = session.verify(Proposal([proposal.tokens[row] for row in path]))
        rows |= dict(zip(path, logits, strict=True))
    return mx.stack([rows[row] for row in range(len(proposal))])
