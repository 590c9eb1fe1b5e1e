"""A draft: tokens arranged as a tree whose root is the last committed token. Pure data.

A chain is a tree whose node i has parent i - 1, so one loop serves both.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import mlx.core as mx

from .errors import ProposalError


@dataclass(frozen=True)
class Proposal:
    """Tokens to verify together. Raises `ProposalError` when they do not form a tree.

    Attributes:
        tokens: [N] token ids as a list, or an integer array that may still be on its way on the
            device; tokens[0] is the anchor, the last committed token.
        parents: the row of each node's parent, (-1, ...): -1 for the root, and every other node
            comes after its parent. Left out, the tokens form a chain.
        log_probs: optional [N] log-probabilities that the drafter gave its tokens.
        is_chain: whether every node is the only child of the one before it.
    """

    tokens: Sequence[int] | mx.array
    parents: tuple[int, ...] = ()
    log_probs: Sequence[float] | mx.array | None = None
    is_chain: bool = field(init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        rows, parents = len(self.tokens), tuple(self.parents)
        if rows < 1:
            raise ProposalError("A proposal holds at least the anchor, the last committed token.")
        chain = tuple(range(-1, rows - 1))
        if parents and parents != chain:
            if len(parents) != rows:
                raise ProposalError(f"A proposal of {rows} tokens names {len(parents)} parents.")
            if parents[0] != -1 or any(not 0 <= p < row for row, p in enumerate(parents) if row):
                raise ProposalError(f"The parents {parents} do not form a tree rooted at row 0.")
        object.__setattr__(self, "parents", parents or chain)
        object.__setattr__(self, "is_chain", self.parents == chain)

    def __len__(self) -> int:
        return len(self.parents)

    def first(self, rows: int) -> Proposal:
        """Its first rows; on the device, if they are there."""
        if rows == len(self):
            return self
        log_probs = None if self.log_probs is None else self.log_probs[:rows]
        return Proposal(self.tokens[:rows], self.parents[:rows], log_probs)

    @property
    def depths(self) -> tuple[int, ...]:
        """How far each node is from the root."""
        depths: list[int] = []
        for parent in self.parents:
            depths.append(depths[parent] + 1 if depths else 0)
        return tuple(depths)

    def paths(self) -> list[list[int]]:
        """The rows on each node's path from the root, the root left out and the node included."""
        paths: list[list[int]] = [[]]
        for row, parent in enumerate(self.parents[1:], start=1):
            paths.append([*paths[parent], row])
        return paths

    def array(self) -> mx.array:
        """The tokens [N] for the device."""
        return self.tokens if isinstance(self.tokens, mx.array) else mx.array(list(self.tokens))
