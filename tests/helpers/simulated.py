"""A simulated machine and drafter for the policy: no model runs, and no clock."""

from __future__ import annotations

import random
from collections.abc import Callable, Mapping, Sequence

import numpy as np

from dflash_mlx.drafter.protocol import DraftSession
from dflash_mlx.policy.draft_policy import DraftPolicy
from dflash_mlx.policy.planner import AdaptivePlanner
from dflash_mlx.policy.step_costs import StepCosts
from dflash_mlx.proposal import Proposal

LONGEST = 16
Drafter = Callable[[int, int], float]  # (token, slot) -> how often that slot is right


class Machine:
    """What steps take: plain ones a millisecond, others by their rows.

    Args:
        verify, draft: costs in plain steps, by rows; lines in between.
        noise: standard deviation of a step's log.
    """

    def __init__(
        self, verify: Mapping[int, float], draft: Mapping[int, float], noise: float = 0.05
    ) -> None:
        rows = np.arange(1, LONGEST + 1)
        verify = {1: 1.0} | dict(verify)
        curve = np.interp(rows, list(verify), list(verify.values()))
        curve[1:] += np.interp(rows, list(draft), list(draft.values()))[1:]
        self.costs: list[float] = curve.tolist()
        self.noise = noise
        self.random = random.Random(0)

    def seconds(self, rows: int) -> float:
        return 1e-3 * self.costs[rows - 1] * float(np.exp(self.random.gauss(0, self.noise)))


class Session(DraftSession):
    """Drafts any tokens."""

    def extend(self, taps, kept=None, tokens=()) -> None:
        raise NotImplementedError

    def propose(self, anchor: int, width: int) -> Proposal:
        return Proposal([anchor] * width)


def text_of(drafter: Drafter, tokens: int, seed: int = 0) -> list[int]:
    """How many slots of a whole draft would be right at each token."""
    luck = random.Random(seed)
    text = []
    for token in range(tokens):
        right = 0
        while right < LONGEST - 1 and luck.random() < drafter(token, right):
            right += 1
        text.append(right)
    return text


def play(policy: DraftPolicy, machine: Machine, text: Sequence[int]) -> tuple[float, list[int]]:
    """The cost of a text in plain steps, and the rows of each step."""
    planner = AdaptivePlanner(policy)
    done = 0
    spent = 0.0
    rows = []
    while done < len(text):
        proposal = planner.propose(Session(), 0, min(LONGEST, len(text) - done))
        accepted = min(text[done], len(proposal) - 1)
        seconds = machine.seconds(len(proposal))
        planner.observe(proposal, [0] * (accepted + 1), seconds)
        done = done + accepted + 1
        spent = spent + machine.costs[len(proposal) - 1]
        rows.append(len(proposal))
    return spent, rows


def fixed_cost(length: int, machine: Machine, text: Sequence[int]) -> float:
    """The cost of a text in plain steps if every step has so many rows."""
    done = 0
    spent = 0.0
    while done < len(text):
        rows = min(length, len(text) - done)
        done = done + 1 + min(text[done], rows - 1)
        spent = spent + machine.costs[rows - 1]
    return spent


class GivenCosts(StepCosts):
    """Costs that no step changes: real steps of made-up models take other times."""

    def __init__(self, row: float, draft: float, tree: float | None = None) -> None:
        super().__init__()
        tree = row if tree is None else tree
        self._lines = {"chain": (draft, row), "lookup": (0.0, row), "tree": (draft, tree)}

    def costs(self, kind: str, rows: Sequence[int], requests: int = 1) -> list[float]:
        draft, row = self._lines[kind]
        return [1 + draft + row * (row_cost / requests - 1) for row_cost in rows]

    def needs_plain_step(self, requests: int = 1) -> bool:
        return False


def policy_with_costs(
    longest: int, row: float, draft: float = 0.1, trees: bool = False, tree: float | None = None
) -> DraftPolicy:
    """A policy for which a further row, of a chain or tree, and a draft have these costs."""
    policy = DraftPolicy(longest, trees)
    policy.costs = GivenCosts(row, draft, tree)
    return policy
