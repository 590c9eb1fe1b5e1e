"""The progress of a training: a bar on a terminal, JSON lines for programs."""

from __future__ import annotations

import json
import time
from contextlib import nullcontext
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rich.progress import BarColumn, Progress, TextColumn, TimeRemainingColumn

from .output import make_table, note, stderr, stdout

if TYPE_CHECKING:
    from dflash_mlx.train.run import Event

    from .train_card import Scores

LINE_SECONDS = 30.0  # between two lines where there is no terminal
GB = 1e9


class JsonProgress(nullcontext[None]):
    """Prints a JSON object for each event."""

    def __call__(self, event: Event) -> None:
        print(json.dumps({"event": _describe(event)[0], **asdict(event)}), flush=True)

    def end(self, scores: Scores, out: Path) -> None:
        """Print the last object."""
        print(json.dumps({"event": "done", "out": str(out), **asdict(scores)}), flush=True)


class ProgressBar:
    """Draws a bar on stderr, or prints a line from time to time where it is no terminal."""

    def __init__(self) -> None:
        console = stderr()
        columns = (TextColumn("{task.description}"), BarColumn(), TimeRemainingColumn())
        hidden = not console.is_terminal
        self._bar = Progress(*columns, console=console, transient=True, disable=hidden)
        self._task, self._noted = self._bar.add_task("", total=None), 0.0
        self._stage = ""

    def __enter__(self) -> ProgressBar:
        self._bar.start()
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        self._bar.stop()
        if kind is KeyboardInterrupt:
            note("The same command resumes from here.")

    def __call__(self, event: Event) -> None:
        stage, done, total, text = _describe(event)
        if stage != self._stage:
            self._bar.reset(self._task)  # the time that is left is that of a stage
            self._stage = stage
        self._bar.update(self._task, description=text, total=total, completed=done)
        measured = getattr(event, "held_out_metric", None) is not None
        due = measured or done >= total or time.monotonic() - self._noted > LINE_SECONDS
        if stage == "plan" or (due and self._bar.disable):
            self._noted = time.monotonic()
            self._bar.console.print(text, style="dim", soft_wrap=True)  # above the bar

    def end(self, scores: Scores, out: Path) -> None:
        """Print what the drafter reaches, and how to use it."""
        table = make_table("held-out prompts", "tokens/step", "speedup", "identical")
        table.add_row(
            str(scores.prompts),
            f"{scores.tokens_per_round:.2f}",
            f"{scores.speedup:.2f}x",
            f"{scores.identical}/{scores.prompts}",
        )
        stdout().print(table)
        note(f"Use it with --draft {out}. Its model card is {out / 'README.md'}.")


def _describe(event: Event) -> tuple[str, int, int, str]:
    """The stage of an event, how much of it is done, all of it, and a text."""
    found: Any = event
    match type(event).__name__:
        case "TurnProgress":
            text = f"prompts {found.turns:,} of {found.wanted:,}"
            return "turns", found.turns, found.wanted, text
        case "AnswerProgress":
            text = f"answers {found.done:,} of {found.prompts:,}, {found.tokens:,} tokens"
            return "answers", found.done, found.prompts, text
        case "TrainingPlan":
            text = (
                f"{found.samples:,} samples with {found.answer_tokens:,} tokens of answers "
                f"({found.held_out} more held out), {found.steps:,} steps; about "
                f"{found.memory_bytes / GB:.1f} GB of memory"
            )
            return "plan", 0, found.steps, text
    text = f"step {found.step:,} of {found.steps:,}: loss {found.loss:.3f}"
    if found.held_out_metric is not None:
        text += f", held out {found.held_out_metric:.2f} tokens per step"
    return "step", found.step, found.steps, text
