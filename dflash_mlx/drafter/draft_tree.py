"""Best-first draft trees (DDTree, arXiv 2604.12989): the N most probable continuations.

A drafter gives every slot of its block a distribution, and every sequence of candidates the product
of its slots' probabilities. A step commits one token more than the longest path of the tree that
the target follows. A node is on that path with the probability of its own path, so the expected
number of tokens is one plus the sum of these: the best tree of N nodes has the N most probable
paths. A path is never more probable than its beginnings, so a heap finds them in order: take the
best, then add its next sibling and its first child. The first n nodes are the best tree of n nodes.
"""

from __future__ import annotations

from dataclasses import dataclass
from heapq import heappop, heappush
from typing import Any

import numpy as np

from ..proposal import Proposal

# In nats. A path with a higher cost (its negative log-probability) is not worth a row.
MAX_PATH_COST = 30.0


@dataclass(frozen=True)
class TreeNodes:
    """Nodes in best-first order, the root first. The first n nodes are a tree for every n.

    Attributes:
        parents: [N] rows, -1 for the root.
        picks: [N] index of each node among the candidates of its slot; 0 for the root.
        log_probs: [N] log-probabilities of the paths, in falling order; 0 for the root.
    """

    parents: list[int]
    picks: list[int]
    log_probs: list[float]


def best_first(log_probs: np.ndarray, rows: int) -> TreeNodes:
    """The tree of at most `rows` nodes, root included, with the largest expected length.

    Args:
        log_probs: [L, P, K] log-probabilities as in `CandidateTokens`.
        rows: 1 or more. The tree has fewer rows if all other paths cost over `MAX_PATH_COST`.
    """
    slots, predecessors, count = log_probs.shape
    order = np.argsort(-log_probs, axis=-1, kind="stable")
    costs: Any = (-np.take_along_axis(log_probs, order, axis=-1)).tolist()
    ranked: Any = order.tolist()
    parents = [-1]
    picks = [0]
    depths = [0]
    path_costs = [0.0]
    # The nodes that may come next: the cost of the path, the parent, the rank among siblings.
    heap = [(costs[0][0][0], 0, 0)] if slots else []
    while heap and len(parents) < rows:
        cost, parent, rank = heappop(heap)
        if cost > MAX_PATH_COST:
            break
        slot = depths[parent]
        predecessor = picks[parent] if predecessors > 1 else 0
        pick = ranked[slot][predecessor][rank]
        if rank + 1 < count:
            sibling_cost = path_costs[parent] + costs[slot][predecessor][rank + 1]
            heappush(heap, (sibling_cost, parent, rank + 1))
        if slot + 1 < slots:
            child_cost = cost + costs[slot + 1][pick if predecessors > 1 else 0][0]
            heappush(heap, (child_cost, len(parents), 0))
        parents.append(parent)
        picks.append(pick)
        depths.append(slot + 1)
        path_costs.append(cost)
    return TreeNodes(parents, picks, [-cost for cost in path_costs])


def best_chain(log_probs: np.ndarray) -> TreeNodes:
    """The chain of L + 1 nodes that takes the best candidate of each slot, from [L, P, K]."""
    picks = [0]
    path_log_probs = [0.0]
    for slot_log_probs in log_probs:
        predecessor = picks[-1] if len(slot_log_probs) > 1 else 0
        successors = slot_log_probs[predecessor]
        picks.append(int(successors.argmax()))
        path_log_probs.append(path_log_probs[-1] + float(successors[picks[-1]]))
    return TreeNodes(list(range(-1, len(log_probs))), picks, path_log_probs)


class DraftTree:
    """The tree of one step, and the chain that it could be instead.

    Args:
        anchor: the token before the first slot.
        tokens: [L, K], the candidates of the slots.
        log_probs: [L, P, K], their log-probabilities as in `CandidateTokens`.
        rows: the maximum number of rows of the tree, the anchor included.

    Attributes:
        log_probs: [N] log-probabilities of the paths to the tree's rows, in falling order; 0 for
            the root.
        slots: L, the number of slots.
    """

    def __init__(self, anchor: int, tokens: np.ndarray, log_probs: np.ndarray, rows: int) -> None:
        self._anchor = anchor
        self._tokens = tokens
        self.slots = len(tokens)
        self._tree = best_first(log_probs, rows)
        self._chain = best_chain(log_probs)
        self.log_probs = self._tree.log_probs

    def propose(self, rows: int) -> Proposal:
        """Propose the best tree of at most this many rows."""
        return self._proposal(self._tree, rows)

    def propose_chain(self, rows: int) -> Proposal:
        """Propose the best candidates of the first slots, as a chain of at most this many rows."""
        return self._proposal(self._chain, rows)

    def _proposal(self, tree: TreeNodes, rows: int) -> Proposal:
        tokens = [self._anchor]
        depths = [0]
        for parent, pick in zip(tree.parents[1:rows], tree.picks[1:rows], strict=True):
            tokens.append(int(self._tokens[depths[parent], pick]))
            depths.append(depths[parent] + 1)
        return Proposal(tokens, tuple(tree.parents[:rows]), tree.log_probs[:rows])
