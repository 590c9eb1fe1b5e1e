"""What a round with a draft tree costs on this machine; see `costs`, which keeps the figures."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING

from ..drafter.calibration import Calibration
from ..drafter.protocol import Drafter
from ..proposal import Proposal
from ..sampling import Sampler
from .costs import Costs
from .timing import TOKEN, Round, started, time_rounds

if TYPE_CHECKING:
    from ..targets import Target

MOST_ROWS = 64
ROWS = (4, 8, 16, 32, 48, MOST_ROWS)


def measure_trees(
    target: Target, drafter: Drafter, widest: int, kv_bits: int | None = None
) -> Costs:
    """Time a pair's rounds that draft trees whose paths have at most `widest` rows.

    Returns `Costs` of whole rounds, learning from the tree included: under `verify` those that
    verify so many rows of it, under `draft` those that verify its chain of favourites instead.
    """

    def begin(depth: int) -> Round:
        """Rounds of one request."""
        session, drafting = started(target, drafter, depth, kv_bits)
        calibration, sampler = Calibration(), Sampler()

        def play(rows: int) -> tuple[float]:
            """Seconds of a round of so many rows; 0 stands for the chain."""
            clock = time.perf_counter()
            tree = drafting.propose_tree(TOKEN, MOST_ROWS, widest, calibration)
            proposal = tree.propose(rows) if rows else tree.propose_chain(widest)
            if rows:  # of a shape that does not depend on what the drafter makes of such a text
                proposal = Proposal([TOKEN] * rows, _shape(rows, widest))
            logits, taps = session.verify(proposal)
            sampler.choose(proposal, logits)
            session.commit([0])
            drafting.extend(taps[:, :1])
            tree.learn([TOKEN] * tree.slots)
            return (time.perf_counter() - clock,)

        return play

    (seconds,) = time_rounds(target, (0, *ROWS), 2 * MOST_ROWS, begin)
    chains = {depth: {widest: of.pop(0)} for depth, of in seconds.items()}
    return Costs(seconds, chains)


def _shape(rows: int, widest: int) -> tuple[int, ...]:
    """The parents of a tree such as drafters make: a long path, and leaves along it."""
    path = min(widest - 1, 3 * rows // 4)
    return (-1, *(row - 1 if row <= path else (row - path - 1) % path for row in range(1, rows)))
