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

    def speedups(self, method: str) -> list[float]:
        """The speed of each run over the plain run of the same turn."""
        pairs = zip(self.runs.get(method, ()), self.runs.get(PLAIN, ()), strict=False)
        speeds = ((a.stats.tokens_per_second, b.stats.tokens_per_second) for a, b in pairs)
        return [speed / plain if plain else 1.0 for speed, plain in speeds]


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
    """Everything about a run, as JSON holds it.

    Args:
        setup: what ran, with which settings, on which machine.
        measured: at least one prompt.
    """
    groups: dict[str, list[PromptRuns]] = {}
    for one in measured:
        groups.setdefault(one.prompt.category, []).append(one)
    protocol = {category: _protocol_figures(group) for category, group in groups.items()}
    return {
        "format": FORMAT,
        "version": VERSION,
        "measured": datetime.now(UTC).isoformat(timespec="seconds"),
        **setup,
        "protocol_figures": protocol if setup.get("protocol") else None,
        "overall": summary("all", measured),
        "categories": [summary(*group) for group in groups.items()],
        "differences": [
            {"category": one.prompt.category, "prompt": one.prompt.question, "method": name}
            | asdict(difference)
            for one in measured
            for name, difference in one.differences.items()
            if difference is not None
        ],
        "prompts": [_prompt(one) for one in measured],
    }


def _prompt(one: PromptRuns) -> dict[str, Any]:
    """Every run of one prompt, in the order of the turns."""
    stats = {name: [run.stats for run in runs] for name, runs in one.runs.items()}
    return {
        "category": one.prompt.category,
        "prompt_tokens": one.main.stats.prompt_tokens,
        "output_tokens": one.main.stats.output_tokens,
        "methods": {
            name: {
                "tokens_per_second": [run.tokens_per_second for run in runs],
                "first_token_seconds": [run.first_token_seconds for run in runs],
                "steps": runs[0].rounds,
            }
            for name, runs in stats.items()
        },
    }


def summary(category: str, measured: Sequence[PromptRuns]) -> dict[str, Any]:
    """The figures of some prompts, by method. Tokens are those of one run of each prompt."""
    stats = [one.main.stats for one in measured]
    answers = [(one.main.text, one.prompt.answer) for one in measured]
    exact = [text.strip() == answer.strip() for text, answer in answers if answer is not None]
    return {
        "category": category,
        "prompts": len(measured),
        "prompt_tokens": median(one.prompt_tokens for one in stats),
        "output_tokens": sum(one.output_tokens for one in stats),
        "exact": sum(exact) if exact else None,
        "with_answer": len(exact),
        "methods": {name: _method_summary(name, measured) for name in measured[0].runs},
    }


def _method_summary(name: str, measured: Sequence[PromptRuns]) -> dict[str, Any]:
    """The figures of one method over all runs of some prompts; counts are of the first runs."""
    runs = [run.stats for one in measured for run in one.runs[name]]
    first = [one.runs[name][0].stats for one in measured]
    compared = [one.differences[name] for one in measured if name in one.differences]
    steps = sum(stats.rounds for stats in first)
    timed = [stats.tokens_per_second for stats in runs if stats.decode_seconds]
    return {
        "tokens_per_second": spread(timed or [0.0]),
        "first_token_seconds": spread(stats.first_token_seconds for stats in runs),
        "speedup": spread(speedup for one in measured for speedup in one.speedups(name)),
        "acceptance_length": sum(s.round_tokens for s in first) / steps if steps else None,
        "accepted": dict(sorted(Counter(n for s in first for n in s.accepted_per_round).items())),
        "peak_bytes": max(stats.peak_bytes for stats in runs) or None,
        "identical": sum(difference is None for difference in compared) if compared else None,
    }


def spread(values: Iterable[float]) -> dict[str, float] | None:
    """Median and quartiles: half of the values lie between "low" and "high"; None without any."""
    found = list(values)
    low, middle, high = np.quantile(found, (0.25, 0.5, 0.75)).tolist() if found else (0.0,) * 3
    return {"low": low, "median": middle, "high": high} if found else None


def _protocol_figures(answers: Sequence[PromptRuns]) -> dict[str, Any]:
    """A suite's figures by z-lab's protocol: means over answers, whatever their length.

    `speedup` and `over_mlx_lm` are mean seconds per token over those of drafting. They are None
    where that method did not run.
    """
    method = chain_method(answers[0].runs) or PLAIN
    seconds = dict[str, float]()
    lengths = []
    for name in (method, PLAIN, MLX_LM):
        runs = [one.runs[name][0].stats for one in answers if name in one.runs]
        if speeds := [stats.tokens_per_second for stats in runs if stats.tokens_per_second]:
            seconds[name] = fmean(1 / speed for speed in speeds)
        if name == method:
            lengths = [stats.acceptance_length for stats in runs if stats.rounds]

    over = {name: took / seconds[method] for name, took in seconds.items() if method in seconds}
    return {
        "answers": len(answers),
        "speedup": over.get(PLAIN),
        "over_mlx_lm": over.get(MLX_LM),
        "acceptance_length": fmean(lengths) if lengths else None,
    }


def describe_difference(one: Mapping[str, Any]) -> str:
    """Warning line for an output that differs from plain decoding."""
    gap = "one ended" if one["logit_gap"] is None else f"logit gap {one['logit_gap']:.2g}"
    question = " ".join(one["prompt"].split())[:80]
    return f"Not identical: {one['method']}, from token {one['token'] + 1} on ({gap}): {question}"


def check_folder(folder: Path) -> None:
    """Check that a run can be written to `folder`, before hours of measuring.

    Raises `OutputError`: not a folder, no permission, or it holds a run already.
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
