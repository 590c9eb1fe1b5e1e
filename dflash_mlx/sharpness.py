"""How far drafts follow the drafter's own opinion, and how far the noise of the target's choice.

Candidates are ranked by s * log q + G, where G is the noise that the target's choice will contain.
s = 1 is right for a drafter whose q is the target's p. One that is less sure than it should be
wants a larger s, which trusts its favourites more; the best s differs by pair and temperature.

The text does not depend on what is drafted. So once it has gone on, every s can be scored on the
block it *would* have drafted, and the best is known without ever having to verify the others. To
draw those blocks is not free (six walks of a Markov head for one): after the first drafts, one in a
few is enough.
"""

from __future__ import annotations

from collections.abc import Sequence

GRID = (1.0, 2.0, 3.0, 5.0, 10.0, 100.0)  # the last is the drafter's favourite, noise or not
FIRST = 10.0  # where learning starts: large ones were best on the pairs measured so far
MEMORY = 0.995  # a scored block's weight against the next one's: the last 200 or so count
LEAD = 5.0  # accepted tokens by which another s has to be ahead of `FIRST`
SOON, SELDOM = 32, 8  # drafts that are all drawn with every s; and one of so many after them


class Sharpness:
    """The s of one drafter at one temperature; keep it, and the next request starts with it.

    Args:
        grid: the values to choose from; a single one pins it.
    """

    def __init__(self, grid: Sequence[float] = GRID) -> None:
        self.grid = tuple(grid)
        self._leads = [LEAD if s == FIRST else 0.0 for s in self.grid]
        self._scores = [0.0] * len(self.grid)  # accepted tokens, old blocks' counting less
        self._drafts = 0

    @property
    def best(self) -> int:
        """The index in `grid` of the s to draft with now, the first among equals."""
        scores = [score + lead for score, lead in zip(self._scores, self._leads, strict=True)]
        return scores.index(max(scores))

    @property
    def value(self) -> float:
        """The s to draft with now."""
        return self.grid[self.best]

    def trials(self) -> tuple[float, ...]:
        """Each s that the next draft is drawn with: all of the grid, or the best alone."""
        self._drafts += 1
        compares = self._drafts <= SOON or self._drafts % SELDOM == 0
        return self.grid if compares else (self.value,)

    def learn(self, lengths: Sequence[int]) -> None:
        """Take in how many tokens of one block each s of the grid would have had accepted."""
        pairs = zip(self._scores, lengths, strict=True)
        self._scores = [MEMORY * score + length for score, length in pairs]


def matching(block: Sequence[int], truth: Sequence[int]) -> int:
    """How many tokens of a block are right before the first wrong one."""
    pairs = zip(block, truth, strict=True)
    return next((place for place, (b, t) in enumerate(pairs) if b != t), len(block))
