"""Best-first draft trees (DDTree, arXiv 2604.12989): the most probable continuations, N at a time.

A drafter gives every slot of its block a distribution, and so every sequence of candidates a
probability, the product of its slots'. A round brings one token more than the longest path of the
tree that the target follows. A node is on it with the probability of its path, so the expected
number of tokens is one plus the sum of these, and the best tree of N nodes is the N most probable
paths. A path is never more probable than its beginnings, so a heap finds them in order: take the
best, put in its next sibling and its first child. The first n nodes are the best tree of n nodes.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from heapq import heappop, heappush
from typing import Any

import numpy as np

from ..proposal import Proposal
from .calibration import Calibration
from .candidates import Candidates

FAINTEST = 30.0  # nats: a less probable path is not worth a row


@dataclass(frozen=True)
class Tree:
    """Nodes in best-first order, the root first; every beginning of the lists is a tree, too.

    Attributes:
        parents: [N] rows, -1 for the root.
        picks: [N] which candidate of its slot a node is; 0 for the root.
        log_probs: [N] of the paths, falling; 0 for the root.
    """

    parents: list[int]
    picks: list[int]
    log_probs: list[float]

    def path(self, picks: Sequence[int]) -> list[int]:
        """The rows that lie on a sequence of candidates, the root left out, as far as it goes."""
        nodes = zip(self.parents, self.picks, strict=True)
        children = {node: row for row, node in enumerate(nodes)}
        rows = [0]
        while len(rows) <= len(picks) and (rows[-1], picks[len(rows) - 1]) in children:
            rows.append(children[rows[-1], picks[len(rows) - 1]])
        return rows[1:]


def best_first(log_probs: np.ndarray, rows: int) -> Tree:
    """The tree of at most `rows` nodes, root included, with the largest expected length.

    Args:
        log_probs: [L, P, K] of the candidates; see `Candidates.log_q`.
        rows: 1 or more. The tree has fewer when all other paths are fainter than `FAINTEST`.
    """
    slots, befores, count = log_probs.shape
    order = np.argsort(-log_probs, axis=-1, kind="stable")
    costs: Any = (-np.take_along_axis(log_probs, order, axis=-1)).tolist()
    ranked: Any = order.tolist()
    parents, picks, depths, paths = [-1], [0], [0], [0.0]
    # What may be taken next: the cost of its path, its parent, its rank among its siblings.
    heap = [(costs[0][0][0], 0, 0)] if slots else []
    while heap and len(parents) < rows:
        cost, parent, rank = heappop(heap)
        if cost > FAINTEST:
            break
        slot, before = depths[parent], picks[parent] if befores > 1 else 0
        pick = ranked[slot][before][rank]
        if rank + 1 < count:
            sibling = paths[parent] + costs[slot][before][rank + 1]
            heappush(heap, (sibling, parent, rank + 1))
        if slot + 1 < slots:
            child = cost + costs[slot + 1][pick if befores > 1 else 0][0]
            heappush(heap, (child, len(parents), 0))
        parents.append(parent)
        picks.append(pick)
        depths.append(slot + 1)
        paths.append(cost)
    return Tree(parents, picks, [-cost for cost in paths])


def best_chain(log_probs: np.ndarray) -> Tree:
    """The chain of L + 1 nodes that takes the best candidate after each one, [L, P, K]."""
    picks, paths = [0], [0.0]
    for table in log_probs:
        row = table[picks[-1] if len(table) > 1 else 0]
        picks.append(int(row.argmax()))
        paths.append(paths[-1] + float(row[picks[-1]]))
    return Tree(list(range(-1, len(log_probs))), picks, paths)


class DraftTree:
    """A round's tree, the chain that it could be instead, and what both were made of.

    Args:
        anchor: the token before the first slot.
        candidates: of the slots.
        calibration: makes probabilities of them, and learns from what was right.
        rows: the most rows of the tree, the anchor included.

    Attributes:
        tree, chain: nodes, best first.
        slots: how many tokens of text decide everything about it.
    """

    def __init__(
        self, anchor: int, candidates: Candidates, calibration: Calibration, rows: int
    ) -> None:
        self._anchor, self._candidates, self._calibration = anchor, candidates, calibration
        log_probs = calibration.log_probs(candidates.log_q, candidates.noise)
        self.tree, self.chain = best_first(log_probs, rows), best_chain(log_probs)
        self.slots = len(candidates.tokens)

    def propose(self, rows: int) -> Proposal:
        """The best tree of so many rows, or of as many as there are."""
        return self._proposal(self.tree, rows)

    def propose_chain(self, rows: int) -> Proposal:
        """The favourites of the first slots."""
        return self._proposal(self.chain, rows)

    def learn(self, text: Sequence[int]) -> list[int]:
        """Take in the tokens that followed the anchor, as many of its slots as were reached.

        Returns which candidate each one was, up to the first that was none (K).
        """
        tokens, log_q, noise = self._candidates.tokens, self._candidates.log_q, None
        picks: list[int] = []
        for row, token in zip(tokens.tolist(), text, strict=False):
            picks.append(row.index(token) if token in row else len(row))
            if picks[-1] == len(row):
                break
        reached = min(len(picks), len(self.tree.path(picks)) + 1)
        befores = np.array([0, *picks])[:reached] if log_q.shape[1] > 1 else np.zeros(reached, int)
        if self._candidates.noise is not None:
            noise = self._candidates.noise[:reached]
        log_q = log_q[np.arange(reached), befores]
        self._calibration.learn(log_q, noise, np.array(picks[:reached]))
        return picks

    def _proposal(self, tree: Tree, rows: int) -> Proposal:
        tokens, depths = [self._anchor], [0]
        for parent, pick in zip(tree.parents[1:rows], tree.picks[1:rows], strict=True):
            tokens.append(int(self._candidates.tokens[depths[parent], pick]))
            depths.append(depths[parent] + 1)
        return Proposal(tokens, tuple(tree.parents[:rows]), tree.log_probs[:rows])
