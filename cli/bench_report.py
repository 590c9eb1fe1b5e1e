"""The table of a benchmark's results, and `dflash-mlx report`, which shows it again."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from rich.table import Table
from rich.text import Text

from dflash_mlx.bench.results import PLAIN, describe_difference, drafting_methods, read_run

from . import options, output
from .options import argument


def report(
    folders: list[Path] = argument(..., "Folders that 'bench --out' has written.", metavar="DIR"),
    json: bool = options.JSON,
) -> None:
    """Show benchmark runs again, of this machine or of others."""
    runs = {str(folder): read_run(folder) for folder in folders}
    if json:
        output.print_json({"runs": runs})
        return
    for name, run in runs.items():
        output.stdout().print(name, style="bold")
        show(run)


def overall_acceptance_length(content: Mapping[str, Any]) -> float:
    """Return the tokens per drafted step of a whole run."""
    methods = content["overall"]["methods"]
    return float(methods[drafting_methods(methods)[0]]["acceptance_length"] or 0)


def ended_early(content: Mapping[str, Any]) -> bool:
    """Whether a run was interrupted before its last prompt."""
    return len(content["prompts"]) < content.get("planned_prompts", 0)


def show(content: Mapping[str, Any]) -> None:
    """Print the table of a run to stdout, and its notes to stderr."""
    output.stdout().print(_table(content))
    for difference in content["differences"]:
        output.stdout().print(Text(describe_difference(difference), style="red"))
    for category, figures in (content["protocol_figures"] or {}).items():
        output.note(f"{content['protocol']}, {category}: {_protocol_text(figures)}")
    overall = content["overall"]
    rows = (*content["categories"], overall)
    runs = output.counted(content["repeats"], "run")
    output.note(f"{content['title']}; medians of {runs} per prompt, then quartiles of all")
    if any(method["speedup"] for name, method in overall["methods"].items() if name != PLAIN):
        output.note("x: the median over pairs of runs of one turn, not a ratio of the columns")
    if ended_early(content):
        measured = f"{len(content['prompts'])} of {content['planned_prompts']} prompts"
        output.note(f"Ended early, after {measured}.")
    untuned = content.get("untuned_acceptance_length")
    if untuned:
        tuned = f"{overall_acceptance_length(content):.2f} tokens per step with the adapter"
        output.note(f"{tuned}, {untuned:.2f} without it: the same drafter and prompts")
    if content["block_size"]:
        output.note(
            "Each step drafted a full block; generate chooses the draft length, and may add lookup."
        )
    if any("?" in cell for row in rows for cell in _figures(row, overall["methods"], "median")):
        output.note(output.DOUBTFUL)
    if content.get("busy"):
        output.note(content["busy"])
    if (overall["exact"] or 0) < overall["with_answer"]:
        output.note("exact: the known answer, word for word; --max-tokens may cut answers short")
    peaks = [method["peak_bytes"] or 0 for method in overall["methods"].values()]
    if any(peaks):
        output.note(f"peak memory {max(peaks) / 1e6:,.0f} MB")
    output.note(", ".join(f"{name} {value}" for name, value in content["machine"].items()))


def _protocol_text(figures: Mapping[str, Any]) -> str:
    """Return one line with the means of a protocol's category."""
    parts = {
        "{:.2f}x plain": figures["speedup"],
        "{:.2f}x mlx-lm": figures["over_mlx_lm"],
        "acceptance length {:.2f}": figures["acceptance_length"],
    }
    measured = [text.format(value) for text, value in parts.items() if value is not None]
    return f"{', '.join(measured)} (means of {figures['answers']})"


def _table(content: Mapping[str, Any]) -> Table:
    """Make the table: tokens per second of each method, speedup and acceptance of drafting."""
    overall = content["overall"]
    drafting = drafting_methods(overall["methods"])
    methods = [name for name in overall["methods"] if name not in drafting]
    methods += drafting
    has_answers = overall["exact"] is not None
    is_compared = any(method["identical"] is not None for method in overall["methods"].values())
    titles = []
    for name in methods:
        titles.append(name)
        if name in drafting:
            titles += ["x", "tok/step"]
    if is_compared:
        titles.append("identical")
    if has_answers:
        titles.append("exact")
    table = output.make_table("category", *titles, padding=1)  # fits into 80 columns
    for row in (*content["categories"], overall):
        cells = [row["category"], *_figures(row, methods, "median")]
        if is_compared:
            identical = min(row["methods"][name]["identical"] for name in drafting)
            cells.append(f"{identical}/{row['prompts']}")
        if has_answers:
            exact = f"{row['exact']}/{row['with_answer']}"
            cells.append(exact if row["with_answer"] else output.NOTHING)
        table.add_row(*cells, style="bold" if row is overall else "")
    for title, quartile in (("25%", "low"), ("75%", "high")):
        table.add_row(title, *_figures(overall, methods, quartile), style="dim")
    return table


def _figures(row: Mapping[str, Any], methods: Sequence[str], statistic: str) -> Iterator[str]:
    """Yield a row's cells: medians, or the quartiles of all runs ("low", "high")."""
    for name in methods:
        method = row["methods"][name]
        yield output.rate(method["tokens_per_second"][statistic])
        if name in drafting_methods([name]):
            acceptance = method["acceptance_length"] or 0
            yield output.times(method["speedup"][statistic], acceptance)
            yield f"{acceptance:.2f}" if statistic == "median" else ""
