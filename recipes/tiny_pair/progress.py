"""What a stage of the recipe prints to stderr while it runs."""

from __future__ import annotations

import sys
import time
from statistics import fmean

from dflash_mlx.train.answer_writer import AnswerProgress
from dflash_mlx.train.fit import StepReport


class Printer:
    """Prints a line of progress to stderr every 25 steps, with the means since the last line."""

    def __init__(self, title: str, metric: str) -> None:
        self.title = title
        self.metric = metric
        self.start = time.monotonic()
        self.reports: list[StepReport] = []

    def __call__(self, report: StepReport) -> None:
        self.reports.append(report)
        if report.step % 25 and report.step < report.steps:
            return
        loss, value = (
            fmean(getattr(r, field) for r in self.reports) for field in ("loss", "metric")
        )
        seconds = time.monotonic() - self.start
        say(
            f"{self.title} {report.step}/{report.steps}: loss {loss:.4f},"
            f" {self.metric} {value:.4f}, {seconds:.0f} s"
        )
        self.reports.clear()


class Counted:
    """Prints a line to stderr whenever `every` more answers are written, and after the last."""

    def __init__(self, title: str, every: int) -> None:
        self.title = title
        self.every = every
        self.shown = 0

    def __call__(self, progress: AnswerProgress) -> None:
        if progress.done >= self.shown + self.every or progress.done == progress.prompts:
            self.shown = progress.done
            say(f"{self.title} {progress.done}/{progress.prompts}")


def say(line: str) -> None:
    """Print a line to stderr without delay."""
    print(line, file=sys.stderr, flush=True)
