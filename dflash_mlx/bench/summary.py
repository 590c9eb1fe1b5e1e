"""From the runs of many prompts to the figures people read: one row per category, one for all."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from statistics import median, quantiles
from typing import Any

from ..events import Result
from .datasets import BenchPrompt

# The ways to decode that are compared; one more, on trial, is called by what drafts.
PLAIN, DDTREE, MLX_LM, SERVER = "plain", "DDTree", "mlx-lm", "server"
BASELINES = (PLAIN, MLX_LM, SERVER)


def drafting(ways: Iterable[str]) -> list[str]:
    """Those of some ways that draft, chains before trees."""
    return sorted((way for way in ways if way not in BASELINES), key=DDTREE.__eq__)


def on_trial(ways: Iterable[str]) -> str | None:
    """The one of some ways that drafts chains; None without a drafter."""
    return next((way for way in drafting(ways) if way != DDTREE), None)


@dataclass(frozen=True)
class Difference:
    """Where a text left the plain one.

    Attributes:
        token: the first position that differs.
        plain, other: the token ids there; None where that text had already ended.
        logit_gap: how far above `other` the target holds `plain` there, read from a forward of its
            own; near 0 it is a tie that rounding decides. None where a text had ended.
    """

    token: int
    plain: int | None
    other: int | None
    logit_gap: float | None


@dataclass(frozen=True)
class Measured:
    """A prompt and what was measured on it.

    Attributes:
        prompt: what was asked.
        runs: by the way in which they were made, the runs in the order of the turns.
        differences: by way, where its text leaves the plain one, None if it does not; no entry
            where texts are not compared.
        overhead_seconds: per round of drafting, beyond the leanest; None where there is none.
    """

    prompt: BenchPrompt
    runs: Mapping[str, Sequence[Result]]
    differences: Mapping[str, Difference | None] = field(default_factory=dict)
    overhead_seconds: float | None = None

    @property
    def best(self) -> Result:
        """The first run of the way that is on trial: with a drafter if there is one."""
        return self.runs[on_trial(self.runs) or next(iter(self.runs))][0]

    @property
    def exact(self) -> bool | None:
        """Whether the text is the known answer; None if none is known."""
        if self.prompt.answer is None:
            return None
        return self.best.text.strip() == self.prompt.answer.strip()

    def speedups(self, way: str) -> list[float]:
        """Each run's speed over that of the plain run of the same turn."""
        pairs = zip(self.runs.get(way, ()), self.runs.get(PLAIN, ()), strict=False)
        speeds = ((a.stats.tokens_per_second, b.stats.tokens_per_second) for a, b in pairs)
        return [ours / plain if plain else 1.0 for ours, plain in speeds]


@dataclass(frozen=True)
class Spread:
    """A median and the quartiles around it: half of the runs lie between `low` and `high`."""

    low: float
    median: float
    high: float

    @classmethod
    def of(cls, values: Iterable[float]) -> Spread | None:
        """The spread of some values; None of none."""
        found = list(values)
        if not found:
            return None
        if len(found) == 1:
            return cls(found[0], found[0], found[0])
        return cls(*quantiles(found, n=4, method="inclusive"))


@dataclass(frozen=True)
class Way:
    """The figures of one way to decode, over all runs of some prompts.

    Attributes:
        tokens_per_second: of decoding, the prefill left out.
        first_token_seconds: from the start to the first token, the prefill included.
        speedup: over the plain run of the same turn; None where nothing ran plainly.
        tokens_per_round: tokens per verify forward, over all rounds together.
        accepted: drafted tokens kept in a round -> rounds, of one run of each prompt.
        peak_bytes: the most memory that any run took; None of another process.
        identical: prompts whose every text is the plain one; None where texts are not compared.
    """

    tokens_per_second: Spread
    first_token_seconds: Spread
    speedup: Spread | None
    tokens_per_round: float | None
    accepted: dict[int, int]
    peak_bytes: int | None
    identical: int | None


@dataclass(frozen=True)
class Row:
    """The figures of some prompts: what they have in common, and each way's own."""

    category: str
    prompts: int
    prompt_tokens: float  # median
    output_tokens: int  # of one run of each prompt, drafted if there is a drafter
    exact: int | None  # prompts answered with the known answer
    with_answer: int  # prompts that have one
    overhead_ms_per_round: float | None
    ways: dict[str, Way]

    def as_json(self) -> dict[str, Any]:
        """The row, and beside it the figures that are asked for first."""
        plain, mlx_lm = self.ways.get(PLAIN), self.ways.get(MLX_LM)
        trial = on_trial(self.ways)
        drafted = None if trial is None else self.ways[trial]
        speedup = drafted.speedup if drafted else None
        return asdict(self) | {
            "acceptance_length": drafted.tokens_per_round if drafted else None,
            "speedup": speedup.median if speedup else None,
            "identical": drafted.identical if drafted else None,
            "identical_to_mlx_lm": mlx_lm.identical if mlx_lm else None,
            "plain_tokens_per_second": plain.tokens_per_second.median if plain else None,
            "drafted_tokens_per_second": drafted.tokens_per_second.median if drafted else None,
            "mlx_lm_tokens_per_second": mlx_lm.tokens_per_second.median if mlx_lm else None,
        }


def summarize(category: str, measured: Sequence[Measured]) -> Row:
    """The row of these prompts, of which there is at least one."""
    best = [one.best.stats for one in measured]
    exact = [one.exact for one in measured if one.exact is not None]
    overheads = [one.overhead_seconds for one in measured if one.overhead_seconds is not None]
    return Row(
        category=category,
        prompts=len(measured),
        prompt_tokens=median(stats.prompt_tokens for stats in best),
        output_tokens=sum(stats.output_tokens for stats in best),
        exact=sum(exact) if exact else None,
        with_answer=len(exact),
        overhead_ms_per_round=1e3 * median(overheads) if overheads else None,
        ways={way: _way(way, measured) for way in measured[0].runs},
    )


def _way(name: str, measured: Sequence[Measured]) -> Way:
    runs = [run.stats for one in measured for run in one.runs[name]]
    once = [one.runs[name][0].stats for one in measured]
    compared = [one.differences[name] for one in measured if name in one.differences]
    rounds = sum(stats.rounds for stats in once)
    speeds = Spread.of(stats.tokens_per_second for stats in runs)
    waits = Spread.of(stats.first_token_seconds for stats in runs)
    assert speeds and waits  # every way has run
    return Way(
        tokens_per_second=speeds,
        first_token_seconds=waits,
        speedup=Spread.of(speedup for one in measured for speedup in one.speedups(name)),
        tokens_per_round=sum(stats.round_tokens for stats in once) / rounds if rounds else None,
        accepted=dict(sorted(Counter(n for s in once for n in s.accepted_per_round).items())),
        peak_bytes=max(stats.peak_bytes for stats in runs) or None,
        identical=sum(difference is None for difference in compared) if compared else None,
    )


def by_category(measured: Sequence[Measured]) -> list[Row]:
    """One row per category, in the order in which the categories first appear."""
    groups: dict[str, list[Measured]] = {}
    for one in measured:
        groups.setdefault(one.prompt.category, []).append(one)
    return [summarize(category, group) for category, group in groups.items()]


def differences(measured: Sequence[Measured]) -> list[dict[str, Any]]:
    """Every prompt and way whose text is not the plain one, with the place and the gap there."""
    return [
        {"category": one.prompt.category, "prompt": one.prompt.question, "way": way}
        | asdict(difference)
        for one in measured
        for way, difference in one.differences.items()
        if difference is not None
    ]
