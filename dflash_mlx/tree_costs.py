"""What a round with a draft tree costs on this machine; see `costs`, which keeps the figures."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING, Any

from .costs import DEPTHS, REPEATS, Costs
from .drafter.calibration import Calibration
from .proposal import Proposal

if TYPE_CHECKING:
    from .target import Target

MOST_ROWS = 64
ROWS = (4, 8, 16, 32, 48, MOST_ROWS)


def measure_trees(target: Target, drafter: Any, widest: int, kv_bits: int | None = None) -> Costs:
    """Time a pair's rounds of trees whose paths have at most `widest` rows.

    `draft` holds one number of rows, the largest: smaller trees are cut from it.
    """
    deepest = target.context_length - 2 * MOST_ROWS - 2 * len(ROWS) * (REPEATS + 1)
    verify, draft = {}, {}
    for depth in sorted({max(2, min(depth, deepest)) for depth in DEPTHS}):
        verify[depth], draft[depth] = _measure_at(target, drafter, depth, widest, kv_bits)
    return Costs(verify, draft)


def _measure_at(
    target: Target, drafter: Any, depth: int, widest: int, kv_bits: int | None
) -> tuple[dict[int, float], dict[int, float]]:
    """The quickest draft, and the quickest verify of each size, one size after another."""
    from .sampling import Sampler

    token, calibration, sampler = 1, Calibration(), Sampler()
    session, drafting = target.start(drafter.tap_layers, kv_bits), drafter.start(target, sampler)
    for taps in session.prefill([token] * depth):
        drafting.extend(taps)
    verify, drafts = dict.fromkeys(ROWS, float("inf")), []
    for rows in [*ROWS, *reversed(ROWS)]:
        for repeat in range(REPEATS + 1):
            clock = time.perf_counter()
            tree = drafting.propose_tree(token, MOST_ROWS, widest, calibration)
            tree.learn([token] * tree.slots)
            drafts.append(time.perf_counter() - clock)
            clock = time.perf_counter()
            proposal = Proposal([token] * rows, _shape(rows, widest))
            logits, taps = session.verify(proposal)
            sampler.choose(proposal, logits)
            session.commit([0])
            verified = time.perf_counter() - clock
            drafting.extend(taps[:, :1])
            if repeat:  # the first one warms up
                verify[rows] = min(verify[rows], verified)
    return verify, {MOST_ROWS: min(drafts)}


def _shape(rows: int, widest: int) -> tuple[int, ...]:
    """The parents of a tree such as drafters make: a long path, and leaves along it."""
    path = min(widest - 1, 3 * rows // 4)
    return (-1, *(row - 1 if row <= path else (row - path - 1) % path for row in range(1, rows)))
