"""Chains against draft trees: tokens per round by category, and tokens per second, paired.

Every way to draft decodes each prompt in turn, in the opposite order of the last turn. What a
policy learns it keeps from prompt to prompt, as in a conversation, and forgets before the same
prompts come again. At temperature 1 the fixed sizes run once more, with the noise of the target's
choices in their scores and without.
"""

from __future__ import annotations

from collections.abc import Sequence
from copy import deepcopy
from dataclasses import dataclass, field
from statistics import median
from typing import Any

import mlx.core as mx

from ..drafter.protocol import Drafter
from ..events import Result
from ..loop import generate
from ..policy.fixed import FixedWidth
from ..policy.rounds import AnyPolicy
from ..policy.trees import TreePolicy, tree_policy
from ..sampling import Sampler
from ..targets import Target
from .summary import Spread

PLAIN, CHAIN, AUTO = "plain", "chain", "auto"
NOISY = 1.0  # the temperature at which the noise is given and kept back


@dataclass
class TreeRow:
    """One way to draft.

    Attributes:
        way: "plain", "chain", a number of rows, or "auto".
        tokens_per_round: by category, and of all together under "all".
        tokens_per_second: the median of all runs, `low` and `high` the quartiles around it.
        over_plain: the median of its paired speeds over plain decoding's.
        auto_over: the median of the paired speeds of "auto" over its own.
        with_noise, without_noise: tokens per round at temperature `NOISY`; None but for trees of
            a fixed size.
        identical: runs whose text was plain decoding's, of `runs`.
    """

    way: str
    tokens_per_round: dict[str, float] = field(default_factory=dict)
    tokens_per_second: float = 0.0
    low: float = 0.0
    high: float = 0.0
    over_plain: float = 1.0
    auto_over: float = 1.0
    with_noise: float | None = None
    without_noise: float | None = None
    identical: int = 0
    runs: int = 0


def tree_rows(
    target: Target,
    drafter: Drafter,
    prompts: Sequence[tuple[str, list[int]]],
    budgets: Sequence[int],
    max_tokens: int,
    repeats: int,
) -> list[TreeRow]:
    """A row for plain decoding, chains, trees of each size, and the policy's choice.

    Args:
        target, drafter: a pair that can have trees, or "auto" drafts chains.
        prompts: (category, token ids) each.
        budgets: rows of the trees, the anchor included.
        max_tokens: of each answer.
        repeats: runs of each prompt in each way.

    Raises `SettingsError` when the pair cannot have trees.
    """
    policies: dict[str, AnyPolicy] = {CHAIN: FixedWidth()}
    policies |= {str(rows): TreePolicy.fixed(rows) for rows in budgets}
    policies[AUTO] = tree_policy(target, drafter, again=True)
    rows = {way: TreeRow(way) for way in (PLAIN, *policies)}
    runs: dict[str, list[Result]] = {way: [] for way in rows}
    for number in range(repeats):
        learning = deepcopy(policies)
        for turn, (_, prompt) in enumerate(prompts, start=number):
            for way in reversed(rows) if turn % 2 else rows:
                drafts = None if way == PLAIN else drafter
                policy = learning.get(way)
                run = generate(target, drafts, prompt, policy=policy, max_tokens=max_tokens)
                runs[way].append(run)
    categories = [category for category, _ in prompts] * repeats
    for way, row in rows.items():
        _sum_up(row, categories, runs[way], runs[PLAIN], runs[AUTO])
    for size in budgets:
        row = rows[str(size)]
        noise = {"temperature": NOISY, "max_tokens": max_tokens}
        row.with_noise = _length(target, drafter, prompts, TreePolicy.fixed(size), noise)
        row.without_noise = _length(target, Blind(drafter), prompts, TreePolicy.fixed(size), noise)
    return list(rows.values())


def _sum_up(
    row: TreeRow,
    categories: Sequence[str],
    runs: Sequence[Result],
    plain: Sequence[Result],
    auto: Sequence[Result],
) -> None:
    for category in dict.fromkeys(categories):
        chosen = [run for of, run in zip(categories, runs, strict=True) if of == category]
        row.tokens_per_round[category] = _tokens_per_round(chosen)
    row.tokens_per_round["all"] = _tokens_per_round(runs)
    if speeds := Spread.of(map(_speed, runs)):
        row.low, row.tokens_per_second, row.high = speeds.low, speeds.median, speeds.high
    row.over_plain = median(
        _speed(run) / _speed(other) for run, other in zip(runs, plain, strict=True)
    )
    row.auto_over = median(_speed(run) / _speed(own) for run, own in zip(auto, runs, strict=True))
    row.identical = sum(run.tokens == other.tokens for run, other in zip(runs, plain, strict=True))
    row.runs = len(runs)


def _length(
    target: Target,
    drafter: Drafter,
    prompts: Sequence[tuple[str, list[int]]],
    policy: TreePolicy,
    settings: dict[str, Any],
) -> float:
    """Tokens per round over the prompts, each with a seed of its own."""
    return _tokens_per_round(
        [
            generate(target, drafter, prompt, policy=policy, seed=seed, **settings)
            for seed, (_, prompt) in enumerate(prompts)
        ]
    )


def _tokens_per_round(runs: Sequence[Result]) -> float:
    return sum(run.stats.round_tokens for run in runs) / max(
        1, sum(run.stats.rounds for run in runs)
    )


def _speed(run: Result) -> float:
    return run.stats.tokens_per_second


class Blind:
    """A drafter whose trees are ranked without the noise of the target's choices, as DDTree's."""

    drafts_trees = True

    def __init__(self, drafter: Any) -> None:
        self.drafter, self.tap_layers = drafter, drafter.tap_layers

    def start(self, target: Target, sampler: Sampler) -> Any:
        return self.drafter.start(target, _Noiseless(sampler.settings))


class _Noiseless(Sampler):
    """Sees the drafter's log-probabilities and nothing of the noise."""

    def foresee(self, logits: mx.array) -> tuple[mx.array, mx.array | None]:
        log_q, _ = super().foresee(logits)
        return log_q, None
