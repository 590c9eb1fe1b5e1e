"""z-lab's benchmark protocol (github.com/z-lab/dflash, dflash/benchmark.py).

Our own figures are medians over runs that take turns. A paper's figure is only comparable to one
that was measured by the same rules: same prompts, same lengths, same means.
"""

from __future__ import annotations

from collections.abc import Sequence
from random import Random
from statistics import fmean
from typing import Any

from .datasets import BenchPrompt
from .summary import MLX_LM, PLAIN, PromptRuns, chain_method, grouped

NAME = "zlab"
SEED, PROMPTS, MAX_TOKENS = 42, 128, 2048


def choose_prompts(suite: Sequence[BenchPrompt]) -> list[BenchPrompt]:
    """The first `PROMPTS` prompts of a shuffled suite; a smaller suite keeps its order."""
    chosen = list(suite)
    if len(chosen) > PROMPTS:
        Random(SEED).shuffle(chosen)
    return chosen[:PROMPTS]


def protocol_figures(measured: Sequence[PromptRuns]) -> dict[str, dict[str, Any]]:
    """The protocol's figures of each suite: means over answers, whatever their length.

    `speedup` and `over_mlx_lm` are mean seconds per token over those of drafting. They are None
    where that method did not run.
    """
    return {category: _figures(group) for category, group in grouped(measured).items()}


def _figures(answers: Sequence[PromptRuns]) -> dict[str, Any]:
    method = chain_method(answers[0].runs) or PLAIN
    drafted = _seconds_per_token(answers, method)

    def over(baseline: str) -> float | None:
        seconds = _seconds_per_token(answers, baseline)
        return seconds / drafted if seconds and drafted else None

    stats = [one.runs[method][0].stats for one in answers if method in one.runs]
    lengths = [one.acceptance_length for one in stats if one.rounds]
    return {
        "answers": len(answers),
        "speedup": over(PLAIN),
        "over_mlx_lm": over(MLX_LM),
        "acceptance_length": fmean(lengths) if lengths else None,
    }


def _seconds_per_token(answers: Sequence[PromptRuns], method: str) -> float | None:
    speeds = [one.runs[method][0].stats.tokens_per_second for one in answers if method in one.runs]
    return fmean(1 / speed for speed in speeds if speed) if any(speeds) else None
