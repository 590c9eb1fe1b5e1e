"""Sum up the runs of many prompts: one row per category, one for all prompts."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from statistics import fmean, median
from typing import Any

import numpy as np

from ..events import Result
from .datasets import BenchPrompt

# Names of decoding methods. Drafting with chains goes by the drafter's label ("DFlash", "lookup").
PLAIN, DDTREE, MLX_LM, SERVER = "plain", "DDTree", "mlx-lm", "server"
BASELINES = (PLAIN, MLX_LM, SERVER)


def drafting_methods(methods: Iterable[str]) -> list[str]:
    """The methods that draft, chains before trees."""
    return sorted((name for name in methods if name not in BASELINES), key=DDTREE.__eq__)


def chain_method(methods: Iterable[str]) -> str | None:
    """The method that drafts chains; None without a drafter."""
    return next((name for name in drafting_methods(methods) if name != DDTREE), None)


@dataclass(frozen=True)
class Difference:
    """Where a text departs from the plain one.

    Attributes:
        token: the first position that differs.
        plain, other: token ids there; None where that text has already ended.
        logit_gap: the target's logit of `plain` minus that of `other`, from a separate forward.
            Near 0 it is a tie that rounding decides. None where a text has ended.
    """

    token: int
    plain: int | None
    other: int | None
    logit_gap: float | None


@dataclass(frozen=True)
class PromptRuns:
    """A prompt and all runs of it.

    Attributes:
        prompt: the question.
        runs: runs by method, in the order in which they were made.
        differences: by method, where its text departs from the plain one; None if it does not. A
            method whose texts are not compared has no entry.
    """

    prompt: BenchPrompt
    runs: Mapping[str, Sequence[Result]]
    differences: Mapping[str, Difference | None] = field(default_factory=dict)

    @property
    def main(self) -> Result:
        """The first drafted run, or the first run of all without a drafter."""
        return self.runs[chain_method(self.runs) or next(iter(self.runs))][0]

    @property
    def exact(self) -> bool | None:
        """Whether the text is the known answer; None if none is known."""
        if self.prompt.answer is None:
            return None
        return self.main.text.strip() == self.prompt.answer.strip()

    def speedups(self, method: str) -> list[float]:
        """The speed of each run over the plain run of the same turn."""
        pairs = zip(self.runs.get(method, ()), self.runs.get(PLAIN, ()), strict=False)
        speeds = ((a.stats.tokens_per_second, b.stats.tokens_per_second) for a, b in pairs)
        return [speed / plain if plain else 1.0 for speed, plain in speeds]


@dataclass(frozen=True)
class Spread:
    """A median with quartiles: half of the values lie between `low` and `high`."""

    low: float
    median: float
    high: float

    @classmethod
    def of(cls, values: Iterable[float]) -> Spread | None:
        """The spread of some values; None without any."""
        found = list(values)
        return cls(*np.quantile(found, (0.25, 0.5, 0.75)).tolist()) if found else None


@dataclass(frozen=True)
class MethodSummary:
    """The figures of one decoding method over all runs of some prompts.

    Attributes:
        tokens_per_second: decoding speed, without the prefill; 0 where no run could be timed.
        first_token_seconds: time to the first token, with the prefill.
        speedup: over the plain run of the same turn; None where there is no plain run.
        acceptance_length: output tokens per verify forward, over all steps together.
        accepted: accepted draft tokens of a step -> number of steps, in one run of each prompt.
        peak_bytes: the most memory that any run took; None for another process.
        identical: prompts whose texts all equal the plain one; None where texts are not compared.
    """

    tokens_per_second: Spread
    first_token_seconds: Spread
    speedup: Spread | None
    acceptance_length: float | None
    accepted: dict[int, int]
    peak_bytes: int | None
    identical: int | None


@dataclass(frozen=True)
class CategorySummary:
    """The figures of some prompts, by method."""

    category: str
    prompts: int
    prompt_tokens: float  # median
    output_tokens: int  # of one run of each prompt
    exact: int | None  # prompts answered with the known answer
    with_answer: int  # prompts that have a known answer
    methods: dict[str, MethodSummary]


def summarize(category: str, measured: Sequence[PromptRuns]) -> CategorySummary:
    """Sum up at least one prompt."""
    stats = [one.main.stats for one in measured]
    exact = [one.exact for one in measured if one.exact is not None]
    return CategorySummary(
        category=category,
        prompts=len(measured),
        prompt_tokens=median(one.prompt_tokens for one in stats),
        output_tokens=sum(one.output_tokens for one in stats),
        exact=sum(exact) if exact else None,
        with_answer=len(exact),
        methods={name: _summarize_method(name, measured) for name in measured[0].runs},
    )


def _summarize_method(name: str, measured: Sequence[PromptRuns]) -> MethodSummary:
    runs = [run.stats for one in measured for run in one.runs[name]]
    first_runs = [one.runs[name][0].stats for one in measured]
    compared = [one.differences[name] for one in measured if name in one.differences]
    steps = sum(stats.rounds for stats in first_runs)
    timed = [stats.tokens_per_second for stats in runs if stats.decode_seconds]
    speeds = Spread.of(timed or [0.0])
    waits = Spread.of(stats.first_token_seconds for stats in runs)
    assert speeds and waits  # every method has run
    return MethodSummary(
        tokens_per_second=speeds,
        first_token_seconds=waits,
        speedup=Spread.of(speedup for one in measured for speedup in one.speedups(name)),
        acceptance_length=sum(s.round_tokens for s in first_runs) / steps if steps else None,
        accepted=dict(sorted(Counter(n for s in first_runs for n in s.accepted_per_round).items())),
        peak_bytes=max(stats.peak_bytes for stats in runs) or None,
        identical=sum(difference is None for difference in compared) if compared else None,
    )


def grouped(measured: Sequence[PromptRuns]) -> dict[str, list[PromptRuns]]:
    """The prompts by category, in the order in which categories first appear."""
    groups: dict[str, list[PromptRuns]] = {}
    for one in measured:
        groups.setdefault(one.prompt.category, []).append(one)
    return groups


def differences(measured: Sequence[PromptRuns]) -> list[dict[str, Any]]:
    """Every prompt and method whose text is not the plain one, as JSON holds it."""
    return [
        {"category": one.prompt.category, "prompt": one.prompt.question, "method": name}
        | asdict(difference)
        for one in measured
        for name, difference in one.differences.items()
        if difference is not None
    ]


def protocol_figures(measured: Sequence[PromptRuns]) -> dict[str, dict[str, Any]]:
    """The figures of each suite by z-lab's protocol: means over answers, whatever their length.

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
