"""`dflash-mlx bench` and `report`: plain decoding, drafting and mlx-lm on the same prompts."""

from __future__ import annotations

import gc
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import typer
from rich.progress import Progress
from rich.table import Table
from rich.text import Text

from dflash_mlx.bench import server
from dflash_mlx.bench.datasets import (
    PROTOCOL_MAX_TOKENS,
    SUITES,
    BenchPrompt,
    choose_protocol_prompts,
    embedded_prompts,
    limit_per_category,
    read_prompts,
    suite_prompts,
)
from dflash_mlx.bench.results import (
    PLAIN,
    check_folder,
    describe_difference,
    drafting_methods,
    read_run,
    run_content,
    write_run,
)
from dflash_mlx.bench.server import ServerClient
from dflash_mlx.errors import SettingsError
from dflash_mlx.loading.hub import Hub
from dflash_mlx.loading.registry import EMBEDDED, NONE, known_drafter
from dflash_mlx.machine.facts import busy, computer, machine

from . import options, output
from .machines import Machines, cluster_member, runs_elsewhere
from .options import OUTPUT, argument, given, option
from .pair import Pair, open_pair, template_variables

PROMPTS = "What is measured"  # the group that --help shows
EMBEDDED_SUITE = "embedded"
SUITE_LIMIT = 10  # prompts of a hub suite, unless --limit says otherwise
PROTOCOL = "zlab"  # the one that --protocol knows
SEED = 0  # of sampling, so that every run makes the same texts
SUITE = f"{EMBEDDED_SUITE} (default), {', '.join(SUITES)}. Repeatable."
FILE = 'JSONL of {"prompt" or "messages", "category", "answer"} instead.'
LIMIT = f"Prompts per category. Default: {SUITE_LIMIT} for hub suites."
ZLAB = "zlab: prompts, lengths and means of z-lab's papers."
BLOCK = "Rows of a step. Default: the drafter's block."
TREES = "Also measure draft trees of N tokens, or auto."
CLIENTS = "With --openai: this many clients at once."
SERVED = "Measure an OpenAI-compatible server; --model is its name there."


def bench(
    context: typer.Context,
    *,
    names: options.Names,
    weights: options.Weights,
    max_tokens: int = options.setting("max_tokens"),
    block_size: int | None = options.setting("block_size", help=BLOCK),
    temperature: float = options.setting("temperature"),
    thinking: dict[str, Any] = options.settings("think", "reasoning_effort"),
    suite: list[str] | None = option(None, PROMPTS, "NAME", SUITE),
    prompts: Path | None = option(None, PROMPTS, "FILE", FILE),
    data: Path | None = option(None, PROMPTS, "DIR", "Read suites from here, not the hub."),
    protocol: str | None = option(None, PROMPTS, "NAME", ZLAB),
    limit: int | None = option(None, PROMPTS, "N", LIMIT, min=1),
    repeats: int = option(3, PROMPTS, "N", "Runs of each prompt and method.", min=1),
    tree_budget: int | str | None = options.setting("tree_budget", help=TREES, panel=PROMPTS),
    openai: str | None = option(None, PROMPTS, "URL", SERVED),
    concurrency: str | None = option(None, PROMPTS, "N,N", CLIENTS),
    out: Path | None = option(None, OUTPUT, "DIR", "Write bench.json here.", parser=options.named),
    machines: Machines,
    json: bool = options.JSON,
) -> None:
    """Compare plain decoding, drafting and mlx-lm on the same prompts, taking turns.
    The drafter is measured alone and in whole blocks: `generate` adds lookup and chooses lengths.
    """
    if runs_elsewhere(machines, names, weights, context):
        return
    if names.draft == NONE:
        raise SettingsError(f"--draft must not be {NONE} here: name a drafter.")
    if max_tokens < 2:  # the prefill brings the first
        raise SettingsError(f"--max-tokens must be 2 or more to measure a speed, not {max_tokens}.")
    clients = [] if concurrency is None else _numbers(concurrency)
    if protocol is not None:
        if protocol != PROTOCOL:
            raise SettingsError(f"--protocol must be {PROTOCOL}, not {protocol!r}.")
        repeats = 1
        max_tokens = max_tokens if "max_tokens" in given(context) else PROTOCOL_MAX_TOKENS
    hub = Hub(offline=weights.offline)
    chosen = _prompts(suite, prompts, limit, hub, data, protocol is not None)
    setup: dict[str, Any] = {
        "suite": str(prompts or ", ".join(suite or [EMBEDDED_SUITE])),
        "max_tokens": max_tokens,
        "repeats": repeats,
        "temperature": temperature,
        "seed": SEED if temperature else None,
        "tree_budget": tree_budget,
        "protocol": protocol,
        **thinking,
        "busy": busy(),
    }
    if out is not None:  # hours of measuring must not end in a folder that cannot be written
        check_folder(out)
    if openai is not None:
        client = ServerClient.find(openai, None if names.model == EMBEDDED else names.model)
        if clients:
            _measure_clients(client, chosen, clients, setup, json)
            return
        content = _measure_server(client, chosen, setup)
    else:
        network = replace(names, draft=names.draft or known_drafter(names.model))
        # Whole blocks: what the drafter is worth, without the policy's choice of draft length.
        opening: dict[str, Any] = {"settings": {"block_size": block_size}}
        opening["member"] = cluster_member(context)  # of which none has an adapter
        content = _measure_pair(open_pair(network, weights, **opening), chosen, setup)
        if names.adapter is not None:
            gc.collect()  # the tuned target makes room
            untuned = open_pair(replace(network, adapter=None), weights, **opening)
            once = setup | {"repeats": 1, "tree_budget": None}
            found = _measure_pair(untuned, chosen, once, with_mlx_lm=False)
            content["untuned_acceptance_length"] = _acceptance(found)
    if json:
        output.print_json(content)
    else:
        _show(content)
    if out is not None:
        write_run(out, content)


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
        _show(run)


def _numbers(text: str) -> list[int]:
    numbers = [int(one) if one.strip().isdecimal() else 0 for one in text.split(",")]
    if not all(numbers):
        raise SettingsError(f"--concurrency must be positive numbers, like 1,8, not {text!r}.")
    return numbers


def _prompts(
    suites: list[str] | None,
    file: Path | None,
    limit: int | None,
    hub: Hub,
    folder: Path | None,
    by_protocol: bool,
) -> list[BenchPrompt]:
    """The prompts to measure. Raises `DataError` and the errors of `suite_prompts`."""
    if file is not None:
        chosen = read_prompts(file)
        return chosen if limit is None else limit_per_category(chosen, limit)
    chosen = []
    for name in suites or [EMBEDDED_SUITE]:
        if name == EMBEDDED_SUITE:
            found = embedded_prompts()
        elif name in SUITES:
            found = suite_prompts(name, hub, folder)
            if by_protocol:
                found = choose_protocol_prompts(found)
            elif limit is None:
                found = limit_per_category(found, SUITE_LIMIT)
        else:
            known = ", ".join((EMBEDDED_SUITE, *SUITES))
            raise SettingsError(f"--suite must be one of {known}, not {name!r}.")
        chosen += found if limit is None else limit_per_category(found, limit)
    return chosen


def _measure_pair(
    pair: Pair, prompts: list[BenchPrompt], setup: Mapping[str, Any], with_mlx_lm: bool = True
) -> dict[str, Any]:
    """Measure plain decoding, drafting and mlx-lm. Returns the content of bench.json."""
    from dflash_mlx.bench.measure import measure_all

    names = ("max_tokens", "temperature", "seed") if setup["temperature"] else ("max_tokens",)
    settings = {name: setup[name] for name in names}
    further: dict[str, Any] = {
        "template": template_variables(pair.target, setup),
        "drafting": {"block_size": pair.block_size},
        "trees": _tree_settings(pair, setup["tree_budget"]),
        "with_mlx_lm": with_mlx_lm and pair.member is None,
    }
    methods = 2 + further["with_mlx_lm"] + (further["trees"] is not None)
    with _bar(prompts, setup["repeats"], methods) as ran:
        models = pair.target, pair.drafter
        done = [*measure_all(*models, prompts, setup["repeats"], settings, ran=ran, **further)]
    about = {"model": pair.target.name, "title": pair.title, "block_size": pair.rows}
    return run_content({**about, **setup, "machine": machine(pair.blas)}, done)


def _acceptance(content: Mapping[str, Any]) -> float:
    """Tokens per drafted step of a whole run."""
    methods = content["overall"]["methods"]
    return float(methods[drafting_methods(methods)[0]]["acceptance_length"] or 0)


def _tree_settings(pair: Pair, budget: int | str | None) -> dict[str, Any] | None:
    from dflash_mlx import DraftPolicy

    if budget is None:
        return None
    settings: dict[str, Any] = {"block_size": pair.block_size}
    if isinstance(budget, int):
        return settings | {"tree_budget": budget}
    assert pair.drafter is not None  # bench always drafts
    return settings | {"policy": DraftPolicy.of(pair.target, pair.drafter, trees=True)}


def _measure_server(
    client: server.ServerClient, prompts: list[BenchPrompt], setup: Mapping[str, Any]
) -> dict[str, Any]:
    """Measure a server from outside. Returns the content of bench.json. Raises `ServerError`."""
    settings = (setup["repeats"], setup["max_tokens"], setup["temperature"], setup["seed"] or 0)
    with _bar(prompts, setup["repeats"]) as ran:
        done = [*server.measure_server(client, prompts, *settings, ran)]
    title = f"{client.model} · {client.url}"
    about = {"model": client.model, "title": title, "block_size": None}
    return run_content({**about, **setup, "machine": computer()}, done)


def _measure_clients(
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
    with output.waiting("Warming up"):
        client.ask(prompts[0].messages, min(8, settings[0]), *settings[1:])
    rows = []
    for count in counts:
        with output.waiting(f"{count} at once"):
            rows.append(server.measure_concurrency(client, prompts, count, *settings))
    if json:
        about = {"model": client.model, "url": client.url, **setup, "machine": computer()}
        output.print_json({**about, "concurrency": rows})
        return
    table = output.make_table("clients", "tok/s", "first token", "p95", "gap", "p95 ")
    for row in rows:
        waits = (row["first_token_seconds"], row["gap_seconds"])
        cells = [_milliseconds(wait.get(key)) for wait in waits for key in ("median", "p95")]
        table.add_row(str(row["clients"]), output.rate(row["tokens_per_second"]), *cells)
    output.stdout().print(table)
    output.note(f"{client.model} · {client.url}; speed of all clients, median waits and p95")
    if setup["busy"]:
        output.note(setup["busy"])


def _milliseconds(seconds: float | None) -> str:
    return output.NOTHING if seconds is None else f"{1e3 * seconds:,.0f} ms"


@contextmanager
def _bar(
    prompts: list[BenchPrompt], repeats: int, methods: int = 1
) -> Iterator[Callable[[], object]]:
    """A bar on a terminal's stderr, moved by each run: of every turn and method, and to warm up."""
    turns, console = sum(1 + len(prompt.then) for prompt in prompts), output.stderr()
    with Progress(console=console, transient=True, disable=not console.is_terminal) as bar:
        task = bar.add_task("measuring", total=methods * (1 + turns * repeats))
        yield lambda: bar.advance(task)


def _show(content: Mapping[str, Any]) -> None:
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
    if untuned := content.get("untuned_acceptance_length"):
        tuned = f"{_acceptance(content):.2f} tokens per step with the adapter"
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
    titles = [t for name in methods for t in (name, *("x", "accept") * (name in drafting))]
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
