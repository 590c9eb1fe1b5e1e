"""How training shows itself: a bar and figures on a terminal, lines of JSON for programs."""

from __future__ import annotations

import json
import time
from dataclasses import asdict
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING, Any

from rich.progress import BarColumn, Progress, TextColumn, TimeRemainingColumn
from rich.table import Table
from rich.text import Text

from .output import note, stderr, stdout

if TYPE_CHECKING:
    from dflash_mlx.train.run import Event

    from .train_card import Scores

PATIENCE = 30.0  # seconds between lines where there is no terminal
GB = 1e9


class _Clock:
    """How fast the present stage is, from its first event in this process on."""

    def __init__(self) -> None:
        self.stage, self._start, self._first = "", 0.0, 0.0

    def enter(self, stage: str, done: float) -> None:
        if stage != self.stage:
            self.stage, self._start, self._first = stage, time.monotonic(), done

    def rate(self, done: float) -> float:
        """Units a second; 0 before anything was done."""
        seconds = time.monotonic() - self._start
        return (done - self._first) / seconds if seconds > 0 else 0.0

    def left(self, done: float, all: float) -> float | None:
        """Seconds until all is done, None while nobody can say."""
        rate = self.rate(done)
        return (all - done) / rate if rate else None


class Lines:
    """JSON lines on stdout, one for each event."""

    def __init__(self) -> None:
        self._clock, self._tokens = _Clock(), 0

    def __enter__(self) -> Lines:
        return self

    def __exit__(self, *_: object) -> None:
        """Nothing to put away."""

    def __call__(self, event: Event) -> None:
        stage, done, all = extent(event)
        self._clock.enter(stage, done)
        content: dict[str, Any] = {"event": stage, **asdict(event)}
        if stage == "begun":
            self._tokens = content["tokens_of_step"]
        if stage == "step":
            content["tokens_per_second"] = self._clock.rate(done) * self._tokens
        content["seconds_left"] = self._clock.left(done, all)
        print(json.dumps(content), flush=True)

    def end(self, scores: Scores, out: Path) -> None:
        """The last line."""
        print(json.dumps({"event": "done", "out": str(out), **asdict(scores)}), flush=True)


class Live:
    """A bar on stderr, with what matters of the present stage beside it."""

    def __init__(self) -> None:
        self._console, self._clock = stderr(), _Clock()
        columns = (TextColumn("{task.description}"), BarColumn(), TimeRemainingColumn())
        self._bar = Progress(*columns, console=self._console, transient=True)
        self._task, self._said, self._tokens = self._bar.add_task("", total=None), 0.0, 0
        self._apart = ""

    def __enter__(self) -> Live:
        if self._console.is_terminal:
            self._bar.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, _: TracebackType | None
    ) -> None:
        if self._console.is_terminal:
            self._bar.stop()
        if kind is KeyboardInterrupt:
            note("The same command goes on from here.")

    def __call__(self, event: Event) -> None:
        stage, done, all = extent(event)
        self._clock.enter(stage, done)
        text = self._words(event, stage, done)
        self._bar.update(self._task, description=text, total=all, completed=done)
        soon = time.monotonic() - self._said < PATIENCE and done < all
        if stage == "begun" or not (self._console.is_terminal or soon):
            self._said = time.monotonic()
            left = self._clock.left(done, all)
            text = text if left is None or not left else f"{text}, {left / 60:.0f} min left"
            if self._console.is_terminal:
                self._bar.console.print(Text(text, style="dim"))  # above the bar, not behind it
            else:
                note(text)

    def _words(self, event: Any, stage: str, done: float) -> str:
        if stage == "turns":
            return f"prompts {event.turns:,} of {event.wanted:,}"
        if stage == "answers":
            return f"answers {event.done:,} of {event.prompts:,}, {event.tokens:,} tokens"
        if stage == "begun":
            self._tokens = event.tokens_of_step
            need = event.estimate
            return (
                f"{event.samples:,} samples with {event.answer_tokens:,} tokens of answers "
                f"({event.held_out} more held out), {event.steps:,} steps; about "
                f"{need.memory / GB:.1f} GB of memory and {need.checkpoint / GB:.1f} GB of disk"
            )
        if event.held_out_metric is not None:
            self._apart = f", held out {event.held_out_metric:.2f} tokens a round"
        speed = self._clock.rate(done) * self._tokens
        return (
            f"step {event.step:,} of {event.steps:,}: loss {event.loss:.3f}{self._apart}, "
            f"{speed:,.0f} tok/s"
        )

    def end(self, scores: Scores, out: Path) -> None:
        """What the drafter is worth, and how to use it."""
        table = Table(box=None, pad_edge=False, header_style="bold")
        for title in ("held-out prompts", "tok/round", "speedup", "identical"):
            table.add_column(title, justify="right")
        table.add_row(
            str(scores.prompts),
            f"{scores.tokens_per_round:.2f}",
            f"{scores.speedup:.2f}x",
            f"{scores.identical}/{scores.prompts}",
        )
        stdout().print(table)
        note(f"Use it with --draft {out}; its card is {out / 'README.md'}.")


def extent(event: Event) -> tuple[str, float, float]:
    """The stage of an event, how much of it is done, and all of it."""
    found: Any = event
    match type(event).__name__:
        case "TurnProgress":
            return "turns", found.turns, found.wanted
        case "AnswerProgress":
            return "answers", found.done, found.prompts
        case "TrainingPlan":
            return "begun", 0, found.steps
    return "step", found.step, found.steps
