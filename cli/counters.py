"""The counters of a request: what `--stats` prints, and what it adds to `--json`."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from .output import counted

if TYPE_CHECKING:
    from collections.abc import Mapping

    from dflash_mlx import Stats


def counters(stats: Stats) -> dict[str, Any]:
    """All of them by name, as JSON holds them; seconds and bytes say so in their names."""
    return {
        "prompt_tokens": stats.prompt_tokens,
        "reused_tokens": stats.reused_tokens,
        "output_tokens": stats.output_tokens,
        "rounds": stats.rounds,
        "drafted_tokens": stats.drafted_tokens,
        "accepted_tokens": stats.accepted_tokens,
        "acceptance_length": stats.acceptance_length,
        "acceptance_rate": stats.acceptance_rate,
        "widths": dict(sorted(stats.widths.items())),
        "trees": dict(sorted(stats.trees.items())),
        "prefill_seconds": stats.prefill_seconds,
        "decode_seconds": stats.decode_seconds,
        "first_token_seconds": stats.first_token_seconds,
        "peak_bytes": stats.peak_bytes,
    }


def counter_lines(stats: Stats) -> list[str]:
    """The same for people, one a line."""
    kept = counted(stats.accepted_tokens, "token")
    rows = {
        "prompt": f"{counted(stats.prompt_tokens, 'token')}, {stats.reused_tokens} of them reused",
        "output": f"{counted(stats.output_tokens, 'token')} in {counted(stats.rounds, 'round')}",
        "drafted": counted(stats.drafted_tokens, "token"),
        "accepted": f"{kept}, {stats.acceptance_rate:.1%} of the drafted",
        "acceptance length": f"{stats.acceptance_length:.2f} tokens per round",
        "rounds x rows": rounds_by_rows(stats.widths),
        "of these, trees": rounds_by_rows(stats.trees),
        "prefill": f"{stats.prefill_seconds:.3f} s",
        "decode": f"{stats.decode_seconds:.3f} s",
        "first token": f"after {stats.first_token_seconds:.3f} s",
        "peak memory": f"{stats.peak_bytes / 1e6:,.1f} MB",
    }
    return [f"{name:18}{value}" for name, value in rows.items()]


def rounds_by_rows(widths: Mapping[int, int]) -> str:
    """How many rounds had how many rows: "3 x 8, 1 x 16"."""
    return ", ".join(f"{count} x {rows}" for rows, count in sorted(widths.items())) or "none"


def drafting(stats: Stats) -> str:
    """How many rounds verified drafts: "drafts in 8 of 18 rounds, mostly 16 rows"."""
    drafted = {rows: count for rows, count in stats.widths.items() if rows > 1}
    if not drafted:
        return "no drafts"
    told = f"drafts in {sum(drafted.values())} of {counted(stats.rounds, 'round')}"
    rows, count = max(drafted.items(), key=lambda each: each[1])
    if 2 * count <= sum(drafted.values()):
        return f"{told}, {min(drafted)} to {max(drafted)} rows"
    mostly = "mostly " if len(drafted) > 1 else ""
    return f"{told}, {mostly}{'trees of ' if rows in stats.trees else ''}{rows} rows"
