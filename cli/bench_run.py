"""A running benchmark: how long it will take, a line for each prompt, and its results."""

from __future__ import annotations

import time
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from rich.progress import Progress

from dflash_mlx.bench.datasets import BenchPrompt
from dflash_mlx.bench.results import (
    PLAIN,
    PromptRuns,
    drafting_methods,
    run_content,
    summary,
    write_run,
)

from . import output


class BenchRun:
    """Collects the runs of prompts.

    Args:
        setup: the model, the settings and the machine.
        prompts: the prompts to measure.
        methods: how many methods take turns.
        out: the folder for bench.json, which is written after each prompt; None writes nothing.

    Attributes:
        warm_up_tokens: the tokens that each method generates before the first prompt.
    """

    def __init__(
        self,
        setup: Mapping[str, Any],
        prompts: Sequence[BenchPrompt],
        methods: int,
        out: Path | None,
    ) -> None:
        turns = sum(1 + len(prompt.then) for prompt in prompts)
        self._setup = {**setup, "planned_prompts": turns}
        self._methods = methods
        self._out = out
        self._start = 0.0
        self._count = 0  # the runs that have ended
        self.warm_up_tokens = 1
        console = output.stderr()
        self._bar = Progress(console=console, transient=True, disable=not console.is_terminal)
        total = methods * (1 + turns * setup["repeats"])
        self._task = self._bar.add_task("measuring", total=total)

    def count(self) -> None:
        """Count a run that has ended. After the warm-up, print how long the benchmark may take."""
        self._count += 1
        self._bar.advance(self._task)
        if self._count == self._methods:
            warm_up_seconds = time.perf_counter() - self._start
            length_ratio = self._setup["max_tokens"] / self.warm_up_tokens
            turns = self._setup["planned_prompts"]
            repeats = self._setup["repeats"]
            seconds = warm_up_seconds * length_ratio * turns * repeats
            prompts = output.counted(turns, "prompt")
            runs = output.counted(repeats, "run")
            methods = output.counted(self._methods, "method")
            self._print(f"{prompts}, {runs} of {methods} each: at most {_duration(seconds)}.")

    def collect(self, measured: Iterable[PromptRuns]) -> dict[str, Any]:
        """Measure all prompts, or those before a Ctrl-C. Returns the content of bench.json."""
        done: list[PromptRuns] = []
        content: dict[str, Any] = {}
        self._start = time.perf_counter()
        with self._bar:
            try:
                for prompt_runs in measured:
                    done.append(prompt_runs)
                    content = run_content(self._setup, done)
                    if self._out is not None:
                        write_run(self._out, content)
                    self._print(_line(prompt_runs))
            except KeyboardInterrupt:
                if not done:
                    raise
        return content

    def _print(self, text: str) -> None:
        """Print a line above the bar."""
        self._bar.console.print(text, style="dim", soft_wrap=True)


def _line(prompt_runs: PromptRuns) -> str:
    """Return the medians of one prompt in a line."""
    figures = summary(prompt_runs.prompt.category, [prompt_runs])
    parts = []
    for name, method in figures["methods"].items():
        part = f"{name} {output.rate(method['tokens_per_second']['median'])} tok/s"
        if name in drafting_methods([name]):
            acceptance = method["acceptance_length"] or 0.0
            if method["speedup"]:
                part += f", {output.times(method['speedup']['median'], acceptance)} {PLAIN}"
            part += f", {acceptance:.1f} tokens per step"
        parts.append(part)
    return f"{figures['category']}: {' · '.join(parts)}"


def _duration(seconds: float) -> str:
    """Return a time in words: "40 seconds", "5 minutes", "2.5 hours"."""
    if seconds < 90:
        return output.counted(max(1, round(seconds)), "second")
    minutes = seconds / 60
    return f"{minutes:.0f} minutes" if minutes < 90 else f"{minutes / 60:.1f} hours"
