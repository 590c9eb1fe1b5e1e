"""The results of a benchmark: the runs of each prompt, and the JSON that sums them up.

docs/bench.schema.json describes the JSON. All tables are printed from it, of new runs and of old.
"""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from datetime import UTC, datetime
from pathlib import Path
from statistics import fmean, median
from tempfile import TemporaryDirectory
from typing import Any

import numpy as np

from ..errors import DataError, OutputError
from ..events import Result
from ..machine.facts import nearest_there
from ..validation import path_kind, read_json
from .datasets import BenchPrompt

FORMAT = "dflash-mlx bench"
VERSION = 1
JSON = "bench.json"
# Names of decoding methods. Drafting with chains goes by the drafter's label ("DFlash", "lookup").
PLAIN = "plain"
DDTREE = "DDTree"
MLX_LM = "mlx-lm"
SERVER = "server"
BASELINES = (PLAIN, MLX_LM, SERVER)


def drafting_methods(methods: Iterable[str]) -> list[str]:
    """The methods that draft, chains before trees."""
    drafting = [name for name in methods if name not in BASELINES]
    return sorted(drafting, key=lambda name: name == DDTREE)


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
        methods = list(self.runs)
        method = chain_method(self.runs) or methods[0]
        return self.runs[method][0]

    def speedups(self, method: str) -> list[float]:
        """The speed of each run over the plain run of the same turn."""
        pairs = zip(self.runs.get(method, ()), self.runs.get(PLAIN, ()), strict=False)
        speedups = []
        for run, plain_run in pairs:
            plain_speed = plain_run.stats.tokens_per_second
            speedups.append(run.stats.tokens_per_second / plain_speed if plain_speed else 1.0)
        return speedups


def ask_all(
    prompts: Sequence[BenchPrompt], ask: Callable[[BenchPrompt], PromptRuns]
) -> Iterator[PromptRuns]:
    """Ask one prompt after another, each conversation to its end."""
    for prompt in prompts:
        turn: BenchPrompt | None = prompt
        while turn is not None:
            measured = ask(turn)
            yield measured
            first, *_ = measured.runs.values()
            turn = turn.answered(first[0].text)


def run_content(setup: Mapping[str, Any], measured: Sequence[PromptRuns]) -> dict[str, Any]:
    """The JSON content that describes a run.

    Args:
        setup: what ran, with which settings, and on which machine.
        measured: the runs of at least one prompt.
    """
    groups: dict[str, list[PromptRuns]] = {}
    differences: list[dict[str, Any]] = []
    for prompt_runs in measured:
        prompt = prompt_runs.prompt
        groups.setdefault(prompt.category, []).append(prompt_runs)
        for method, difference in prompt_runs.differences.items():
            if difference is not None:
                place = {"category": prompt.category, "prompt": prompt.question, "method": method}
                differences.append(place | asdict(difference))
    protocol = {category: _protocol_figures(group) for category, group in groups.items()}
    return {
        "format": FORMAT,
        "version": VERSION,
        "measured": datetime.now(UTC).isoformat(timespec="seconds"),
        **setup,
        "protocol_figures": protocol if setup.get("protocol") else None,
        "overall": summary("all", measured),
        "categories": [summary(*group) for group in groups.items()],
        "differences": differences,
        "prompts": [_prompt(prompt_runs) for prompt_runs in measured],
    }


def _prompt(prompt_runs: PromptRuns) -> dict[str, Any]:
    """Every run of one prompt, in the order of the turns."""
    methods = {}
    for name, results in prompt_runs.runs.items():
        stats = [result.stats for result in results]
        methods[name] = {
            "tokens_per_second": [run.tokens_per_second for run in stats],
            "first_token_seconds": [run.first_token_seconds for run in stats],
            "steps": stats[0].rounds,
        }
    return {
        "category": prompt_runs.prompt.category,
        "prompt_tokens": prompt_runs.main.stats.prompt_tokens,
        "output_tokens": prompt_runs.main.stats.output_tokens,
        "methods": methods,
    }


def summary(category: str, measured: Sequence[PromptRuns]) -> dict[str, Any]:
    """The figures of some prompts, by method. Tokens are counted in one run of each prompt."""
    stats = [prompt_runs.main.stats for prompt_runs in measured]
    exact = []
    for prompt_runs in measured:
        answer = prompt_runs.prompt.answer
        if answer is not None:
            exact.append(prompt_runs.main.text.strip() == answer.strip())
    return {
        "category": category,
        "prompts": len(measured),
        "prompt_tokens": median(run.prompt_tokens for run in stats),
        "output_tokens": sum(run.output_tokens for run in stats),
        "exact": sum(exact) if exact else None,
        "with_answer": len(exact),
        "methods": {name: _method_summary(name, measured) for name in measured[0].runs},
    }


def _method_summary(name: str, measured: Sequence[PromptRuns]) -> dict[str, Any]:
    """The figures of one method over all runs of some prompts. Counts are from the first runs."""
    runs = [run.stats for prompt_runs in measured for run in prompt_runs.runs[name]]
    first = [prompt_runs.runs[name][0].stats for prompt_runs in measured]
    compared = [
        prompt_runs.differences[name] for prompt_runs in measured if name in prompt_runs.differences
    ]
    steps = sum(stats.rounds for stats in first)
    tokens = sum(stats.round_tokens for stats in first)
    accepted = Counter(count for stats in first for count in stats.accepted_per_round)
    timed = [stats.tokens_per_second for stats in runs if stats.decode_seconds]
    return {
        "tokens_per_second": spread(timed or [0.0]),
        "first_token_seconds": spread(stats.first_token_seconds for stats in runs),
        "speedup": spread(
            speedup for prompt_runs in measured for speedup in prompt_runs.speedups(name)
        ),
        "acceptance_length": tokens / steps if steps else None,
        "accepted": dict(sorted(accepted.items())),
        "peak_bytes": max(stats.peak_bytes for stats in runs) or None,
        "identical": sum(difference is None for difference in compared) if compared else None,
    }


def spread(values: Iterable[float]) -> dict[str, float] | None:
    """Median and quartiles: half of the values lie between "low" and "high"; None without any."""
    numbers = list(values)
    if not numbers:
        return None
    low, middle, high = np.quantile(numbers, (0.25, 0.5, 0.75)).tolist()
    return {"low": low, "median": middle, "high": high}


def _protocol_figures(answers: Sequence[PromptRuns]) -> dict[str, Any]:
    """The figures of a suite by z-lab's protocol: means over answers, whatever their length.

    `speedup` and `over_mlx_lm` are ratios of mean seconds per token: those of plain decoding and
    of mlx-lm to those of drafting. They are None if that method did not run.
    """
    method = chain_method(answers[0].runs) or PLAIN
    seconds: dict[str, float] = {}
    lengths = []
    for name in (method, PLAIN, MLX_LM):
        runs = [
            prompt_runs.runs[name][0].stats for prompt_runs in answers if name in prompt_runs.runs
        ]
        speeds = [stats.tokens_per_second for stats in runs if stats.tokens_per_second]
        if speeds:
            seconds[name] = fmean(1 / speed for speed in speeds)
        if name == method:
            lengths = [stats.acceptance_length for stats in runs if stats.rounds]

    over = {
        name: seconds_per_token / seconds[method]
        for name, seconds_per_token in seconds.items()
        if method in seconds
    }
    return {
        "answers": len(answers),
        "speedup": over.get(PLAIN),
        "over_mlx_lm": over.get(MLX_LM),
        "acceptance_length": fmean(lengths) if lengths else None,
    }


def describe_difference(difference: Mapping[str, Any]) -> str:
    """Warning line for an output that differs from plain decoding."""
    gap = "one ended"
    if difference["logit_gap"] is not None:
        gap = f"logit gap {difference['logit_gap']:.2g}"
    question = " ".join(difference["prompt"].split())[:80]
    place = f"{difference['method']}, from token {difference['token'] + 1} on"
    return f"Not identical: {place} ({gap}): {question}"


def check_folder(folder: Path) -> None:
    """Check that a run can be written to `folder`, before hours of measuring.

    Raises:
        OutputError: it is not a folder, cannot be written to, or already contains a run.
    """
    try:
        if path_kind(folder / JSON) is not None:
            raise OutputError(f"{folder} holds a run already: choose another folder.")
        with TemporaryDirectory(dir=nearest_there(folder)):
            pass
    except OSError as error:
        raise OutputError.because(folder, error) from error


def write_run(folder: Path, content: Mapping[str, Any]) -> None:
    """Write bench.json. Raises `OutputError`."""
    try:
        folder.mkdir(parents=True, exist_ok=True)
        text = json.dumps(content, ensure_ascii=False, indent=1) + "\n"
        (folder / JSON).write_text(text, encoding="utf-8")
    except OSError as error:
        raise OutputError.because(folder, error) from error


def read_run(path: Path) -> dict[str, Any]:
    """A run, from its folder or its JSON file. Raises `DataError`."""
    file = path / JSON if path.is_dir() else path
    content = read_json(file, DataError)
    if (content.get("format"), content.get("version")) != (FORMAT, VERSION):
        raise DataError(f"{file}: not a run of 'dflash-mlx bench --out', or of another version.")
    return content
