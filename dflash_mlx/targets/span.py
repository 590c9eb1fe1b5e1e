"""One request's rows in a forward: a chain, or a draft tree whose rows see their ancestors."""

from __future__ import annotations

from functools import cached_property
from typing import Any

import mlx.core as mx

from ..kernels.block_attention import TreeMask
from ..proposal import Proposal


class Span:
    """The N rows of one request in one forward.

    Args:
        session: the request's `TargetSession`, whose position is that of the first row.
        proposal: the rows' tokens, and which row follows which.
        ends_prompt: whether these are the last tokens of a prompt.

    Attributes:
        session, proposal, ends_prompt: as given.
        position: of the first row in the request's text.
        first: the number of the first row among all rows of the forward, which `Rows` sets.
        mask_was_read: whether the model has asked for the mask of a tree.
    """

    def __init__(self, session: Any, proposal: Proposal, ends_prompt: bool = False) -> None:
        self.session = session
        self.proposal = proposal
        self.ends_prompt = ends_prompt
        self.position = session.position
        self.first = 0
        self.mask_was_read = False
        self._windows: dict[tuple[int, int], mx.array] = {}

    def __len__(self) -> int:
        return len(self.proposal)

    @property
    def end(self) -> int:
        """The number of the row after the last one, among all rows of the forward."""
        return self.first + len(self)

    @property
    def is_chain(self) -> bool:
        """Whether every row follows the one before it."""
        return self.proposal.is_chain

    @property
    def parents(self) -> tuple[int, ...]:
        """The row that each row follows, -1 for the first."""
        return self.proposal.parents

    @cached_property
    def depths(self) -> mx.array:
        """The distance of each row from the first, [N] int32."""
        return mx.array(self.proposal.depths, mx.int32)

    @cached_property
    def levels(self) -> list[list[int]]:
        """The rows at each depth."""
        depths = self.proposal.depths
        levels: list[list[int]] = [[] for _ in range(max(depths) + 1)]
        for row, depth in enumerate(depths):
            levels[depth].append(row)
        return levels

    @cached_property
    def paths(self) -> mx.array:
        """[N, deepest + 1] int32: the row of each ancestor by its depth, the row itself last.

        Places behind the row itself are -1.
        """
        deepest = len(self.levels) - 1
        paths = [[0, *path, *[-1] * (deepest - len(path))] for path in self.proposal.paths()]
        return mx.array(paths, mx.int32)

    @cached_property
    def tree_mask(self) -> TreeMask:
        """The position and the ancestors of each row, as the attention kernel reads them.

        In a chain, a row's ancestors are all rows before it.
        """
        # [N, deepest + 1, N]: whether row j is at this depth of row i's path.
        is_on_path = self.paths[:, :, None] == mx.arange(len(self))
        ancestors = is_on_path.any(axis=1)
        return TreeMask(self.position + self.depths, ancestors)

    def windows(self, size: int, held: int) -> mx.array:
        """The last `size` rows of each row's path, the row itself last, [N, size] int32.

        Rows are numbered after the `held` older ones; a number before those is negative.
        """
        if (size, held) not in self._windows:  # the same for every layer
            depths = self.depths[:, None] - mx.arange(size - 1, -1, -1)
            ancestors = depths
            if not self.is_chain:
                ancestors = mx.take_along_axis(self.paths, mx.maximum(depths, 0), axis=1)
            rows = mx.where(depths < 0, depths, ancestors)
            self._windows[size, held] = held + rows
        return self._windows[size, held]

    def mask(self, held: int, window: int | None) -> mx.array:
        """Which keys each row sees, [N, held + N] bool: `held` older rows, then these.

        With a window, only keys fewer than `window` positions back.
        """
        self.mask_was_read = True
        older = mx.ones((len(self), held), mx.bool_)
        mask = mx.concatenate([older, self.tree_mask.ancestors], axis=1)
        if window is None:
            return mask
        positions = mx.concatenate([mx.arange(-held, 0), self.depths])  # the first row's is 0
        return mask & (self.depths[:, None] - positions < window)
