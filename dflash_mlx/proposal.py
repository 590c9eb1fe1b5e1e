"""A draft: tokens arranged as a tree whose root is the last committed token. Pure data.

A chain is a tree whose node i has parent i - 1, so one loop serves both.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import mlx.core as mx
import numpy as np

from .errors import ProposalError
from .validation import MAX_INT32, brief, is_integer


@dataclass(frozen=True)
class Proposal:
    """Tokens to verify together. Raises `ProposalError` for what is none, or forms no tree.

    Attributes:
        tokens: [N] token ids, kept as a list, or an integer array of MLX's that may still be on its
            way on the device; tokens[0] is the anchor, the last committed token. An id that the
            vocabulary does not have is a `ProposalError` once the round is read. Those of an array
            nobody looks at before the target reads them: let them be an argmax of its logits.
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
        tokens, parents = self.tokens, self.parents
        if not isinstance(tokens, mx.array):
            object.__setattr__(self, "tokens", _ids(tokens))
        elif tokens.ndim != 1 or not mx.issubdtype(tokens.dtype, mx.integer):
            what = f"an array of {tokens.dtype} {list(tokens.shape)}"
            raise ProposalError(f"A proposal's tokens must be token ids [N], not {what}.")
        rows = len(self.tokens)
        if rows < 1:
            raise ProposalError("A proposal holds at least the anchor, the last committed token.")
        chain = tuple(range(-1, rows - 1))
        if not isinstance(parents, tuple) or parents:
            parents = _tree(parents, rows)
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

    def array(self, vocab_size: int) -> mx.array:
        """The tokens [N] for the device.

        In a list an id beyond the vocabulary is replaced by the last one, until `Request.absorb`
        refuses it: reading it would end the process, for the device checks nothing.
        """
        if isinstance(self.tokens, mx.array):
            return self.tokens
        return mx.array([min(token, vocab_size - 1) for token in self.tokens])


def _ids(tokens: Any) -> list[int]:
    """Tokens [N] as a list. Raises `ProposalError`."""
    if (ids := _whole(tokens, 0)) is None:
        raise ProposalError(f"A proposal's tokens must be token ids [N], not {brief(tokens)}.")
    return ids


def _tree(parents: Any, rows: int) -> tuple[int, ...]:
    """The parents of so many rows. Raises `ProposalError` where they form no tree."""
    if (known := _whole(parents, -1)) is None:
        raise ProposalError(f"A proposal's parents must be its rows, not {brief(parents)}.")
    if known and len(known) != rows:
        raise ProposalError(f"A proposal of {rows} tokens names {len(known)} parents.")
    if known and (known[0] != -1 or any(not 0 <= p < row for row, p in enumerate(known) if row)):
        raise ProposalError(f"The parents {tuple(known)} do not form a tree rooted at row 0.")
    return tuple(known)


def _whole(values: Any, least: int) -> list[int] | None:
    """Values as Python's whole numbers; None if they are anything else. Each round asks this."""
    listed = isinstance(values, Sequence) and not isinstance(values, str | bytes | bytearray)
    if not (listed or isinstance(values, np.ndarray) and values.ndim == 1):
        return None
    given: list[Any] = list(values)
    if {*map(type, given)} <= {int}:
        return given if all(least <= value <= MAX_INT32 for value in given) else None
    return [int(value) for value in given] if all(is_integer(v, least) for v in given) else None
