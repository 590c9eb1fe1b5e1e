"""The shape of a draft tree as arrays: depths, paths, and which rows each row sees."""

from __future__ import annotations

import mlx.core as mx

from ..proposal import Proposal


class Tree:
    """A proposal of N rows as arrays.

    Attributes:
        depths: [N] int32, the distance of each row from the root.
        paths: [N, deepest + 1] int32, the row of each ancestor by its depth, the row itself last;
            -1 past it.
        levels: the rows at each depth.
        parents: the row of each row's parent, -1 for the root.
        was_seen: whether a model has asked for a mask of it.
    """

    def __init__(self, proposal: Proposal) -> None:
        self.parents, depths = proposal.parents, proposal.depths
        self.depths = mx.array(depths, mx.int32)
        self.levels: list[list[int]] = [[] for _ in range(max(depths) + 1)]
        for row, depth in enumerate(depths):
            self.levels[depth].append(row)
        longest = len(self.levels) - 1
        paths = [[0, *path, *[-1] * (longest - len(path))] for path in proposal.paths()]
        self.paths = mx.array(paths, mx.int32)
        self.was_seen = False
        self._windows: dict[tuple[int, int], mx.array] = {}

    def __len__(self) -> int:
        return len(self.parents)

    def windows(self, size: int, held: int) -> mx.array:
        """The last `size` rows of each row's path, itself the last, [N, size] int32.

        Rows are numbered after the `held` older ones; a number before those is negative.
        """
        if (size, held) not in self._windows:  # the same for every layer
            depths = self.depths[:, None] - mx.arange(size - 1, -1, -1)
            ancestors = mx.take_along_axis(self.paths, mx.maximum(depths, 0), axis=1)
            self._windows[size, held] = held + mx.where(depths < 0, depths, ancestors)
        return self._windows[size, held]

    def mask(self, held: int, window: int | None) -> mx.array:
        """Which keys each row sees, [N, held + N] bool: `held` older rows, then the tree's own.

        With a window, only keys fewer than `window` positions back.
        """
        self.was_seen = True
        rows = mx.arange(len(self))
        ancestors = (self.paths[:, :, None] == rows).any(axis=1)
        mask = mx.concatenate([mx.ones((len(self), held), mx.bool_), ancestors], axis=1)
        if window is None:
            return mask
        positions = mx.concatenate([mx.arange(-held, 0), self.depths])  # the root's is 0
        return mask & (self.depths[:, None] - positions < window)
