"""Random draft trees for the kernels' tests."""

import mlx.core as mx
import numpy as np


def random_parents(nodes: int, seed: int = 0) -> list[int]:
    """Parents of a random tree, -1 for the root, parents before children."""
    random = np.random.default_rng(seed)
    return [-1, *(int(random.integers(max(0, node - 5), node)) for node in range(1, nodes))]


def random_tree(nodes: int, seed: int = 0) -> tuple[mx.array, mx.array]:
    """Depths [N] of a random tree's nodes and, as booleans [N, N], who is whose ancestor."""
    depths, ancestors = np.zeros(nodes, np.int32), np.eye(nodes, dtype=bool)
    for node, parent in enumerate(random_parents(nodes, seed)):
        if parent >= 0:
            depths[node] = depths[parent] + 1
            ancestors[node] |= ancestors[parent]
    return mx.array(depths), mx.array(ancestors)


def path(parents: list[int], node: int) -> list[int]:
    """The rows from the root to a node."""
    return [*(path(parents, parents[node]) if node else []), node]
