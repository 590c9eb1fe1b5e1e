"""What `dflash-mlx bench` found, as a table; and `report`, which shows it again."""

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


def acceptance_of(content: Mapping[str, Any]) -> float:
    """Tokens per drafted step of a whole run."""
    methods = content["overall"]["methods"]
    return float(methods[drafting_methods(methods)[0]]["acceptance_length"] or 0)


def ended_early(content: Mapping[str, Any]) -> bool:
    """Whether a run was ended before its last prompt."""
    return len(content["prompts"]) < content.get("planned_prompts", 0)


def show(content: Mapping[str, Any]) -> None:
    """Print the table of a run to stdout, and its notes to stderr."""
    output.stdout().print(_table(content))
    for one in content["differences"]:
        output.stdout().print(Text(describe_difference(one), style="red"))
    for category, figures in (content["protocol_figures"] or {}).items():
        output.note(f"{content['protocol']}, {category}: {_protocol_text(figures)}")
    overall = content["overall"]
    rows = (*content["categories"], overall)
    runs = output.counted(content["repeats"], "run")
    output.note(f"{content['title']}; medians of {runs} per prompt, then quartiles of all")
    if any(method["speedup"] for name, method in overall["methods"].items() if name != PLAIN):
        output.note("x: the median over pairs of runs of one turn, not a ratio of the columns")
    if ended_early(content):
        left = f"{len(content['prompts'])} of {content['planned_prompts']} prompts"
        output.note(f"Ended early, after {left}.")
    if untuned := content.get("untuned_acceptance_length"):
        tuned = f"{acceptance_of(content):.2f} tokens per step with the adapter"
        output.note(f"{tuned}, {untuned:.2f} without it: the same drafter and prompts")
    if content["block_size"]:
        output.note(
            "In whole blocks; generate chooses lengths, and adds lookup to a known drafter."
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
    parts = {
        "{:.2f}x plain": figures["speedup"],
        "{:.2f}x mlx-lm": figures["over_mlx_lm"],
        "acceptance length {:.2f}": figures["acceptance_length"],
    }
    known = [text.format(value) for text, value in parts.items() if value is not None]
    return f"{', '.join(known)} (means of {figures['answers']})"


def _table(content: Mapping[str, Any]) -> Table:
    """Tokens per second of each method; beside it speedup and acceptance length of drafting."""
    overall = content["overall"]
    drafting = drafting_methods(overall["methods"])
    methods = [*(name for name in overall["methods"] if name not in drafting), *drafting]
    exact = overall["exact"] is not None
    compared = any(method["identical"] is not None for method in overall["methods"].values())
    titles = [t for name in methods for t in (name, *("x", "tok/step") * (name in drafting))]
    titles += ["identical"] * compared + ["exact"] * exact
    table = output.make_table("category", *titles, padding=1)  # 80 columns
    for row in (*content["categories"], overall):
        cells = [row["category"], *_figures(row, methods, "median")]
        if compared:
            identical = min(row["methods"][name]["identical"] for name in drafting)
            cells.append(f"{identical}/{row['prompts']}")
        if exact:
            cells.append(
                f"{row['exact']}/{row['with_answer']}" if row["with_answer"] else output.NOTHING
            )
        table.add_row(*cells, style="bold" if row is overall else "")
    for title, quartile in (("25%", "low"), ("75%", "high")):
        table.add_row(title, *_figures(overall, methods, quartile), style="dim")
    return table


def _figures(row: Mapping[str, Any], methods: Sequence[str], which: str) -> Iterator[str]:
    """The cells of a row's methods: medians, or quartiles of all runs ("low", "high")."""
    for name in methods:
        method = row["methods"][name]
        yield output.rate(method["tokens_per_second"][which])
        if name in drafting_methods([name]):
            acceptance = method["acceptance_length"] or 0
            yield output.times(method["speedup"][which], acceptance)
            yield f"{acceptance:.2f}" if which == "median" else ""
