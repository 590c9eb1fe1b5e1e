"""What `generate` reports about an answer: a panel for people, an object for programs."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from rich.console import Group
from rich.text import Text

from .output import MIN_STEPS, counted, speeds
from .pair import Pair, steps_by_rows

if TYPE_CHECKING:
    from dflash_mlx import Event, Result, Stats
    from dflash_mlx.bench.measure import Comparison


def summary(pair: Pair, runs: Comparison, result: Result) -> Group:
    """The content of the panel; a figure behind a ~ is estimated, not measured."""
    stats, name = result.stats, pair.drafts
    rows = [(name, stats.tokens_per_second, "")]
    if runs.plain:
        speedup = f"{runs.speedup:.2f}x"
        rows = [("plain", runs.plain_speed, ""), (name, runs.drafted_speed, speedup)]
    elif pair.drafter is not None and stats.rounds >= MIN_STEPS:
        if plain := pair.plain_speed(stats):
            speedup = f"~{stats.tokens_per_second / plain:.2f}x"
            rows = [("~plain", plain, ""), (name, stats.tokens_per_second, speedup)]
    counts = counted(stats.output_tokens, "token")
    if pair.drafter is not None and stats.rounds:
        steps = counted(stats.rounds, "step")
        counts += f": 1 from the prompt, then {stats.acceptance_length:.1f} per step in {steps}"
    lines = [Text(counts)]
    if result.finish_reason == "length":
        lines[0].append(f" ({pair.limit_reached(stats)})", style="yellow")
    if runs.plain:
        found = runs.first_difference
        verdict = ("yes", "bold green")
        if found is not None:
            verdict = (f"no, from token {found + 1} on", "bold red")
        lines.append(Text.assemble("identical to plain decoding: ", verdict))
    return Group(*([speeds(rows)] if stats.rounds else []), *lines)


def as_json(pair: Pair, runs: Comparison, result: Result) -> dict[str, Any]:
    """The object of `--json`, and the last line of `--json-lines`."""
    stats = result.stats
    content = {
        "model": pair.target.name,
        "text": result.text,
        "tokens": result.tokens,
        "finish_reason": result.finish_reason,
        "prompt_tokens": stats.prompt_tokens,
        "output_tokens": stats.output_tokens,
        "rounds": stats.rounds,
        "block_size": stats.block_size,
        "widths": dict(sorted(stats.widths.items())),
        "trees": dict(sorted(stats.trees.items())),
        "seed": stats.seed,
        "tokens_per_round": stats.acceptance_length,
        "tokens_per_second": runs.drafted_speed,
        "blas": pair.blas.name,
    }
    if runs.plain:
        content |= {
            "plain_tokens_per_second": runs.plain_speed,
            "speedup": runs.speedup,
            "identical": runs.first_difference is None,
            "first_difference": runs.first_difference,
        }
    return content


def event_as_json(number: int, event: Event) -> dict[str, Any]:
    """A line of `--json-lines`: what the prefill (number 0) or one step added."""
    return {
        "event": "round" if number else "first",
        "text": event.text,
        "tokens": event.tokens,
        "drafted": event.drafted,
        "accepted": event.accepted,
    }


def stats_as_json(stats: Stats) -> dict[str, Any]:
    """The counters that `--stats` adds to `--json`."""
    names = (
        "prompt_tokens reused_tokens output_tokens rounds drafted_tokens accepted_tokens "
        "acceptance_length acceptance_rate widths trees prefill_seconds decode_seconds "
        "first_token_seconds peak_bytes"
    )
    return {name: getattr(stats, name) for name in names.split()}


def stats_as_lines(stats: Stats) -> list[str]:
    """The same counters for people, one in each line."""
    counters = stats_as_json(stats) | {"peak_bytes": f"{stats.peak_bytes:,}"}
    counters |= {"widths": steps_by_rows(stats.widths), "trees": steps_by_rows(stats.trees)}
    shown = {n: f"{v:.3f}" if isinstance(v, float) else f"{v}" for n, v in counters.items()}
    return [f"{name.replace('_', ' '):20}{value}" for name, value in shown.items()]
