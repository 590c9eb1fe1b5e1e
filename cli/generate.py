"""`dflash-mlx generate`: one answer, and what drafting did for it."""

from __future__ import annotations

import time
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

import dflash_mlx
from dflash_mlx.errors import PromptError, SettingsError

from . import options
from .generate_prompt import STDIN, Files, Prompt, System, as_messages, read_prompt, read_schema
from .generate_summary import as_json, event_as_json, stats_as_json, stats_as_lines, summary
from .machines import Machines, cluster_member, runs_elsewhere, stdin_ends
from .options import DECODING, OUTPUT
from .output import as_line, check_writable, note, panel, print_json, stderr, waiting, write_file
from .pair import Pair, explain, open_pair

if TYPE_CHECKING:
    from dflash_mlx import Event, Result, Target
    from dflash_mlx.bench.measure import Comparison

# A short answer takes a tenth of a second, which is too short to time once.
COMPARE_SECONDS, MAX_COMPARED = 2.0, 9

Raw = Annotated[
    bool,
    options.flag("--no-chat-template", DECODING, "Continue the prompt as plain text."),
]
JsonSchema = Annotated[
    Path | None,
    options.option(DECODING, "FILE", "Answer with JSON that fits the schema in FILE."),
]
Compare = Annotated[
    bool,
    options.flag("--compare/--no-compare", OUTPUT, "Also decode without the drafter, to compare."),
]
ShowStats = Annotated[bool, options.flag("--stats", OUTPUT, "Show token counts, times and memory.")]
Output = Annotated[
    Path | None,
    options.option(OUTPUT, "FILE", "Write to FILE when the answer is complete.", "--output", "-o"),
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
    if raw and system is not None:
        raise typer.BadParameter(
            "cannot be combined with --system", param_hint="--no-chat-template"
        )
    if json and json_lines:
        raise typer.BadParameter("cannot be combined with --json", param_hint="--json-lines")
    text = read_prompt(prompt, files or [], stdin_ends(context))
    asked = text if raw else as_messages(text, system)
    schema = read_schema(json_schema)
    output = None if str(output) == STDIN else output
    if output is not None:
        check_writable(output)
    encoded = cache(lambda target: _encode(target, asked))  # a long prompt is encoded once
    pair = open_pair(names, weights, steps, no_draft, compare, cluster_member(context), encoded)
    settings = sampling.settings() | _schema_settings(pair, schema)
    comparison = _comparison(pair, encoded(pair.target), max_tokens, stop or [], settings)
    untaught = comparison.untaught() if compare else comparison
    shown = "" if output is not None or json else "json" if json_lines else "text"
    events = _stream(comparison, shown)
    result = _result(events)
    comparison.drafted.append(result)
    if not (json or json_lines):
        _write_text(result, output)
    if compare and pair.drafter is not None and result.tokens:
        with waiting("Decoding plainly, to compare"):
            _compare(untaught)
    if json or json_lines:
        content = as_json(pair, comparison, result)
        content |= {"stats": stats_as_json(result.stats)} if stats else {}
        lines = [*map(event_as_json, range(len(events)), events)] if json_lines else []
        _write_json({"event": "end"} | content if json_lines else content, lines, output)
    else:
        stderr().print(panel(pair.title, summary(pair, comparison, result)))
        for line in stats_as_lines(result.stats) if stats else ():
            note(line)
    if verbose:
        explain(pair, result.stats)
    if schema is not None and result.finish_reason == "length":
        raise SettingsError(f"The JSON is incomplete: {pair.limit_reached(result.stats)}.")


def _write_text(result: Result, output: Path | None) -> None:
    """End the line on stdout, or write the file."""
    newline = "\n" if result.text and not result.text.endswith("\n") else ""
    if output is not None:
        write_file(output, result.text + newline)
    else:
        print(newline, end="", flush=True)


def _write_json(content: dict[str, Any], lines: list[dict[str, Any]], output: Path | None) -> None:
    """Print the last object, or write the file with all lines."""
    if output is None:
        print_json(content)
    else:
        write_file(output, "".join(map(as_line, [*lines, content])))


def _schema_settings(pair: Pair, schema: dict[str, Any] | None) -> dict[str, Any]:
    """The setting that keeps an answer to a JSON schema."""
    if schema is None:
        return {}
    from dflash_mlx.structured import JsonSchema

    return {"logits_processors": [JsonSchema(pair.target, schema)]}


def _encode(target: Target, prompt: str | list[dict[str, str]]) -> list[int]:
    """The prompt's token ids. Raises `PromptError`."""
    from dflash_mlx.prompt import encode_prompt

    if not isinstance(prompt, str) and not target.tokenizer.has_chat_template:
        raise PromptError(f"{target.name} has no chat template: add --no-chat-template.")
    return encode_prompt(target, prompt)


def _comparison(
    pair: Pair, ids: list[int], max_tokens: int, stop: list[str], sampling: dict[str, Any]
) -> Comparison:
    from dflash_mlx.bench.measure import Comparison

    return Comparison(
        pair.target,
        pair.drafter,
        ids,
        max_tokens,
        stop=stop,
        sampling=sampling,
        **pair.settings,
    )


def _stream(comparison: Comparison, shown: str) -> list[Event]:
    """Generate once, and show events as they come: as "text", as "json" or not at all."""
    events: list[Event] = []
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
        if shown == "text":
            print(event.text, end="", flush=True)
        elif shown == "json":
            print_json(event_as_json(len(events), event))
        events.append(event)
    return events


def _result(events: list[Event]) -> Result:
    return dflash_mlx.Result(
        text="".join(event.text for event in events),
        tokens=[token for event in events for token in event.tokens],
        finish_reason=events[-1].finish_reason or "length",
        stats=events[-1].stats,
    )


def _compare(untaught: Comparison) -> None:
    """Decode plainly, and repeat both while that takes little time.

    `untaught` has a policy and a drafter that have not seen this prompt: what the answer taught
    them would show a speed that the answer did not have.
    """
    start = time.perf_counter()
    untaught.run_plain()
    while len(untaught.plain) < MAX_COMPARED and time.perf_counter() - start < COMPARE_SECONDS:
        untaught.untaught().run_pair()
