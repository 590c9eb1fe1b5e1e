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
from .output import as_text, check_writable, note, panel, print_json, stderr, waiting, write_file
from .pair import explain, open_pair

if TYPE_CHECKING:
    from dflash_mlx import Result, Target
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
        content = as_json(pair, comparison, result)
        content |= {"stats": stats_as_json(result.stats)} if stats else {}
        lines = [*lines, {"event": "end"} | content] if json_lines else [content]
        if output is None:
            print_json(lines[-1])
        else:
            write_file(output, "".join(f"{as_text(line)}\n" for line in lines))
    else:
        stderr().print(panel(pair.title, summary(pair, comparison, result)))
        for line in stats_as_lines(result.stats) if stats else ():
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
        lines.append(event_as_json(len(lines), event))
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
