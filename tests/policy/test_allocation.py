"""Rows of a batch on simulated machines: what they bring, and that drafting never costs a batch."""

import random

import pytest
from simulated import LONGEST

from dflash_mlx.engine.allocation import RowAllocator
from dflash_mlx.policy.draft_policy import DraftPolicy
from dflash_mlx.policy.estimates import AcceptanceEstimates
from dflash_mlx.policy.planner import DraftCandidate

TOKENS = 300


class Text:
    """A request, and how often its drafts are right."""

    def __init__(self, rate: float) -> None:
        self.rate, self.tokens, self.estimates = rate, 0.0, AcceptanceEstimates(LONGEST - 1)


def play(rates: list[float], draft: float, row: float) -> tuple[float, float]:
    """Tokens per plain step and request of a batch, and those of the best fixed draft length.

    Args:
        rates: how often each request's drafts are right.
        draft, row: what a drafted step costs, and a further row of every request, in plain steps.
    """

    def cost(rows: float) -> float:
        return 1 + (rows > 0) * draft + row * rows

    seconds, luck, texts = [0.0], random.Random(0), [Text(rate) for rate in rates]
    count = len(texts)
    allocator = RowAllocator(DraftPolicy(LONGEST), lambda: seconds[0])
    while (tokens := sum(text.tokens for text in texts)) < TOKENS * count:
        candidates = [DraftCandidate(text.estimates.path_probs) for text in texts]
        drafted = [rows - 1 for rows in allocator.allocate(texts, candidates)]
        seconds[0] += cost(sum(drafted) / count) * luck.gauss(1, 0.02)
        brought = []
        for text, rows in zip(texts, drafted, strict=True):
            right = 0
            while right < rows and luck.random() < text.rate:
                right += 1
            text.estimates.learn(rows, right) if rows else text.estimates.fade()
            text.tokens += right + 1
            brought.append((text, right + 1))
        allocator.observe(brought, pipelined=False)
    fixed = [
        sum(rate**slot for rate in rates for slot in range(length + 1)) / cost(length) / count
        for length in (0, 1, 3, 7, 15)
    ]
    return tokens / seconds[0] / count, max(fixed)


@pytest.mark.parametrize("requests", [2, 8, 32, 64])
@pytest.mark.parametrize("rate", [0.0, 0.4, 0.7, 0.9])
@pytest.mark.parametrize("draft, row", [(0.3, 0.05), (0.3, 0.5), (0.8, 0.3), (0.6, 0.8)])
def test_a_batch_is_hardly_slower_than_plain(requests, rate, draft, row):
    """It drafted on, at 0.84 of plain, as a few rows of all seemed to cost no draft."""
    speed, _ = play([rate] * requests, draft, row)
    assert speed > (0.93 if requests == 2 else 0.97)


@pytest.mark.parametrize("requests, least", [(2, 0.85), (8, 0.6)])
def test_a_batch_drafts_where_it_pays(requests, least):
    speed, best = play([0.9] * requests, draft=0.3, row=0.05)
    assert speed > least * best


def test_rows_go_to_the_requests_whose_drafts_are_right():
    speed, best = play([0.95] * 2 + [0.0] * 6, draft=0.1, row=0.2)
    assert speed > 1.02 * best
