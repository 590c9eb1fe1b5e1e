"""`dflash-mlx generate`: one answer, and what drafting did for it."""

from __future__ import annotations

import time
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.console import Group
from rich.text import Text

import dflash_mlx
from dflash_mlx.errors import PromptError, SettingsError

from . import options
from .generate_prompt import STDIN, Files, Prompt, System, as_messages, read_prompt, read_schema
from .machines import Machines, cluster_member, runs_elsewhere, stdin_ends
from .options import DECODING, OUTPUT
from .output import (
    DOUBTFUL,
    MIN_STEPS,
    as_text,
    check_writable,
    counted,
    note,
    panel,
    print_json,
    speeds,
    stderr,
    times,
    waiting,
    write_file,
)
from .pair import Pair, explain, open_pair, steps_by_rows

if TYPE_CHECKING:
    from dflash_mlx import Event, Result, Stats, Target
    from dflash_mlx.bench.measure import Comparison

# A short answer takes a tenth of a second, which is too short to time once.
COMPARE_SECONDS, MAX_COMPARED = 2.0, 9

Raw = Annotated[
    bool,
    options.flag("--no-chat-template", DECODING, "Continue the prompt as plain text."),
]
JsonSchema = Annotated[
    str | None,
    options.option(DECODING, "SCHEMA", "Answer with JSON that fits this schema (JSON or a file)."),
]
Compare = Annotated[
    bool,
    options.flag("--compare/--no-compare", OUTPUT, "Also decode without the drafter, to compare."),
]
ShowStats = Annotated[bool, options.flag("--stats", OUTPUT, "Show token counts, times and memory.")]
Output = Annotated[
    Path | None,
    options.option(
        OUTPUT,
        "FILE",
        "Write to FILE when the answer is complete.",
        "--output",
        "-o",
        parser=options.named,
    ),
]
JsonLines = Annotated[
    bool,
    options.flag("--json-lines", OUTPUT, "Print a JSON object for each step, and one at the end."),
]


def generate(
    context: typer.Context,
    *,
    prompt: Prompt = None,
    files: Files = None,
    names: options.Names,
    no_draft: options.NoDraft = False,
    weights: options.Weights,
    max_tokens: options.MaxTokens = 256,
    sampling: options.Sampling,
    steps: options.StepOptions,
    stop: options.Stop = None,
    system: System = None,
    raw: Raw = False,
    json_schema: JsonSchema = None,
    compare: Compare = False,
    verbose: options.Verbose = False,
    stats: ShowStats = False,
    machines: Machines,
    output: Output = None,
    json: options.Json = False,
    json_lines: JsonLines = False,
) -> None:
    """Answer one prompt. The text goes to stdout, a summary to stderr."""
    if runs_elsewhere(machines, names, weights, context):
        return
    text = read_prompt(prompt, files or [], stdin_ends(context))
    asked = text if raw else as_messages(text, system)
    schema = read_schema(json_schema)
    output = None if str(output) == STDIN else output
    if output is not None:
        check_writable(output)
    encoded = cache(lambda target: _encode(target, asked))  # a long prompt is encoded once
    pair = open_pair(names, weights, steps, no_draft, compare, cluster_member(context), encoded)
    settings = sampling.settings()
    if schema is not None:
        from dflash_mlx.structured import JsonSchema

        settings["logits_processors"] = [JsonSchema(pair.target, schema)]
    from dflash_mlx.bench.measure import Comparison

    comparison = Comparison(
        pair.target,
        pair.drafter,
        encoded(pair.target),
        max_tokens,
        stop=stop or [],
        sampling=settings,
        **pair.settings,
    )
    untaught = comparison.untaught() if compare else comparison
    shown = "" if output is not None or json else "json" if json_lines else "text"
    result, lines = _stream(comparison, shown)
    comparison.drafted.append(result)
    newline = "\n" if result.text and not result.text.endswith("\n") else ""
    if shown == "text":
        print(newline, end="", flush=True)
    elif output is not None and not (json or json_lines):
        write_file(output, result.text + newline)
    if compare and pair.drafter is not None and result.tokens:
        with waiting("Decoding plainly, to compare"):
            _compare(untaught)
    if json or json_lines:
        content = _as_json(pair, comparison, result)
        lines = [*lines, {"event": "end"} | content] if json_lines else [content]
        if output is None:
            print_json(lines[-1])
        else:
            write_file(output, "".join(f"{as_text(line)}\n" for line in lines))
    else:
        stderr().print(panel(pair.title, _summary(pair, comparison, result)))
        for line in _stats_as_lines(result.stats) if stats else ():
            note(line)
    if verbose:
        explain(pair, result.stats)
    if schema is not None and result.finish_reason == "length":
        raise SettingsError(f"The JSON is incomplete: {pair.limit_reached(result.stats)}.")


def _encode(target: Target, prompt: str | list[dict[str, str]]) -> list[int]:
    """The prompt's token ids. Raises `PromptError`."""
    from dflash_mlx.prompt import encode_prompt

    if not isinstance(prompt, str) and not target.tokenizer.has_chat_template:
        raise PromptError(f"{target.name} has no chat template: add --no-chat-template.")
    return encode_prompt(target, prompt)


def _stream(comparison: Comparison, shown: str) -> tuple[Result, list[dict[str, Any]]]:
    """Generate once, and show events as they come: as "text", as "json" or not at all.

    Returns:
        The result, and the events as JSON.
    """
    text, tokens = "", list[int]()
    lines: list[dict[str, Any]] = []
    for event in dflash_mlx.stream_generate(
        comparison.target,
        comparison.drafter,
        comparison.prompt,
        max_tokens=comparison.max_tokens,
        block_size=comparison.block_size,
        kv_bits=comparison.kv_bits,
        stop=comparison.stop,
        policy=comparison.policy,
        tree_budget=comparison.tree_budget,
        **comparison.sampling,
    ):
        text += event.text
        tokens += event.tokens
        lines.append(_event_as_json(len(lines), event))
        if shown == "text":
            print(event.text, end="", flush=True)
        elif shown == "json":
            print_json(lines[-1])
    return dflash_mlx.Result(text, tokens, event.finish_reason or "length", event.stats), lines


def _compare(untaught: Comparison) -> None:
    """Decode plainly, and repeat both while that takes little time.

    `untaught` has a policy and a drafter that have not seen this prompt: what the answer taught
    them would show a speed that the answer did not have.
    """
    start = time.perf_counter()
    untaught.run_plain()
    while len(untaught.plain) < MAX_COMPARED and time.perf_counter() - start < COMPARE_SECONDS:
        untaught.untaught().run_pair()


def _summary(pair: Pair, runs: Comparison, result: Result) -> Group:
    """The content of the panel; a figure behind a ~ is estimated, not measured."""
    stats, name = result.stats, pair.drafts
    rows = [(name, stats.tokens_per_second, "")]
    if runs.plain:
        speedup = times(runs.speedup, stats.acceptance_length)
        rows = [("plain", runs.plain_speed, ""), (name, runs.drafted_speed, speedup)]
    elif pair.drafter is not None and stats.rounds >= MIN_STEPS:
        if plain := pair.plain_speed():
            speedup = f"~{times(stats.tokens_per_second / plain, stats.acceptance_length)}"
            rows = [("~plain", plain, ""), (name, stats.tokens_per_second, speedup)]
    counts = counted(stats.output_tokens, "token")
    if pair.drafter is not None and stats.rounds:
        steps = counted(stats.rounds, "step")
        counts += f": 1 from the prompt, then {stats.acceptance_length:.1f} per step in {steps}"
    lines = [Text(counts)]
    if rows[-1][-1].endswith("?"):
        lines.append(Text(DOUBTFUL, style="yellow"))
    if result.finish_reason == "length":
        lines[0].append(f" ({pair.limit_reached(stats)})", style="yellow")
    if runs.plain:
        found = runs.first_difference
        verdict = ("yes", "bold green")
        if found is not None:
            verdict = (f"no, from token {found + 1} on", "bold red")
        lines.append(Text.assemble("identical to plain decoding: ", verdict))
    return Group(*([speeds(rows)] if stats.rounds else []), *lines)


def _as_json(pair: Pair, runs: Comparison, result: Result) -> dict[str, Any]:
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
    compared = runs.plain or None  # the four are null without --compare
    return content | {
        "plain_tokens_per_second": compared and runs.plain_speed,
        "speedup": compared and runs.speedup,
        "identical": compared and runs.first_difference is None,
        "first_difference": compared and runs.first_difference,
        "stats": _stats_as_json(stats),
    }


def _event_as_json(number: int, event: Event) -> dict[str, Any]:
    """A line of `--json-lines`: what the prefill (number 0) or one step added."""
    return {
        "event": "round" if number else "first",
        "text": event.text,
        "tokens": event.tokens,
        "drafted": event.drafted,
        "accepted": event.accepted,
    }


def _stats_as_json(stats: Stats) -> dict[str, Any]:
    """All counters."""
    names = (
        "prompt_tokens reused_tokens output_tokens rounds drafted_tokens accepted_tokens "
        "acceptance_length acceptance_rate widths trees prefill_seconds decode_seconds "
        "first_token_seconds peak_bytes"
    )
    return {name: getattr(stats, name) for name in names.split()}


def _stats_as_lines(stats: Stats) -> list[str]:
    """The same counters for people, one in each line."""
    counters = _stats_as_json(stats) | {"peak_bytes": f"{stats.peak_bytes:,}"}
    counters |= {"widths": steps_by_rows(stats.widths), "trees": steps_by_rows(stats.trees)}
    shown = {n: f"{v:.3f}" if isinstance(v, float) else f"{v}" for n, v in counters.items()}
    return [f"{name.replace('_', ' '):20}{value}" for name, value in shown.items()]
