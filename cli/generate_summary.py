"""What `dflash-mlx generate` shows of an answer: a panel, the counters, or JSON."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

from rich.console import Group
from rich.panel import Panel
from rich.text import Text

from .answer import Thoughts
from .output import DOUBTFUL, MIN_STEPS, counted, speeds, times
from .pair import Pair, steps_by_rows

if TYPE_CHECKING:
    from dflash_mlx import Result, Stats
    from dflash_mlx.bench.measure import Comparison

# The attributes of `Stats` that --stats and --json show.
COUNTERS = (
    "prompt_tokens",
    "reused_tokens",
    "output_tokens",
    "rounds",
    "drafted_tokens",
    "accepted_tokens",
    "acceptance_length",
    "acceptance_rate",
    "widths",
    "trees",
    "prefill_seconds",
    "decode_seconds",
    "first_round_seconds",
    "first_token_seconds",
    "peak_bytes",
)


def summary(pair: Pair, runs: Comparison, result: Result, thoughts: Thoughts) -> Panel:
    """Make a panel about the answer. Figures after a ~ are estimated, not measured."""
    stats = result.stats
    label = "drafted" if pair.drafts else "plain"
    is_compared = len(runs.runs) > 1
    plain_speed = None
    if pair.drafter is not None and stats.rounds >= MIN_STEPS:
        plain_speed = pair.plain_speed()
    rows = [(label, stats.tokens_per_second, "")]
    estimated_row = ""
    if is_compared:
        speedup = times(runs.speedup, stats.acceptance_length)
        rows = [("plain", runs.speed("plain"), ""), (label, runs.speed(runs.chain), speedup)]
    elif plain_speed:
        speedup = f"~{times(stats.tokens_per_second / plain_speed, stats.acceptance_length)}"
        rows = [("plain", plain_speed, ""), (label, stats.tokens_per_second, speedup)]
        estimated_row = "plain"
    _, _, last_remark = rows[-1]
    counts = Text(counted(stats.output_tokens, "token"))
    if pair.drafts and stats.rounds:
        steps = counted(stats.rounds, "step")
        counts.append(f": {stats.acceptance_length:.1f} tokens per step in {steps}")
        counts.append(f", drafted by {pair.drafts}")
    if result.finish_reason == "length":
        counts.append(f" ({pair.limit_reached(stats)})", style="yellow")
    lines = [counts]
    if thoughts.tokens:
        lines.append(Text(_thoughts_and_answer(stats, thoughts)))
    if is_compared and not stats.rounds:
        lines.append(Text("The first token comes from reading the prompt: no step was timed."))
    elif last_remark.endswith("?"):
        lines.append(Text(DOUBTFUL, style="yellow"))
    if is_compared:
        difference = runs.first_difference
        verdict = ("yes", "bold green")
        if difference is not None:
            verdict = (f"no, from token {difference + 1} on", "bold red")
        lines.append(Text.assemble("identical to plain decoding: ", verdict))
    bars = [speeds(rows, estimated_row)] if stats.rounds else []
    body = Group(*bars, *lines)
    return Panel.fit(body, title=Text(pair.title), title_align="left", border_style="dim")


def _thoughts_and_answer(stats: Stats, thoughts: Thoughts) -> str:
    """Return the tokens, and tokens per step, of the thoughts and of the answer."""
    answer_tokens = stats.output_tokens - thoughts.tokens
    answer_steps = stats.rounds - thoughts.rounds
    counts = {
        "thoughts": (thoughts.tokens, thoughts.rounds),
        "answer": (answer_tokens, answer_steps),
    }
    parts = []
    for name, (tokens, steps) in counts.items():
        per_step = f", {tokens / steps:.1f} tokens per step" if steps else ""
        parts.append(f"{name}: {counted(tokens, 'token')}{per_step}")
    return "; ".join(parts)


def as_json(pair: Pair, runs: Comparison, result: Result, thoughts: Thoughts) -> dict[str, Any]:
    """Return the content of --json. Figures that were not measured are null."""
    stats = result.stats
    is_compared = len(runs.runs) > 1
    is_timed = is_compared and stats.rounds > 0  # reading the prompt gives the first token
    return {
        "model": pair.target.name,
        "text": result.text,
        "tokens": result.tokens,
        "finish_reason": result.finish_reason,
        "prompt_tokens": stats.prompt_tokens,
        "output_tokens": stats.output_tokens,
        "steps": stats.rounds,
        "rounds": stats.rounds,  # an older name of "steps"
        "thoughts": {"tokens": thoughts.tokens, "rounds": thoughts.rounds},
        "block_size": stats.block_size,
        "widths": dict(sorted(stats.widths.items())),
        "trees": dict(sorted(stats.trees.items())),
        "seed": stats.seed,
        "tokens_per_step": stats.acceptance_length,
        "tokens_per_round": stats.acceptance_length,
        "tokens_per_second": runs.speed(runs.chain),
        "blas": pair.blas.name,
        "plain_tokens_per_second": runs.speed("plain") if is_timed else None,
        "speedup": runs.speedup if is_timed else None,
        "identical": runs.first_difference is None if is_compared else None,
        "first_difference": runs.first_difference if is_compared else None,
        "stats": {name: getattr(stats, name) for name in COUNTERS},
    }


def stats_as_lines(stats: Stats) -> Iterator[str]:
    """Yield a line for each counter."""
    for name in COUNTERS:
        value = getattr(stats, name)
        if isinstance(value, dict):
            value = steps_by_rows(value)
        elif isinstance(value, float):
            value = f"{value:.3f}"
        elif name == "peak_bytes":
            value = f"{value:,}"
        label = name.replace("rounds", "steps").replace("round", "step").replace("_", " ")
        yield f"{label:20}{value}"
