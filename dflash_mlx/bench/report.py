"""A benchmark run as JSON, which docs/bench.schema.json describes."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from datetime import UTC, datetime
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from ..errors import DataError, OutputError
from ..machine.facts import nearest_there
from ..validation import read_json
from .summary import PromptRuns, differences, grouped, protocol_figures, summarize

FORMAT, VERSION = "dflash-mlx bench", 1
JSON = "bench.json"


def run_content(setup: Mapping[str, Any], measured: Sequence[PromptRuns]) -> dict[str, Any]:
    """Everything about a run, as JSON holds it.

    Args:
        setup: what ran, with which settings, on which machine.
        measured: at least one prompt.
    """
    now = datetime.now(UTC).isoformat(timespec="seconds")
    return {
        "format": FORMAT,
        "version": VERSION,
        "measured": now,
        **setup,
        "protocol_figures": protocol_figures(measured) if setup.get("protocol") else None,
        "overall": asdict(summarize("all", measured)),
        "categories": [asdict(summarize(*group)) for group in grouped(measured).items()],
        "differences": differences(measured),
        "prompts": [_prompt(one) for one in measured],
    }


def _prompt(one: PromptRuns) -> dict[str, Any]:
    """Every run of one prompt, in the order of the turns."""
    stats = {name: [run.stats for run in runs] for name, runs in one.runs.items()}
    return {
        "category": one.prompt.category,
        "prompt_tokens": one.main.stats.prompt_tokens,
        "output_tokens": one.main.stats.output_tokens,
        "methods": {
            name: {
                "tokens_per_second": [run.tokens_per_second for run in runs],
                "first_token_seconds": [run.first_token_seconds for run in runs],
                "steps": runs[0].rounds,
            }
            for name, runs in stats.items()
        },
    }


def describe_difference(one: Mapping[str, Any]) -> str:
    """A line about a text that is not the plain one."""
    gap = "one ended" if one["logit_gap"] is None else f"logit gap {one['logit_gap']:.2g}"
    question = " ".join(one["prompt"].split())[:80]
    return f"Not identical: {one['method']}, from token {one['token'] + 1} on ({gap}): {question}"


def check_folder(folder: Path) -> None:
    """Check that a run can be written to `folder`, before hours of measuring.

    Raises `OutputError`: not a folder, no permission, or it holds a run already.
    """
    if (folder / JSON).exists():
        raise OutputError(f"{folder} holds a run already: choose another folder.")
    try:
        with TemporaryDirectory(dir=nearest_there(folder)):
            pass
    except OSError as error:
        raise OutputError.because(folder, error) from error


def write_run(folder: Path, content: Mapping[str, Any]) -> None:
    """Write bench.json. Raises `OutputError`."""
    try:
        folder.mkdir(parents=True, exist_ok=True)
        text = json.dumps(content, ensure_ascii=False, indent=1) + "\n"
        (folder / JSON).write_text(text, encoding="utf-8")
    except OSError as error:
        raise OutputError.because(folder, error) from error


def read_run(path: Path) -> dict[str, Any]:
    """A run, from its folder or its JSON file. Raises `DataError`."""
    file = path / JSON if path.is_dir() else path
    content = read_json(file, DataError)
    if (content.get("format"), content.get("version")) != (FORMAT, VERSION):
        raise DataError(f"{file}: not a run of 'dflash-mlx bench --out', or of another version.")
    return content
