"""What `bench` does unless it is asked for something else: measure, and show what was measured."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import TYPE_CHECKING, Any

from rich.table import Table
from rich.text import Text

from dflash_mlx.bench.datasets import BenchPrompt
from dflash_mlx.bench.report import run_content
from dflash_mlx.bench.server import Server, measure_server
from dflash_mlx.bench.summary import Measured, drafting
from dflash_mlx.machine.facts import computer, machine

from .output import make_table, note, stderr, stdout
from .pair import Pair, measuring

if TYPE_CHECKING:
    from dflash_mlx.policy.rounds import AnyPolicy

TINY = "tiny"  # what --model is when nobody gave it; no server has it


def of_pair(pair: Pair, prompts: list[BenchPrompt], setup: Mapping[str, Any]) -> dict[str, Any]:
    """Measure plain decoding, drafting and mlx-lm; everything about it, as JSON holds it."""
    from dflash_mlx.bench.context import stretched
    from dflash_mlx.bench.measure import measure_all

    target, tokens = pair.target, setup["max_tokens"]
    if setup["context_lengths"]:
        lengths = setup["context_lengths"]
        prompts = [one for n in lengths for one in stretched(target, prompts, n, tokens)]
    settings: dict[str, Any] = {"max_tokens": tokens, "block_size": pair.block_size}
    if setup["temperature"]:
        settings["sampling"] = {"temperature": setup["temperature"], "seed": setup["seed"]}
    settings["trees"] = _trees(pair, setup["tree_budget"])
    settings["against_mlx_lm"] = pair.member is None
    measured = measure_all(target, pair.drafter, prompts, setup["repeats"], **settings)
    what = {"model": target.name, "title": pair.title, "block_size": pair.rows}
    done = _shown(measured, len(prompts))
    return run_content({**what, **setup, "machine": machine(pair.blas)}, done)


def _trees(pair: Pair, budget: int | str | None) -> AnyPolicy | None:
    """What decides how large draft trees are; None leaves them out."""
    from dflash_mlx.policy.trees import TreePolicy, tree_policy

    if budget is None:
        return None
    if isinstance(budget, int):
        return TreePolicy.fixed(budget)
    assert pair.drafter is not None  # bench always drafts
    return tree_policy(pair.target, pair.drafter, pair.kv_bits, meanwhile=measuring)


def server_at(url: str, model: str) -> Server:
    """A server, and the model that was named, or its own first one. Raises `ServerError`."""
    return Server.find(url, None if model == TINY else model)


def of_server(
    url: str, model: str, prompts: list[BenchPrompt], setup: Mapping[str, Any]
) -> dict[str, Any]:
    """Measure a server from outside; everything about it, as JSON holds it."""
    server = server_at(url, model)
    measured = measure_server(
        server,
        prompts,
        setup["repeats"],
        setup["max_tokens"],
        setup["temperature"],
        setup["seed"] or 0,
    )
    what = {"model": server.model, "title": f"{server.model} · {server.url}", "block_size": None}
    done = _shown(measured, len(prompts))
    return run_content({**what, **setup, "machine": computer()}, done)


def _shown(measured: Iterable[Measured], prompts: int) -> list[Measured]:
    """All of them, with a bar on a terminal's stderr meanwhile."""
    from rich import progress as bars

    columns = (
        bars.TextColumn("{task.description}"),
        bars.BarColumn(),
        bars.MofNCompleteColumn(),
        bars.TimeRemainingColumn(),
    )
    done = []
    console = stderr()
    unseen = not console.is_terminal
    with bars.Progress(*columns, console=console, transient=True, disable=unseen) as progress:
        task = progress.add_task("warming up", total=prompts)
        for one in measured:
            done.append(one)
            progress.update(task, description=one.prompt.category)
            progress.advance(task, 0 if one.prompt.then else 1)
    return done


def show(content: Mapping[str, Any]) -> None:
    """The table of a run on stdout, and what there is to know about it on stderr."""
    stdout().print(_table(content))
    for one in content["differences"]:
        gap = "one ended" if one["logit_gap"] is None else f"logit gap {one['logit_gap']:.2g}"
        where = f"{one['way']} is not identical from token {one['token'] + 1} on ({gap})"
        stdout().print(Text(f"{where}: {' '.join(one['prompt'].split())[:80]}", style="red"))
    for category, figures in (content["protocol_figures"] or {}).items():
        note(f"{content['protocol']}, {category}: {_by_protocol(figures)}")
    repeats, overall = content["repeats"], content["overall"]
    note(f"{content['title']}; medians of tokens per second and of speedups (x), tokens a round")
    note(f"runs of each prompt in each way, in turns: {repeats}")
    waits = (
        f"{name} {1e3 * way['first_token_seconds']['median']:,.0f} ms"
        for name, way in overall["ways"].items()
    )
    note("first token after " + ", ".join(waits))
    if (overall["exact"] or 0) < overall["with_answer"]:
        note("exact: answers that are the known one word for word; one cut by --max-tokens is not")
    peaks = [way["peak_bytes"] for way in overall["ways"].values() if way["peak_bytes"]]
    if peaks:
        note(f"peak memory {max(peaks) / 1e6:,.0f} MB")
    note(", ".join(f"{name} {value}" for name, value in content["machine"].items()))
    overhead = overall["overhead_ms_per_round"]
    if overhead is not None and overhead < 0:
        note(
            f"overhead per round: unknown, for the machine was busy: the leanest rounds took "
            f"{-overhead:.2f} ms longer than ours"
        )
    elif overhead is not None:
        note(f"overhead per round, beyond the leanest: {overhead:.2f} ms")


def _by_protocol(figures: Mapping[str, Any]) -> str:
    """A suite's figures by the means of a protocol, in words."""
    parts = {
        "{:.2f}x plain": figures["speedup"],
        "{:.2f}x mlx-lm": figures["over_mlx_lm"],
        "{:.2f} tokens a round": figures["acceptance_length"],
    }
    known = [text.format(value) for text, value in parts.items() if value is not None]
    return f"{', '.join(known)} ({figures['answers']} answers)"


def _table(content: Mapping[str, Any]) -> Table:
    overall = content["overall"]
    drafts = drafting(overall["ways"])
    ways = [*(way for way in overall["ways"] if way not in drafts), *drafts]  # baselines first
    exact = overall["exact"] is not None
    compared = any(way["identical"] is not None for way in overall["ways"].values())
    dense = len(drafts) > 1  # two ways to draft in 80 columns
    further = ("x", "round") if dense else ("speedup", "tok/round")
    titles = [title for name in ways for title in (name, *further * (name in drafts))]
    titles += ["identical"] * compared + ["exact"] * exact
    table = make_table("category", *titles, padding=1 if dense else 2)
    for row in (*content["categories"], overall):
        cells = [row["category"]]
        for name in ways:
            way = row["ways"][name]
            cells.append(f"{way['tokens_per_second']['median']:,.0f}")
            if name in drafts:
                cells.append(f"{way['speedup']['median']:.2f}x")
                cells.append(f"{way['tokens_per_round'] or 0:.2f}")
        if compared:
            identical = min(row["ways"][name]["identical"] for name in drafts)
            cells.append(f"{identical}/{row['prompts']}")
        if exact:
            cells.append(f"{row['exact']}/{row['with_answer']}" if row["with_answer"] else "-")
        table.add_row(*cells, style="bold" if row is overall else "")
    return table
