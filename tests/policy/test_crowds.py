"""Crowds of requests on simulated machines: the policy, plain batching and whole blocks.

A crowd's texts begin together and end one by one. What a step costs is fixed, so no clock decides.
"""

import random
from collections.abc import Callable
from math import exp
from typing import NamedTuple

import pytest
from simulated import LONGEST, Session

from dflash_mlx.engine.allocation import RowAllocator
from dflash_mlx.policy import step_costs
from dflash_mlx.policy.draft_policy import DraftPolicy
from dflash_mlx.policy.planner import AdaptivePlanner
from dflash_mlx.proposal import Proposal

PROMPT = 20  # features that a request's first draft reads
TOKENS = 300  # of the longest text
LEARNED = 2  # crowds that a policy has seen before
NOISE = 0.03  # of the measured times
# How often a drafted token is right, if those before it are.
RATES = (0.0, 0.5, 0.8, 0.97)


class Machine(NamedTuple):
    """What a step costs, in plain steps of one request."""

    verify: Callable[[int], float]  # by rows
    draft: float
    request: float  # each request that drafts
    row: float  # each row of its block
    feature: float  # each feature that it reads first
    typical: tuple[float, float, float]  # what the policy expects before the first step

    def cost(self, widths: list[int], unread: int) -> float:
        drafting = [width for width in widths if width > 1]
        cost = self.verify(sum(widths))
        if drafting:
            cost += self.draft + self.request * len(drafting) + self.row * sum(drafting)
            cost += self.feature * unread
        return cost


MACHINES = {
    # As measured with the embedded pair.
    "CPU": Machine(
        lambda rows: 1 + 0.06 * min(rows - 1, 127) + 0.045 * max(0, rows - 128),
        draft=0.8,
        request=0.08,
        row=0.012,
        feature=0.015,
        typical=step_costs.CPU_COSTS,
    ),
    "GPU, flat to 16 rows": Machine(
        lambda rows: 1 + 0.06 * max(0, rows - 16),
        draft=0.12,
        request=0.01,
        row=0.004,
        feature=0.001,
        typical=step_costs.GPU_COSTS,
    ),
    "experts, of which more rows read more": Machine(
        lambda rows: 1 + 1.6 * (1 - exp(-(rows - 1) / 12)) + 0.012 * (rows - 1),
        draft=0.12,
        request=0.01,
        row=0.004,
        feature=0.001,
        typical=step_costs.GPU_COSTS,
    ),
}


class Text:
    """A request, and how many slots of a whole block are right at each of its tokens."""

    def __init__(self, policy: DraftPolicy, rate: float, luck: random.Random) -> None:
        self.planner = AdaptivePlanner(policy)
        self.session = Session()
        self.session.pending_features = PROMPT
        self.right = []
        for _ in range(int(TOKENS * luck.uniform(0.3, 1))):
            right = 0
            while right < LONGEST - 1 and luck.random() < rate:
                right += 1
            self.right.append(right)

    @property
    def width(self) -> int:
        return min(LONGEST, len(self.right))

    def take(self, rows: int) -> int:
        """Take a step of so many rows; the tokens that it brings."""
        tokens = 1 + min(self.right[0], rows - 1)
        del self.right[:tokens]
        self.session.pending_features *= rows == 1
        self.session.pending_features += tokens
        return tokens


def play(machine: Machine, rate: float, requests: int, seed: int, policy=None, width=1) -> float:
    """The cost of a crowd under a policy, or of drafts of at most this width."""
    luck = random.Random(seed)
    noise = random.Random(seed)
    texts = [Text(policy or DraftPolicy(LONGEST), rate, luck) for _ in range(requests)]
    clock = [0.0]
    spent = 0.0
    allocator = policy and RowAllocator(policy, lambda: clock[0])
    while texts:
        if policy is None:
            widths = [min(width, text.width) for text in texts]
        elif len(texts) == 1:
            widths = [len(texts[0].planner.propose(texts[0].session, 0, texts[0].width))]
        else:
            widths = allocator.allocate(
                [text.planner.candidate(text.session, 0, text.width) for text in texts]
            )
        drafting = [text for text, rows in zip(texts, widths, strict=True) if rows > 1]
        cost = machine.cost(widths, sum(text.session.pending_features for text in drafting))
        spent += cost
        seconds = cost * noise.gauss(1, NOISE)
        clock[0] += seconds
        tokens = [text.take(rows) for text, rows in zip(texts, widths, strict=True)]
        if policy is not None:
            for text, rows, count in zip(texts, widths, tokens, strict=True):
                if len(texts) == 1:
                    text.planner.observe(Proposal([0] * rows), [0] * count, seconds)
                else:
                    text.planner.observe_shared(Proposal([0] * rows), [0] * count)
            if len(texts) > 1:
                allocator.observe(tokens, pipelined=False)
        texts = [text for text in texts if text.right]
    return spent


@pytest.mark.parametrize("requests", [1, 2, 4, 8, 16, 32, 64])
@pytest.mark.parametrize("machine", MACHINES)
def test_the_policy_costs_no_more_than_plain_batching_and_whole_blocks(
    monkeypatch, machine, requests
):
    """Policies that have seen two other crowds. Steps of many requests cost more than expected, and
    so batches drafted too few rows, or too many, and learned of it in no crowd."""
    here = MACHINES[machine]
    monkeypatch.setattr(step_costs, "CPU_COSTS", here.typical)
    monkeypatch.setattr(step_costs, "GPU_COSTS", here.typical)
    shares = []
    for rate in RATES:
        policy = DraftPolicy(LONGEST)
        best = 0.0
        spent = 0.0
        for seed in range(LEARNED + max(2, 24 // requests)):
            cost = play(here, rate, requests, seed, policy)
            if seed < LEARNED:
                continue
            spent += cost
            plain = play(here, rate, requests, seed)
            blocks = play(here, rate, requests, seed, width=LONGEST)
            best += min(plain, blocks)
        shares.append(best / spent)
    # Probes cost one request of some 200 tokens a little more.
    assert min(shares) > (0.95 if requests == 1 else 0.97)
