"""What a round with a draft tree costs on this machine; see `costs`, which keeps the figures."""

from __future__ import annotations

import time
from statistics import median
from typing import TYPE_CHECKING

from ..drafter.calibration import Calibration
from ..drafter.protocol import Drafter, TreeDrafter
from ..proposal import Proposal
from ..sampling import Sampler
from .costs import DEPTHS, REPEATS, Costs

if TYPE_CHECKING:
    from ..target import Target

MOST_ROWS = 64
ROWS = (4, 8, 16, 32, 48, MOST_ROWS)


def measure_trees(
    target: Target, drafter: Drafter, widest: int, kv_bits: int | None = None
) -> Costs:
    """Time a pair's rounds that draft trees whose paths have at most `widest` rows.

    Returns `Costs` of whole rounds, learning from the tree included: under `verify` those that
    verify so many rows of it, under `draft` those that verify its chain of favourites instead.
    """
    deepest = target.context_length - 2 * MOST_ROWS - 2 * (len(ROWS) + 1) * (REPEATS + 1)
    trees, chains = {}, {}
    for depth in sorted({max(2, min(depth, deepest)) for depth in DEPTHS}):
        seconds = _measure_at(target, drafter, depth, widest, kv_bits)
        chains[depth] = {widest: seconds.pop(0)}
        trees[depth] = seconds
    return Costs(trees, chains)


def _measure_at(
    target: Target, drafter: Drafter, depth: int, widest: int, kv_bits: int | None
) -> dict[int, float]:
    """The median round of each size, one size after another; 0 stands for the chain."""
    token, calibration, sampler = 1, Calibration(), Sampler()
    assert isinstance(drafter, TreeDrafter)  # tree_policy has seen to it
    session, drafting = target.start(drafter.tap_layers, kv_bits), drafter.start(target, sampler)
    for _, taps in session.prefill([token] * depth):
        drafting.extend(taps)
    samples: dict[int, list[float]] = {rows: [] for rows in (0, *ROWS)}
    for rows in [*samples, *reversed(samples)]:
        for repeat in range(REPEATS + 1):
            clock = time.perf_counter()
            tree = drafting.propose_tree(token, MOST_ROWS, widest, calibration)
            proposal = tree.propose(rows) if rows else tree.propose_chain(widest)
            if rows:  # of a shape that does not depend on what the drafter makes of such a text
                proposal = Proposal([token] * rows, _shape(rows, widest))
            logits, taps = session.verify(proposal)
            sampler.choose(proposal, logits)
            session.commit([0])
            drafting.extend(taps[:, :1])
            tree.learn([token] * tree.slots)
            if repeat:  # the first one warms up
                samples[rows].append(time.perf_counter() - clock)
    return {rows: median(seconds) for rows, seconds in samples.items()}


def _shape(rows: int, widest: int) -> tuple[int, ...]:
    """The parents of a tree such as drafters make: a long path, and leaves along it."""
    path = min(widest - 1, 3 * rows // 4)
    return (-1, *(row - 1 if row <= path else (row - path - 1) % path for row in range(1, rows)))
