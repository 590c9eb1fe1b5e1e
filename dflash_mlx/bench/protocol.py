"""Benchmarks as the papers make them: whose prompts, how many, how long, and which means.

Our own figures are medians over runs that take turns, which suits a machine that warms up. What a
paper says can only be compared with a figure that was made like it.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from random import Random
from statistics import fmean
from typing import Any

from .datasets import BenchPrompt
from .summary import MLX_LM, PLAIN, Measured, on_trial


@dataclass(frozen=True)
class Protocol:
    """How a group of papers measures.

    Attributes:
        seed: of the shuffle, which Python's own generator makes.
        prompts: that are kept of a suite; a suite of no more is not shuffled.
        max_tokens: of an answer.
    """

    seed: int
    prompts: int
    max_tokens: int

    def choose(self, prompts: Sequence[BenchPrompt]) -> list[BenchPrompt]:
        """The prompts of one suite that are measured."""
        chosen = list(prompts)
        if len(chosen) > self.prompts:
            Random(self.seed).shuffle(chosen)
        return chosen[: self.prompts]


# z-lab's benchmark (github.com/z-lab/dflash, dflash/benchmark.py), as its papers set it.
PROTOCOLS = {"zlab": Protocol(seed=42, prompts=128, max_tokens=2048)}


@dataclass(frozen=True)
class Figures:
    """A suite's figures by z-lab's means: every answer counts the same, however long it is.

    Attributes:
        answers: how many there were, each turn of a conversation one.
        speedup: mean seconds a token of plain decoding over those of drafting.
        over_mlx_lm: the same over mlx-lm's own decoding; None where it did not run.
        acceptance_length: the mean over answers of their tokens a round.
    """

    answers: int
    speedup: float | None
    over_mlx_lm: float | None
    acceptance_length: float | None


def figures(measured: Sequence[Measured]) -> Figures:
    """The figures of one suite, from the first run of each answer in each way."""
    trial = on_trial(measured[0].runs) or PLAIN
    drafted = _seconds_a_token(measured, trial)

    def over(way: str) -> float | None:
        base = _seconds_a_token(measured, way)
        return base / drafted if base and drafted else None

    rounds = [one.runs[trial][0].stats for one in measured if trial in one.runs]
    lengths = [stats.acceptance_length for stats in rounds if stats.rounds]
    return Figures(
        answers=len(measured),
        speedup=over(PLAIN),
        over_mlx_lm=over(MLX_LM),
        acceptance_length=fmean(lengths) if lengths else None,
    )


def as_json(measured: Sequence[Measured]) -> dict[str, Any]:
    """The figures of each category, in the order in which they first appear."""
    groups: dict[str, list[Measured]] = {}
    for one in measured:
        groups.setdefault(one.prompt.category, []).append(one)
    return {category: asdict(figures(group)) for category, group in groups.items()}


def _seconds_a_token(measured: Sequence[Measured], way: str) -> float | None:
    """The mean over answers of a way's seconds a token; None where it did not run."""
    speeds = [one.runs[way][0].stats.tokens_per_second for one in measured if way in one.runs]
    return fmean(1 / speed for speed in speeds if speed) if any(speeds) else None
