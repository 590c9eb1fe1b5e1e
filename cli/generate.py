"""`dflash-mlx generate`: one answer, and what drafting did for it."""

from __future__ import annotations

import time
from collections.abc import Callable
from functools import cache
from itertools import count, starmap
from pathlib import Path
from typing import TYPE_CHECKING, Any

import typer

import dflash_mlx
from dflash_mlx.errors import PromptError, SettingsError

from . import generate_options, options
from .counters import counter_lines, counters
from .generate_question import STANDARD, as_messages, read_prompt, read_schema
from .generate_summary import as_json, event_as_json, summary
from .machines import Machines, joined, shared, stdin_ends
from .output import as_line, check_writable, note, panel, print_json, stderr, waiting, write_file
from .pair import Pair, check_plain, explain, open_pair

if TYPE_CHECKING:
    from dflash_mlx import Event, Result, Target
    from dflash_mlx.bench.measure import Comparison

# One short answer is over in a tenth of a second, far too short to time once.
COMPARE_SECONDS, COMPARE_PAIRS = 2.0, 9


def generate(
    context: typer.Context,
    *,
    prompt: generate_options.Prompt = None,
    files: generate_options.Files = None,
    names: options.Names,
    no_draft: options.NoDraft = False,
    weights: options.Weights,
    max_tokens: options.MaxTokens = 256,
    sampling: options.Sampling,
    rounds: options.Rounds,
    stop: options.Stop = None,
    system: generate_options.System = None,
    raw: generate_options.Raw = False,
    json_schema: generate_options.JsonSchema = None,
    compare: generate_options.Compare = False,
    verbose: options.Verbose = False,
    stats: generate_options.Stats = False,
    machines: Machines,
    output: generate_options.Output = None,
    json: options.Json = False,
    json_lines: generate_options.JsonLines = False,
) -> None:
    """Answer one prompt: the text goes to stdout, a summary to stderr."""
    if shared(machines, names, weights, context):
        return
    if raw and system is not None:
        raise typer.BadParameter("goes without --no-chat-template", param_hint="--system")
    if json and json_lines:
        raise typer.BadParameter("goes without --json", param_hint="--json-lines")
    check_plain(no_draft, names, {"--compare": compare})
    text = read_prompt(prompt, files or [], stdin_ends(context))
    asked = text if raw else as_messages(text, system)
    schema = read_schema(json_schema)
    if output is not None and str(output) == STANDARD:
        output = None
    if output is not None:
        check_writable(output)
    # Asked for before costs are measured, and again when they are: a long prompt is read once.
    encoded = cache(lambda target: _encoded(target, asked))
    pair = open_pair(names, weights, rounds, no_draft, compare, joined(context), encoded)
    comparison = _comparison(pair, encoded(pair.target), max_tokens, stop or [])
    comparison.sampling = sampling.settings() | _fitting(pair, schema)
    in_json = json or json_lines
    untaught = comparison.untaught() if compare else comparison
    events = _stream(comparison, _shown_as(output is None, json, json_lines))
    result = _result(events)
    comparison.drafted.append(result)
    if output is None and not in_json and result.text and not result.text.endswith("\n"):
        print(flush=True)
    if compare and pair.drafter is not None and result.tokens:
        with waiting("Decoding plainly, to compare"):
            _compare(untaught)
    content = as_json(pair, comparison, result) if in_json else None
    if content is not None:
        content |= {"stats": counters(result.stats)} if stats else {}
        content = {"event": "end"} | content if json_lines else content
    _write(output, result, content, events if json_lines else [])
    if content is None:
        stderr().print(panel(pair.title, summary(pair, comparison, result)))
        for line in counter_lines(result.stats) if stats else ():
            note(line)
    if verbose:
        explain(pair, result.stats)
    if pair.chains is not None:
        pair.chains.keep()
    if schema is not None and result.finish_reason == "length":
        raise SettingsError(f"The JSON is not whole: {pair.limit_reached(result.stats)}.")


def _write(
    output: Path | None, result: Result, content: dict[str, Any] | None, events: list[Event]
) -> None:
    """What is to come at the end: a whole file, or the last line of JSON."""
    if output is not None and content is None:
        write_file(output, result.text.removesuffix("\n") + "\n")
    elif output is not None:
        lines = [*starmap(event_as_json, enumerate(events)), content]
        write_file(output, "".join(as_line(line) for line in lines if line is not None))
    elif content is not None:
        print_json(content)


def _fitting(pair: Pair, schema: dict[str, Any] | None) -> dict[str, Any]:
    """The setting that keeps an answer to a schema."""
    if schema is None:
        return {}
    from dflash_mlx.structured import JsonSchema

    return {"logits_processors": [JsonSchema(pair.target, schema)]}


def _encoded(target: Target, prompt: str | list[dict[str, str]]) -> list[int]:
    """Its token ids. Raises `PromptError` where the target cannot read it."""
    from dflash_mlx.prompt import encode_prompt

    if not isinstance(prompt, str) and not target.tokenizer.has_chat_template:
        raise PromptError(f"{target.name} has no chat template: add --no-chat-template.")
    return encode_prompt(target, prompt)


def _comparison(pair: Pair, ids: list[int], max_tokens: int, stop: list[str]) -> Comparison:
    from dflash_mlx.bench.measure import Comparison

    return Comparison(
        pair.target,
        pair.drafter,
        ids,
        max_tokens,
        pair.block_size,
        stop,
        kv_bits=pair.kv_bits,
        policy=pair.policy,
    )


def _shown_as(now: bool, json: bool, json_lines: bool) -> Callable[[Event], None]:
    """What is done with an event as it comes."""
    numbers = count()

    def line(event: Event) -> None:
        print_json(event_as_json(next(numbers), event))

    def text(event: Event) -> None:
        print(event.text, end="", flush=True)

    def nothing(event: Event) -> None:
        """The answer is written when it is whole."""

    if not now or json:
        return nothing
    return line if json_lines else text


def _stream(comparison: Comparison, show: Callable[[Event], None]) -> list[Event]:
    """Generate once and show what comes; the events, of which there is at least one."""
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
        **comparison.sampling,
    ):
        events.append(event)
        show(event)
    return events


def _result(events: list[Event]) -> Result:
    return dflash_mlx.Result(
        text="".join(event.text for event in events),
        tokens=[token for event in events for token in event.tokens],
        finish_reason=events[-1].finish_reason or "length",
        stats=events[-1].stats,
    )


def _compare(untaught: Comparison) -> None:
    """Complete the first pair, and run more of them while that takes no time to speak of.

    Each is drafted as the first one was: what this very prompt has taught the policy and the
    drafter would show a speed that its answer did not have.
    """
    start = time.perf_counter()
    untaught.run_plain()
    while len(untaught.plain) < COMPARE_PAIRS and time.perf_counter() - start < COMPARE_SECONDS:
        untaught.untaught().run_pair()
