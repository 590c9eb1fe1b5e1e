"""What people see of a training run: its progress, the drafter's scores, and its model card."""

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

LINE_SECONDS = 30.0  # between two lines of progress, without a terminal
MEASURED_PROMPTS = 16  # held-out prompts to answer
MAX_TOKENS = 256  # of each answer


@dataclass(frozen=True)
class Scores:
    """How a drafter does on held-out prompts, with greedy decoding and full blocks."""

    prompts: int
    identical: int  # answers equal to those of plain decoding
    tokens_per_round: float  # the acceptance length over all prompts
    speedup: float  # over plain decoding, the median of all prompts

    @property
    def shown_speedup(self) -> str:
        """The speedup as text, with a mark if it is impossible."""
        return times(self.speedup, self.tokens_per_round)


def measure_held_out(target: Target, out: Path) -> Scores:
    """Answer the prompts of held_out.jsonl, with the stored drafter and without."""
    from dflash_mlx.bench.datasets import BenchPrompt
    from dflash_mlx.bench.measure import Comparison, warm_up
    from dflash_mlx.bench.results import PLAIN, PromptRuns, summary

    drafter = dflash_mlx.load_drafter(str(out))
    warm_up(target, drafter)
    lines = (out / "held_out.jsonl").read_text(encoding="utf-8").split("\n")
    runs = []
    method = ""
    for line in list(filter(None, lines))[:MEASURED_PROMPTS]:
        comparison = Comparison(
            target,
            drafter,
            prompt=json.loads(line)["ids"],
            settings={"max_tokens": MAX_TOKENS},
        )
        method = comparison.chain
        comparison.run(PLAIN, method)
        prompt = BenchPrompt("held out", ())
        runs.append(PromptRuns(prompt, comparison.runs, comparison.differences()))
    figures = summary("held out", runs)["methods"][method]
    return Scores(
        prompts=len(runs),
        identical=figures["identical"],
        tokens_per_round=figures["acceptance_length"] or 1.0,
        speedup=figures["speedup"]["median"],
    )


def write_card(
    target: Target,
    *,
    adapter: str | None,
    recipe: Recipe,
    trained: Trained,
    scores: Scores,
    hours: float,
    blas: BlasInfo,
    out: Path,
) -> None:
    """Write README.md with the drafter's scores and its training. Raises `OutputError`."""
    plan = trained.plan
    data = f"the file {recipe.data.name}" if recipe.data else "prompts written by the target"
    answers = "the file's answers" if recipe.keep_answers else "the target's own greedy answers"
    model = target.name if adapter is None else f"{target.name} --adapter {adapter}"
    computer = ", ".join(f"{name} {value}" for name, value in machine(blas).items())
    lines = [
        f"# A drafter for {Path(target.name).name}",
        "",
        "It drafts tokens that the target verifies, so the text is the same as without drafting.",
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
        f"Greedy, at most {MAX_TOKENS} tokens, blocks of {trained.config['block_size']} rows, "
        f"on: {computer}.",
        "",
    ]
    if scores.shown_speedup.endswith("?"):
        lines += [f"{DOUBTFUL}.", ""]
    lines += [
        "## Training",
        "",
        f"{plan.samples:,} samples with {plan.answer_tokens:,} tokens of answers: {data}, with "
        f"{answers}. {plan.steps:,} steps of {plan.tokens_of_step:,} tokens; the last run took "
        f"{hours:.2f} hours.",
        "",
    ]
    for name, value in asdict(recipe).items():
        if value is not None and name != "data":
            lines.append(f"- {name}: {value}")
    write_file(out / "README.md", "\n".join([*lines, ""]))


class JsonProgress(nullcontext[None]):
    """Prints a JSON object for each event."""

    def __call__(self, event: Event) -> None:
        stage, _, _, _ = _describe(event)
        print(json.dumps({"event": stage, **asdict(event)}), flush=True)

    def end(self, scores: Scores, out: Path) -> None:
        """Print the last object."""
        print(json.dumps({"event": "done", "out": str(out), **asdict(scores)}), flush=True)


class ProgressBar:
    """Draws a bar on stderr. Without a terminal it prints a line from time to time."""

    def __init__(self) -> None:
        console = stderr()
        self._bar = Progress(
            SpinnerColumn(),
            TextColumn("{task.description}"),
            BarColumn(),
            TimeRemainingColumn(),
            console=console,
            transient=True,
            disable=not console.is_terminal,
        )
        self._task = self._bar.add_task("reading the data", total=None)
        self._stage = ""
        self._last_line = 0.0  # when the last line was printed

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
            self._bar.reset(self._task)  # the remaining time is that of the stage
            self._stage = stage
        if stage == "plan":  # the first step takes a while, so the bar shows no progress
            title = f"step 1 of {total:,}"
            self._bar.update(self._task, description=title, total=None, completed=done)
        else:
            self._bar.update(self._task, description=text, total=total, completed=done)
        is_measured = getattr(event, "held_out_metric", None) is not None
        is_old = time.monotonic() - self._last_line > LINE_SECONDS
        is_due = is_measured or done >= total or is_old
        if stage == "plan" or (is_due and self._bar.disable):
            self._last_line = time.monotonic()
            self._bar.console.print(text, style="dim", soft_wrap=True)  # above the bar

    def end(self, scores: Scores, out: Path) -> None:
        """Print the drafter's scores, and how to use it."""
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
    """Return the stage of an event, how much of it is done, its total, and a text."""
    fields: Any = event  # the fields depend on the class, whose module imports MLX
    match type(event).__name__:
        case "TurnProgress":
            text = f"prompts {fields.turns:,} of {fields.wanted:,}"
            return "turns", fields.turns, fields.wanted, text
        case "AnswerProgress":
            text = f"answers {fields.done:,} of {fields.prompts:,}, {fields.tokens:,} tokens"
            return "answers", fields.done, fields.prompts, text
        case "TrainingPlan":
            text = (
                f"{fields.samples:,} samples with {fields.answer_tokens:,} tokens of answers "
                f"({fields.held_out} more held out), {fields.steps:,} steps; about "
                f"{fields.memory_bytes / GB:.1f} GB of memory"
            )
            return "plan", 0, fields.steps, text
    text = f"step {fields.step:,} of {fields.steps:,}: loss {fields.loss:.3f}"
    if fields.held_out_metric is not None:
        text += f", held out {fields.held_out_metric:.2f} tokens per step"
    return "step", fields.step, fields.steps, text
