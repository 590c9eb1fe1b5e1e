"""What `generate` says of an answer: a panel for people, an object for programs."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from rich.console import Group
from rich.text import Text

from .output import MIN_STEPS, counted, speeds
from .pair import Pair

if TYPE_CHECKING:
    from dflash_mlx import Event, Result, Stats
    from dflash_mlx.bench.measure import Comparison


def plain_by_cost(pair: Pair, stats: Stats) -> float | None:
    """Tokens per second of plain decoding by measured costs; None where none were measured.

    As many as there were rounds in a second at least: a plain one takes no longer than any other,
    whatever the machine was busy with when costs were measured.
    """
    if pair.chains is None:
        return None
    # The depth in the middle of the answer: attention makes later tokens dearer.
    seconds = pair.chains.plain_seconds(stats.prompt_tokens + stats.output_tokens // 2)
    return max(1 / seconds, stats.tokens_per_second / stats.acceptance_length)


def summary(pair: Pair, comparison: Comparison, result: Result) -> Group:
    """What the panel says; a figure that was computed and not run is marked with ~."""
    stats, runs = result.stats, comparison
    name = pair.drafts
    plain = None
    if not runs.plain and runs.drafter is not None and stats.rounds >= MIN_STEPS:
        plain = plain_by_cost(pair, stats)
    if runs.plain:
        rows = [
            ("plain", runs.plain_speed, ""),
            (name, runs.drafted_speed, f"{runs.speedup:.2f}x"),
        ]
    elif plain:
        speedup = f"~{stats.tokens_per_second / plain:.2f}x"
        rows = [("~plain", plain, ""), (name, stats.tokens_per_second, speedup)]
    else:
        rows = [(name, stats.tokens_per_second, "")]
    counts = counted(stats.output_tokens, "token")
    if runs.drafter is not None and stats.rounds:
        # The first one is the prompt's: no round made it.
        each = "each of " if stats.rounds > 1 else ""
        counts += f": the first, then {stats.acceptance_length:.1f} in {each}"
        counts += counted(stats.rounds, "round")
    lines = [Text(counts)]
    if result.finish_reason == "length":
        lines[0].append(f" ({pair.limit_reached(stats)})", style="yellow")
    if runs.plain:
        lines.append(_verdict(runs.first_difference))
    return Group(*([speeds(rows)] if stats.rounds else []), *lines)


def _verdict(difference: int | None) -> Text:
    if difference is None:
        return Text.assemble("identical to plain decoding: ", ("yes", "bold green"))
    return Text.assemble(
        "identical to plain decoding: ", (f"no, from token {difference + 1} on", "bold red")
    )


def as_json(pair: Pair, comparison: Comparison, result: Result) -> dict[str, Any]:
    """The object of `--json`, and the last line of `--json-lines`."""
    stats, runs = result.stats, comparison
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
    """A line of `--json-lines`: what the prefill (number 0) or one round made certain."""
    return {
        "event": "round" if number else "first",
        "text": event.text,
        "tokens": event.tokens,
        "drafted": event.drafted,
        "accepted": event.accepted,
    }
