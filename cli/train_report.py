"""What people see of a training: its progress, what the drafter reaches, and its model card."""

from __future__ import annotations

import json
import time
from contextlib import nullcontext
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rich.progress import BarColumn, Progress, SpinnerColumn, TextColumn, TimeRemainingColumn

import dflash_mlx
from dflash_mlx.machine.blas import BlasInfo
from dflash_mlx.machine.facts import GB, machine

from .output import DOUBTFUL, make_table, note, stderr, stdout, times, write_file

if TYPE_CHECKING:
    from dflash_mlx import Target
    from dflash_mlx.train.recipe import Recipe
    from dflash_mlx.train.run import Event, Trained

LINE_SECONDS = 30.0  # between two lines where there is no terminal
MEASURED, MAX_TOKENS = 16, 256  # held-out prompts, and tokens of each answer


@dataclass(frozen=True)
class Scores:
    """A drafter on held-out prompts, greedy, with whole blocks."""

    prompts: int
    identical: int  # answers equal to those of plain decoding
    tokens_per_round: float  # acceptance length over all prompts
    speedup: float  # over plain decoding, the median prompt's

    @property
    def shown_speedup(self) -> str:
        """The speedup for people, marked if it cannot be."""
        return times(self.speedup, self.tokens_per_round)


def measure_held_out(target: Target, out: Path) -> Scores:
    """Answer the prompts of held_out.jsonl plainly and with the stored drafter."""
    from dflash_mlx.bench.datasets import BenchPrompt
    from dflash_mlx.bench.measure import Comparison, warm_up
    from dflash_mlx.bench.results import PLAIN, PromptRuns, summary

    drafter = dflash_mlx.load_drafter(str(out))
    warm_up(target, drafter)
    lines = (out / "held_out.jsonl").read_text(encoding="utf-8").split("\n")
    runs = []
    for line in list(filter(None, lines))[:MEASURED]:
        one = Comparison(target, drafter, json.loads(line)["ids"], {"max_tokens": MAX_TOKENS})
        one.run(PLAIN, one.chain)
        runs.append(PromptRuns(BenchPrompt("held out", ()), one.runs, one.differences()))
    found = summary("held out", runs)["methods"][one.chain]
    length, speedup = found["acceptance_length"] or 1.0, found["speedup"]["median"]
    return Scores(len(runs), found["identical"], length, speedup)


def write_card(
    target: Target,
    adapter: str | None,
    recipe: Recipe,
    done: Trained,
    scores: Scores,
    hours: float,
    blas: BlasInfo,
    out: Path,
) -> None:
    """Write README.md: what the drafter reaches, and how it was trained. Raises `OutputError`."""
    plan, config = done.plan, done.config
    data = f"the file {recipe.data.name}" if recipe.data else "prompts written by the target"
    answers = "the file's answers" if recipe.keep_answers else "the target's own greedy answers"
    settings = {k: v for k, v in asdict(recipe).items() if v is not None and k != "data"}
    model = target.name if adapter is None else f"{target.name} --adapter {adapter}"
    lines = [
        f"# A drafter for {Path(target.name).name}",
        "",
        "It drafts tokens that the target verifies, so the text stays the target's own.",
        "",
        f"    dflash-mlx generate --model {model} --draft {out} 'Hello'",
        "",
        "## Results",
        "",
        "| held-out prompts | tokens per step | speedup | identical to plain decoding |",
        "|---|---|---|---|",
        f"| {scores.prompts} | {scores.tokens_per_round:.2f} | {scores.shown_speedup} |"
        f" {scores.identical} of {scores.prompts} |",
        "",
        f"Greedy, at most {MAX_TOKENS} tokens, blocks of {config['block_size']} rows, on: "
        + ", ".join(f"{name} {value}" for name, value in machine(blas).items())
        + ".",
        "",
        *([DOUBTFUL + ".", ""] if scores.shown_speedup.endswith("?") else []),
        "## Training",
        "",
        f"{plan.samples:,} samples with {plan.answer_tokens:,} tokens of answers: {data}, with "
        f"{answers}. {plan.steps:,} steps of {plan.tokens_of_step:,} tokens; the last run took "
        f"{hours:.2f} hours.",
        "",
        *(f"- {name}: {value}" for name, value in settings.items()),
        "",
    ]
    write_file(out / "README.md", "\n".join(lines))


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
        text = TextColumn("{task.description}")
        columns = (SpinnerColumn(), text, BarColumn(), TimeRemainingColumn())
        hidden = not console.is_terminal
        self._bar = Progress(*columns, console=console, transient=True, disable=hidden)
        self._task, self._noted = self._bar.add_task("reading the data", total=None), 0.0
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
        begins = stage == "plan"  # the first step takes a while: the bar only moves
        title, whole = (f"step 1 of {total:,}", None) if begins else (text, total)
        self._bar.update(self._task, description=title, total=whole, completed=done)
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
            scores.shown_speedup,
            f"{scores.identical}/{scores.prompts}",
        )
        stdout().print(table)
        if scores.shown_speedup.endswith("?"):
            note(DOUBTFUL)
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
