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

LONGEST = 16  # the most rows of a step
Drafter = Callable[[int, int], float]  # (token, slot) -> probability that the slot's token is right


class Machine:
    """The time of steps: a plain one takes a millisecond, others depend on their rows.

    Args:
        verify, draft: costs in plain steps by rows, interpolated between the given ones.
        noise: the standard deviation of the logarithm of a step's time.
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
    """A session that drafts the anchor again and again; the tests say how much is accepted."""

    def extend(self, taps, kept=None, tokens=()) -> None:
        raise NotImplementedError

    def propose(self, anchor: int, width: int) -> Proposal:
        return Proposal([anchor] * width)


def text_of(drafter: Drafter, tokens: int, seed: int = 0) -> list[int]:
    """A random text: for each token, how many tokens of a full draft at it would be right."""
    rng = random.Random(seed)
    text = []
    for token in range(tokens):
        right = 0
        while right < LONGEST - 1 and rng.random() < drafter(token, right):
            right += 1
        text.append(right)
    return text


def simulate(policy: DraftPolicy, machine: Machine, text: Sequence[int]) -> tuple[float, list[int]]:
    """Decode a text with a policy's lengths: the cost in plain steps, and the rows of each step."""
    planner = AdaptivePlanner(policy)
    tokens = 0
    cost = 0.0
    rows = []
    while tokens < len(text):
        proposal = planner.propose(Session(), 0, min(LONGEST, len(text) - tokens))
        accepted = min(text[tokens], len(proposal) - 1)
        seconds = machine.seconds(len(proposal))
        planner.observe(proposal, [0] * (accepted + 1), seconds)
        tokens = tokens + accepted + 1
        cost = cost + machine.costs[len(proposal) - 1]
        rows.append(len(proposal))
    return cost, rows


def fixed_cost(length: int, machine: Machine, text: Sequence[int]) -> float:
    """The cost of a text in plain steps if every step has `length` rows."""
    tokens = 0
    cost = 0.0
    while tokens < len(text):
        rows = min(length, len(text) - tokens)
        tokens = tokens + 1 + min(text[tokens], rows - 1)
        cost = cost + machine.costs[rows - 1]
    return cost


class GivenCosts(StepCosts):
    """Fixed costs, which the times of real steps do not change.

    Args:
        row, draft: costs of a further row and of a draft, in plain steps.
        tree: the cost of a further row in a tree; None: that in a chain.
    """

    def __init__(self, row: float, draft: float, tree: float | None = None) -> None:
        super().__init__()
        tree = row if tree is None else tree
        self._lines = {"chain": (draft, row), "lookup": (0.0, row), "tree": (draft, tree)}

    def costs(self, kind: str, rows: Sequence[int], requests: int = 1) -> list[float]:
        draft, row = self._lines[kind]
        return [1 + draft + row * (count / requests - 1) for count in rows]

    def needs_plain_step(self, requests: int = 1) -> bool:
        return False


def policy_with_costs(
    longest: int, row: float, draft: float = 0.1, trees: bool = False, tree: float | None = None
) -> DraftPolicy:
    """A policy with `GivenCosts`."""
    policy = DraftPolicy(longest, trees)
    policy.costs = GivenCosts(row, draft, tree)
    return policy
