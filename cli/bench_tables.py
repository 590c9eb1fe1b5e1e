"""Run the measurements of `bench` behind a progress bar, and show their tables."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from rich.progress import track
from rich.table import Table
from rich.text import Text

from dflash_mlx.bench import server
from dflash_mlx.bench.datasets import BenchPrompt
from dflash_mlx.bench.report import describe_difference, run_content
from dflash_mlx.bench.summary import PromptRuns, drafting_methods
from dflash_mlx.machine.facts import computer, machine

from .output import counted, make_table, note, print_json, stderr, stdout, waiting
from .pair import Pair


def measure_pair(
    pair: Pair, prompts: list[BenchPrompt], setup: Mapping[str, Any]
) -> dict[str, Any]:
    """Measure plain decoding, drafting and mlx-lm. Returns the content of bench.json."""
    from dflash_mlx.bench.measure import measure_all

    sampling = {key: setup[key] for key in ("temperature", "seed")} if setup["temperature"] else {}
    measured = measure_all(
        pair.target,
        pair.drafter,
        prompts,
        setup["repeats"],
        max_tokens=setup["max_tokens"],
        block_size=pair.block_size,
        sampling=sampling,
        tree_settings=_tree_settings(pair, setup["tree_budget"]),
        with_mlx_lm=pair.member is None,
    )
    about = {"model": pair.target.name, "title": pair.title, "block_size": pair.rows}
    done = _with_bar(measured, prompts)
    return run_content({**about, **setup, "machine": machine(pair.blas)}, done)


def _tree_settings(pair: Pair, budget: int | str | None) -> dict[str, Any] | None:
    from dflash_mlx import DraftPolicy

    if budget is None:
        return None
    if isinstance(budget, int):
        return {"tree_budget": budget}
    assert pair.drafter is not None  # bench always drafts
    return {"policy": DraftPolicy.of(pair.target, pair.drafter, trees=True)}


def measure_server(
    client: server.ServerClient, prompts: list[BenchPrompt], setup: Mapping[str, Any]
) -> dict[str, Any]:
    """Measure a server from outside. Returns the content of bench.json. Raises `ServerError`."""
    settings = (setup["repeats"], setup["max_tokens"], setup["temperature"], setup["seed"] or 0)
    done = _with_bar(server.measure_server(client, prompts, *settings), prompts)
    title = f"{client.model} · {client.url}"
    about = {"model": client.model, "title": title, "block_size": None}
    return run_content({**about, **setup, "machine": computer()}, done)


def measure_clients(
    client: server.ServerClient,
    prompts: Sequence[BenchPrompt],
    counts: Sequence[int],
    setup: Mapping[str, Any],
    json: bool,
) -> None:
    """Measure a server with each number of clients, and show a row for each.

    Raises `ServerError`.
    """
    settings = (setup["max_tokens"], setup["temperature"], setup["seed"] or 0)
    with waiting("Warming up"):
        client.ask(prompts[0].messages, min(8, settings[0]), *settings[1:])
    rows = []
    for count in counts:
        with waiting(f"{count} at once"):
            rows.append(server.measure_concurrency(client, prompts, count, *settings))
    if json:
        about = {"model": client.model, "url": client.url, **setup, "machine": computer()}
        print_json({**about, "concurrency": rows})
        return
    table = make_table("clients", "tok/s", "first token", "p95", "gap", "p95 ")
    for row in rows:
        waits = (row["first_token_seconds"], row["gap_seconds"])
        cells = [_milliseconds(wait.get(key)) for wait in waits for key in ("median", "p95")]
        table.add_row(str(row["clients"]), f"{row['tokens_per_second']:,.0f}", *cells)
    stdout().print(table)
    note(f"{client.model} · {client.url}; tokens per second of all clients, median waits and p95")


def _milliseconds(seconds: float | None) -> str:
    return "-" if seconds is None else f"{1e3 * seconds:,.0f} ms"


def _with_bar(measured: Iterable[PromptRuns], prompts: list[BenchPrompt]) -> list[PromptRuns]:
    """Collect all results, with a progress bar if stderr is a terminal."""
    console = stderr()
    hidden = not console.is_terminal
    turns = sum(1 + len(prompt.then) for prompt in prompts)
    bar = track(measured, "measuring", turns, console=console, transient=True, disable=hidden)
    return list(bar)


def show(content: Mapping[str, Any]) -> None:
    """Print the table of a run to stdout, and its notes to stderr."""
    stdout().print(_table(content))
    for one in content["differences"]:
        stdout().print(Text(describe_difference(one), style="red"))
    for category, figures in (content["protocol_figures"] or {}).items():
        note(f"{content['protocol']}, {category}: {_protocol_text(figures)}")
    overall = content["overall"]
    note(f"{content['title']}; medians of {counted(content['repeats'], 'run')} per prompt")
    if (overall["exact"] or 0) < overall["with_answer"]:
        note("exact: the known answer, word for word; --max-tokens may cut answers short")
    peaks = [method["peak_bytes"] or 0 for method in overall["methods"].values()]
    if any(peaks):
        note(f"peak memory {max(peaks) / 1e6:,.0f} MB")
    note(", ".join(f"{name} {value}" for name, value in content["machine"].items()))


def _protocol_text(figures: Mapping[str, Any]) -> str:
    parts = {
        "{:.2f}x plain": figures["speedup"],
        "{:.2f}x mlx-lm": figures["over_mlx_lm"],
        "acceptance length {:.2f}": figures["acceptance_length"],
    }
    known = [text.format(value) for text, value in parts.items() if value is not None]
    return f"{', '.join(known)} ({figures['answers']} answers)"


def _table(content: Mapping[str, Any]) -> Table:
    """Tokens per second of each method; beside it speedup and acceptance length of drafting."""
    overall = content["overall"]
    drafting = drafting_methods(overall["methods"])
    methods = [*(name for name in overall["methods"] if name not in drafting), *drafting]
    exact = overall["exact"] is not None
    compared = any(method["identical"] is not None for method in overall["methods"].values())
    titles = [t for name in methods for t in (name, *("x", "accept") * (name in drafting))]
    titles += ["identical"] * compared + ["exact"] * exact
    table = make_table("category", *titles, padding=1)  # 80 columns
    for row in (*content["categories"], overall):
        cells = [row["category"]]
        for name in methods:
            method = row["methods"][name]
            cells.append(f"{method['tokens_per_second']['median']:,.0f}")
            if name in drafting:
                cells.append(f"{method['speedup']['median']:.2f}x")
                cells.append(f"{method['acceptance_length'] or 0:.2f}")
        if compared:
            identical = min(row["methods"][name]["identical"] for name in drafting)
            cells.append(f"{identical}/{row['prompts']}")
        if exact:
            cells.append(f"{row['exact']}/{row['with_answer']}" if row["with_answer"] else "-")
        table.add_row(*cells, style="bold" if row is overall else "")
    return table
