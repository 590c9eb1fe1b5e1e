"""From the runs of many prompts to the figures people read: one row per category, one for all."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from statistics import median
from typing import Any

from ..prompt import encode_prompt
from ..target import Target
from .datasets import BenchPrompt
from .measure import Comparison
from .overhead import raw_forwards


@dataclass(frozen=True)
class Measured:
    """A prompt and what was measured on it.

    Attributes:
        prompt: what was asked.
        runs: the contestants' runs.
        overhead_seconds: per round, beyond the bare forwards; None where nothing was drafted.
    """

    prompt: BenchPrompt
    runs: Comparison
    overhead_seconds: float | None = None

    @property
    def exact(self) -> bool | None:
        """Whether the drafted text is the known answer; None if none is known."""
        if self.prompt.answer is None:
            return None
        return self.runs.drafted[0].text.strip() == self.prompt.answer.strip()


@dataclass(frozen=True)
class Row:
    """The figures of some prompts.

    Speeds are medians over the prompts, in tokens per second; `speedup` is the median of the
    prompts' own speedups, so it need not be the quotient of the two medians beside it.
    """

    category: str
    prompts: int
    output_tokens: int  # of one drafted run of each prompt
    acceptance_length: float  # output tokens per verify forward, over all rounds together
    plain_tokens_per_second: float
    drafted_tokens_per_second: float
    mlx_lm_tokens_per_second: float | None
    speedup: float
    identical: int  # prompts whose drafted tokens are the plain ones
    identical_to_mlx_lm: int | None  # prompts whose plain tokens are mlx-lm's
    exact: int | None  # prompts answered with the known answer
    with_answer: int  # prompts that have one
    overhead_ms_per_round: float | None


def measure(
    target: Target,
    drafter: Any,
    prompt: BenchPrompt,
    max_tokens: int,
    block_size: int | None,
    repeats: int,
) -> Measured:
    """Decode one prompt `repeats` times in each way, and time its rounds' bare forwards as often.

    Raises `PromptError` for a prompt that does not fit the target.
    """
    ids = encode_prompt(target, prompt.messages)
    runs = Comparison(target, drafter, ids, max_tokens, block_size)
    overheads = []
    for _ in range(repeats):
        runs.run_pair()
        runs.run_mlx_lm()
        drafted = runs.drafted[-1]
        if drafted.stats.rounds:
            raw = raw_forwards(target, drafter, ids, drafted, max_tokens)
            overheads.append(raw.overhead(drafted.stats.decode_seconds))
    return Measured(prompt, runs, median(overheads) if overheads else None)


def summarize(category: str, measured: Sequence[Measured]) -> Row:
    """The row of these prompts, of which there is at least one."""
    runs = [one.runs for one in measured]
    drafted = [run.drafted[0].stats for run in runs]
    mlx_lm = [run.mlx_lm_speed for run in runs if run.mlx_lm_speed is not None]
    exact = [one.exact for one in measured if one.exact is not None]
    overheads = [one.overhead_seconds for one in measured if one.overhead_seconds is not None]
    return Row(
        category=category,
        prompts=len(measured),
        output_tokens=sum(stats.output_tokens for stats in drafted),
        acceptance_length=sum(stats.output_tokens for stats in drafted)
        / max(1, sum(stats.rounds for stats in drafted)),
        plain_tokens_per_second=median(run.plain_speed for run in runs),
        drafted_tokens_per_second=median(run.drafted_speed for run in runs),
        mlx_lm_tokens_per_second=median(mlx_lm) if mlx_lm else None,
        speedup=median(run.speedup for run in runs),
        identical=sum(run.first_difference is None for run in runs),
        identical_to_mlx_lm=sum(run.first_difference_mlx_lm is None for run in runs)
        if mlx_lm
        else None,
        exact=sum(exact) if exact else None,
        with_answer=len(exact),
        overhead_ms_per_round=1e3 * median(overheads) if overheads else None,
    )


def by_category(measured: Sequence[Measured]) -> list[Row]:
    """One row per category, in the order in which the categories first appear."""
    groups: dict[str, list[Measured]] = {}
    for one in measured:
        groups.setdefault(one.prompt.category, []).append(one)
    return [summarize(category, group) for category, group in groups.items()]


def differences(measured: Sequence[Measured]) -> list[dict[str, Any]]:
    """Every prompt whose drafted tokens are not the plain ones, with the first such position."""
    return [
        {"category": one.prompt.category, "prompt": one.prompt.messages[-1]["content"], "token": at}
        for one in measured
        if (at := one.runs.first_difference) is not None
    ]
