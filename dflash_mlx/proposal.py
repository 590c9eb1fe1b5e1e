"""A proposal: a tree of tokens whose root is the anchor, the last committed token.

A chain is a tree in which node i has parent i - 1, so one loop serves both.
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
    """Tokens to verify together. Raises `ProposalError` for anything that is not such a tree.

    Attributes:
        tokens: [N] token ids, the anchor first: kept as a list, or as an integer array of MLX's
            that may still be lazy. An id outside the vocabulary is a `ProposalError` when the step
            is read.
        parents: each node's parent row, -1 for the root; parents come before their children. Left
            out, the tokens form a chain.
        log_probs: optional [N] log-probabilities that the drafter gave its tokens.
        is_chain: whether every node is the only child of the one before it.
    """

    tokens: Sequence[int] | mx.array
    parents: tuple[int, ...] = ()
    log_probs: Sequence[float] | mx.array | None = None
    is_chain: bool = field(init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        tokens = self.tokens
        parents = self.parents
        if not isinstance(tokens, mx.array):
            tokens = _integers("tokens", tokens, 0)
            object.__setattr__(self, "tokens", tokens)
        elif tokens.ndim != 1 or not mx.issubdtype(tokens.dtype, mx.integer):
            what = f"an array of {tokens.dtype} {list(tokens.shape)}"
            raise ProposalError(f"A proposal's tokens must be token ids [N], not {what}.")
        rows = len(tokens)
        if rows < 1:
            raise ProposalError("A proposal holds at least the anchor, the last committed token.")
        chain = tuple(range(-1, rows - 1))
        if not isinstance(parents, tuple) or parents:
            parents = _checked_parents(parents, rows)
        object.__setattr__(self, "parents", parents or chain)
        object.__setattr__(self, "is_chain", self.parents == chain)

    def __len__(self) -> int:
        return len(self.parents)

    @property
    def depths(self) -> tuple[int, ...]:
        """Each node's distance from the root."""
        depths: list[int] = []
        for parent in self.parents:
            depths.append(depths[parent] + 1 if depths else 0)
        return tuple(depths)

    def paths(self) -> list[list[int]]:
        """The rows on each node's path, from below the root to the node itself."""
        paths: list[list[int]] = [[]]
        for row, parent in enumerate(self.parents[1:], start=1):
            paths.append([*paths[parent], row])
        return paths

    def array(self, vocab_size: int) -> mx.array:
        """The tokens [N] as an array.

        Ids outside the vocabulary are clipped, because a device reads beyond its arrays without an
        error. `Request.accept` refuses the proposal later.
        """
        if isinstance(self.tokens, mx.array):
            return mx.minimum(self.tokens.astype(mx.uint32), vocab_size - 1)
        return mx.minimum(mx.array(list(self.tokens)), vocab_size - 1)


def _checked_parents(value: Any, rows: int) -> tuple[int, ...]:
    """The `parents` of a proposal as a tuple.

    Raises `ProposalError` if they form no tree of so many rows.
    """
    parents = _integers("parents", value, -1)
    if parents and len(parents) != rows:
        raise ProposalError(f"A proposal of {rows} tokens names {len(parents)} parents.")
    for row, parent in enumerate(parents):
        is_valid = 0 <= parent < row if row > 0 else parent == -1
        if not is_valid:
            raise ProposalError(f"The parents {tuple(parents)} do not form a tree rooted at row 0.")
    return tuple(parents)


def _integers(name: str, sequence: Any, least: int) -> list[int]:
    """A sequence of integers, perhaps numpy's, as a list of Python ints of `least` or more.

    Raises `ProposalError` for anything else.
    """
    is_list = isinstance(sequence, Sequence) and not isinstance(sequence, str | bytes | bytearray)
    if is_list or (isinstance(sequence, np.ndarray) and sequence.ndim == 1):
        values: list[Any] = list(sequence)
        if not values:
            return values
        # The usual case, in every step: plain ints in range need no conversion.
        has_plain_ints = set(map(type, values)) == {int}
        if has_plain_ints and min(values) >= least and max(values) <= MAX_INT32:
            return values
        if all(is_integer(value, least) for value in values):
            return [int(value) for value in values]
    raise ProposalError(f"A proposal's {name} must be integers [N], not {brief(sequence)}.")
