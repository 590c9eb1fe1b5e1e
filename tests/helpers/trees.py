"""Random draft trees, and a drafter whose trees hold the target's own tokens as often as asked."""

import random
from collections.abc import Sequence

import mlx.core as mx
from oracle import Oracle

from dflash_mlx.proposal import Proposal


def random_tree(rng: random.Random, rows: int, vocab_size: int = 256) -> Proposal:
    """A tree of random tokens that is no chain: half its nodes go on where the last one stands."""
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


class TreeOracle(Oracle):
    """Drafts trees: at each depth the right token is among the siblings with probability `p`.

    Its place among them varies, and the tree goes on below it (below any of them, when it is not
    there). A wrong sibling gets a child, too: the token that would be right on the other branch.
    """

    siblings = 3

    def propose(self, anchor: int, width: int) -> Proposal:
        at = sum(taps.shape[1] for taps in self.taps)
        assert anchor == self.text[at], "the anchor is not the token that was committed last"
        self.widths.append(width)
        tokens, parents, end = [anchor], [-1], 0
        while len(tokens) + self.siblings < width:
            at += 1
            level = [self._token(at, self.random.random() < self.p)]
            level += [self._token(at, False) for _ in range(self.siblings - 1)]
            self.random.shuffle(level)
            good = self.text[at] if at < len(self.text) else None
            best = level.index(good) if good in level else 0
            first = len(tokens)
            tokens += [*level, self._token(at + 1, True)]
            parents += [end] * self.siblings + [first + (best + 1) % self.siblings]
            end = first + best
        return Proposal(tokens, tuple(parents))
