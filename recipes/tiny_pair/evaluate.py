"""Scores of a pair on prompts it never saw: acceptance length and exact answers, by category."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

from dflash_mlx.drafter.dflash import DFlash
from dflash_mlx.loop import generate
from dflash_mlx.targets import Target


@dataclass
class Score:
    """Sums over the prompts of one category."""

    prompts: int = 0
    exact: int = 0  # answers equal to the expected text
    identical: int = 0  # answers whose drafted tokens equal the plain ones
    tokens: int = 0  # that the rounds wrote
    rounds: int = 0

    @property
    def acceptance_length(self) -> float:
        """Tokens per verify round over all prompts together."""
        return self.tokens / self.rounds if self.rounds else 0.0

    def __add__(self, other: Score) -> Score:
        return Score(
            self.prompts + other.prompts,
            self.exact + other.exact,
            self.identical + other.identical,
            self.tokens + other.tokens,
            self.rounds + other.rounds,
        )


def evaluate(
    target: Target, drafter: DFlash | None, prompts: Iterable[dict[str, Any]], max_tokens: int = 256
) -> dict[str, Score]:
    """Greedily answer every prompt, drafted and plainly.

    Args:
        prompts: records of prompts.jsonl: "category", "answer" and "messages" or "prompt".
        drafter: None answers plainly only.
        max_tokens: of each answer.

    Returns:
        Scores by category.
    """
    scores: dict[str, Score] = {}
    for record in prompts:
        messages = record.get("messages") or [{"role": "user", "content": record["prompt"]}]
        plain = generate(target, None, messages, max_tokens=max_tokens)
        drafted = generate(target, drafter, messages, max_tokens=max_tokens) if drafter else plain
        scores[record["category"]] = scores.get(record["category"], Score()) + Score(
            prompts=1,
            exact=int(plain.text.strip() == record["answer"].strip()),
            identical=int(plain.tokens == drafted.tokens),
            tokens=drafted.stats.round_tokens,
            rounds=drafted.stats.rounds,
        )
    return scores


def total(scores: dict[str, Score]) -> Score:
    """The sum over all categories."""
    return sum(scores.values(), Score())
