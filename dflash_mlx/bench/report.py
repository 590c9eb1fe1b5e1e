"""A run as files: JSON that holds everything, CSV and Markdown for people, and back again.

A folder gets all files of a run or none: they are written aside and put in place when the last one
is whole. docs/bench.schema.json describes the JSON.
"""

from __future__ import annotations

import csv
import io
import json
import os
import shutil
import tempfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from ..errors import DataError, OutputError
from ..validation import read_json
from . import protocol
from .summary import Measured, by_category, differences, summarize

FORMAT, VERSION = "dflash-mlx bench", 1
JSON, CSV, MARKDOWN = "bench.json", "bench.csv", "bench.md"
SPREADS = ("tokens_per_second", "first_token_seconds", "speedup")


def run_content(setup: Mapping[str, Any], measured: Sequence[Measured]) -> dict[str, Any]:
    """Everything there is to know about a run, as JSON holds it.

    Args:
        setup: what ran, how and on which machine.
        measured: at least one prompt.
    """
    now = datetime.now(UTC).isoformat(timespec="seconds")
    return {
        "format": FORMAT,
        "version": VERSION,
        "measured": now,
        **setup,
        "protocol_figures": protocol.as_json(measured) if setup.get("protocol") else None,
        "overall": summarize("all", measured).as_json(),
        "categories": [row.as_json() for row in by_category(measured)],
        "differences": differences(measured),
        "prompts": [_prompt(one) for one in measured],
    }


def _prompt(one: Measured) -> dict[str, Any]:
    """Every run of one prompt, in the order of the turns."""
    stats = {way: [run.stats for run in runs] for way, runs in one.runs.items()}
    return {
        "category": one.prompt.category,
        "prompt_tokens": one.best.stats.prompt_tokens,
        "output_tokens": one.best.stats.output_tokens,
        "ways": {
            way: {
                "tokens_per_second": [run.tokens_per_second for run in runs],
                "first_token_seconds": [run.first_token_seconds for run in runs],
                "rounds": runs[0].rounds,
            }
            for way, runs in stats.items()
        },
    }


def as_csv(content: Mapping[str, Any]) -> str:
    """A line for each category and way, then those over all prompts."""
    spreads = [f"{name}{end}" for name in SPREADS for end in ("", "_low", "_high")]
    rows = [
        {
            **{key: row[key] for key in ("category", "prompts", "prompt_tokens", "output_tokens")},
            "way": name,
            **{key: way[key] for key in ("tokens_per_round", "identical", "peak_bytes")},
            **{
                f"{spread}{end}": way[spread] and way[spread][value]
                for spread in SPREADS
                for end, value in (("", "median"), ("_low", "low"), ("_high", "high"))
            },
        }
        for row in (*content["categories"], content["overall"])
        for name, way in row["ways"].items()
    ]
    first = ("category", "way", "prompts", "prompt_tokens", "output_tokens")
    out = io.StringIO()
    writer = csv.DictWriter(
        out, [*first, *spreads, "tokens_per_round", "identical", "peak_bytes"], lineterminator="\n"
    )
    writer.writeheader()
    writer.writerows(rows)
    return out.getvalue()


def as_markdown(content: Mapping[str, Any], plots: Sequence[str] = ()) -> str:
    """The run to be read: setup, machine, a table, and what was not identical."""
    asked = {key: content[key] for key in content if not isinstance(content[key], dict | list)}
    del asked["format"], asked["version"]
    lines = [f"# {content['model']}, measured with dflash-mlx", ""]
    lines += [f"- {key.replace('_', ' ')}: {value}" for key, value in asked.items() if value]
    lines += ["", "Machine: " + ", ".join(f"{k} {v}" for k, v in content["machine"].items()), ""]
    lines += ["Medians, with the quartiles in parentheses.", ""]
    lines += _table(HEADER, [cells(r, name, w) for r in _rows(content) for name, w in _ways(r)])
    for one in content["differences"]:
        gap = "one ended" if one["logit_gap"] is None else f"logit gap {one['logit_gap']:.2g}"
        question = " ".join(one["prompt"].split())[:80]
        lines += ["", f"Not identical, {one['way']}, token {one['token'] + 1} ({gap}): {question}"]
    for name in plots:
        lines += ["", f"![{Path(name).stem}]({name})"]
    return "\n".join(lines) + "\n"


HEADER = ("category", "way", "tok/s", "speedup", "tokens/round", "first token", "peak", "identical")


def cells(row: Mapping[str, Any], name: str, way: Mapping[str, Any]) -> list[str]:
    """One line of the table under `HEADER`."""
    speed, speedup = way["tokens_per_second"], way["speedup"]
    return [
        row["category"],
        name,
        f"{speed['median']:,.0f} ({speed['low']:,.0f}-{speed['high']:,.0f})",
        f"{speedup['median']:.2f}x ({speedup['low']:.2f}-{speedup['high']:.2f})"
        if speedup and name != "plain"
        else "",
        "" if way["tokens_per_round"] is None else f"{way['tokens_per_round']:.2f}",
        f"{1e3 * way['first_token_seconds']['median']:,.0f} ms",
        "" if way["peak_bytes"] is None else f"{way['peak_bytes'] / 1e6:,.0f} MB",
        "" if way["identical"] is None else f"{way['identical']}/{row['prompts']}",
    ]


def _rows(content: Mapping[str, Any]) -> list[dict[str, Any]]:
    return [*content["categories"], content["overall"]]


def _ways(row: Mapping[str, Any]) -> list[tuple[str, dict[str, Any]]]:
    return list(row["ways"].items())


def _table(header: Sequence[str], rows: Sequence[Sequence[str]]) -> list[str]:
    return [f"| {' | '.join(line)} |" for line in (header, ["---"] * len(header), *rows)]


@contextmanager
def results_folder(folder: Path) -> Iterator[Callable[[Mapping[str, bytes]], None]]:
    """Make sure now that results can be written to `folder`, and write them when they are there.

    Yields a function that takes the files by name and puts all of them in place, or none. Nothing
    is left behind when it is not called.

    Raises `OutputError`: no permission, a full disk, or a run that is there already.
    """
    new = not folder.exists()
    try:
        folder.mkdir(parents=True, exist_ok=True)
        if (folder / JSON).exists():
            raise OutputError(f"{folder} holds a run already: choose another folder.")
        aside = Path(tempfile.mkdtemp(prefix=".unfinished-", dir=folder))
    except OSError as error:
        raise OutputError.because(folder, error) from error

    def write(files: Mapping[str, bytes]) -> None:
        try:
            for name, content in files.items():
                with (aside / name).open("wb") as file:
                    file.write(content)
                    file.flush()
                    os.fsync(file.fileno())
            for name in files:
                os.replace(aside / name, folder / name)
        except OSError as error:
            raise OutputError.because(folder, error) from error

    try:
        yield write
    finally:
        shutil.rmtree(aside, ignore_errors=True)
        if new and not any(folder.iterdir()):
            folder.rmdir()


def write_picture(file: Path, content: bytes) -> None:
    """Write one picture. Raises `OutputError`."""
    try:
        file.write_bytes(content)
    except OSError as error:
        raise OutputError.because(file, error) from error


def read_run(path: Path) -> dict[str, Any]:
    """What a run's folder, or its JSON file, holds. Raises `DataError`."""
    file = path / JSON if path.is_dir() else path
    content = read_json(file, DataError)
    if (content.get("format"), content.get("version")) != (FORMAT, VERSION):
        raise DataError(f"{file}: not a run of 'dflash-mlx bench --out', or of another version.")
    return content


def as_files(content: Mapping[str, Any], plots: Mapping[str, bytes]) -> dict[str, bytes]:
    """A run's files by name, its JSON last: where that one is, all are."""
    return {
        **plots,
        CSV: as_csv(content).encode(),
        MARKDOWN: as_markdown(content, list(plots)).encode(),
        JSON: (json.dumps(content, ensure_ascii=False, indent=1) + "\n").encode(),
    }


def not_alike(runs: Mapping[str, Mapping[str, Any]]) -> list[str]:
    """What runs were not asked alike, one line each: figures beside each other may mislead.

    Args:
        runs: what their JSON holds, by name.
    """
    found = []
    for key in ("model", "suite", "max_tokens", "temperature", "context_lengths", "block_size"):
        values = {name: run.get(key) for name, run in runs.items()}
        if len({str(value) for value in values.values()}) > 1:
            told = ", ".join(f"{name} {value}" for name, value in values.items())
            found.append(f"{key.replace('_', ' ')} differs: {told}")
    prompts = {name: run["overall"]["prompts"] for name, run in runs.items()}
    if len(set(prompts.values())) > 1:
        told = ", ".join(f"{name} {count}" for name, count in prompts.items())
        found.append(f"number of prompts differs: {told}")
    return found
