"""`dflash-mlx generate`: one answer, and what drafting did for it."""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import typer
from rich.console import Group
from rich.panel import Panel
from rich.text import Text

import dflash_mlx
from dflash_mlx.errors import DataError, PromptError, SettingsError
from dflash_mlx.loading.contents import check_is_text
from dflash_mlx.machine.facts import busy
from dflash_mlx.validation import UTF8, brief, parse_json, read_json

from . import options
from .answer import Thoughts, Writer
from .machines import Machines, cluster_member, runs_elsewhere, stdin_ends
from .options import DECODING, OUTPUT, argument, flag, option
from .output import (
    DOUBTFUL,
    MIN_STEPS,
    as_text,
    check_writable,
    counted,
    note,
    speeds,
    stderr,
    times,
    waiting,
    write_result,
)
from .pair import (
    Pair,
    explain,
    note_sampling,
    note_toy,
    open_pair,
    steps_by_rows,
    template_variables,
    without_template,
)

if TYPE_CHECKING:
    from dflash_mlx import Result, Stats, Target
    from dflash_mlx.bench.measure import Comparison

# A short answer takes a tenth of a second, which is too short to time once.
COMPARE_SECONDS, MAX_COMPARED = 2.0, 9

PROMPT = "Prompt"  # a panel of --help
STDIN = "-"  # a file of this name is stdin, or stdout

COUNTERS = (  # of `Stats`, for --stats and --json
    "prompt_tokens reused_tokens output_tokens rounds drafted_tokens accepted_tokens "
    "acceptance_length acceptance_rate widths trees prefill_seconds decode_seconds "
    "first_round_seconds first_token_seconds peak_bytes"
)
PIPED = "The prompt. Piped text follows it; '-' puts it here."
FILES = "Add a file to the prompt; '-' is stdin. Repeatable."
SCHEMA = "Answer with JSON that fits this schema (JSON or a file)."
NO_PROMPT = "No prompt: give one as an argument, or pipe it in."
COMPLETE = "Write to FILE when the answer is complete."


def generate(
    context: typer.Context,
    *,
    prompt: str | None = argument(None, PIPED),
    files: list[Path] | None = option(None, PROMPT, "FILE", FILES, "--file", "-f"),
    names: options.Names,
    drafting: options.Drafting,
    weights: options.Weights,
    settings: dict[str, Any] = options.settings(max_tokens=options.MAX_TOKENS),
    system: str | None = options.SYSTEM,
    raw: bool = flag("--no-chat-template", DECODING, "Continue the prompt as plain text."),
    json_schema: str | None = option(None, DECODING, "SCHEMA", SCHEMA),
    compare: bool = flag("--compare/--no-compare", OUTPUT, "Also decode plainly, to compare."),
    verbose: bool = options.VERBOSE,
    stats: bool = flag("--stats", OUTPUT, "Show token counts, times and memory."),
    machines: Machines,
    output: Path | None = option(
        None, OUTPUT, "FILE", COMPLETE, "--output", "-o", parser=options.named
    ),
    json: bool = options.JSON,
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
    member = cluster_member(context)
    options.note_without_effect(settings)
    opening = without_template(settings) if raw else settings
    pair = open_pair(names, weights, drafting, opening, compare, member)
    ids = _encode(pair.target, asked, settings)
    settings = options.with_seed(settings)
    if schema is not None:
        from dflash_mlx.structured import JsonSchema

        settings["logits_processors"] = [JsonSchema(pair.target, schema)]
    from dflash_mlx.bench.measure import Comparison

    both = {name: settings[name] for name in settings.keys() - pair.drafting.keys()}
    comparison = Comparison(pair.target, pair.drafter, ids, without_template(both), pair.drafting)
    fresh = comparison.with_fresh_policy() if compare else comparison
    thoughts = Thoughts(pair.target, comparison.prompt)
    result = _stream(comparison, thoughts, shown=output is None and not json)
    comparison.runs[comparison.chain] = [result]
    newline = "\n" if result.text and not result.text.endswith("\n") else ""
    if not json:
        write_result(output, newline if output is None else result.text + newline)
    if compare and pair.drafter is not None and result.tokens:
        if not json and (warning := busy()):
            note(warning)
        tokens = counted(result.stats.output_tokens, "token")
        with waiting(f"Decoding {tokens} plainly, to compare"):
            _compare(fresh)
    if json:
        write_result(output, f"{as_text(_as_json(pair, comparison, result, thoughts))}\n")
    else:
        stderr().print(_summary(pair, comparison, result, thoughts))
        for line in _stats_as_lines(result.stats) if stats else ():
            note(line)
        note_toy(context)
        note_sampling(pair.target, options.given(context))
    if verbose:
        explain(pair, result.stats, settings["temperature"])
    if schema is not None and result.finish_reason == "length":
        raise SettingsError(f"The JSON is incomplete: {pair.limit_reached(result.stats)}.")


def _encode(
    target: Target, prompt: str | list[dict[str, str]], settings: dict[str, Any]
) -> list[int]:
    """The prompt's token ids. Raises `PromptError`."""
    from dflash_mlx.prompt import encode_prompt

    if not isinstance(prompt, str) and not target.tokenizer.has_chat_template:
        raise PromptError(f"{target.name} has no chat template: add --no-chat-template.")
    return encode_prompt(target, prompt, template_variables(target, settings))


def _stream(comparison: Comparison, thoughts: Thoughts, shown: bool) -> Result:
    """Generate once; `shown` prints the text as it comes, a terminal's with dimmed thoughts."""
    text, tokens = "", list[int]()
    writer, terminal = Writer(), sys.stdout.isatty()
    pair = comparison.target, comparison.drafter
    settings = {**comparison.settings, **comparison.drafting}
    try:
        for event in dflash_mlx.stream_generate(*pair, comparison.prompt, **settings):
            text += event.text
            tokens += event.tokens
            parts = thoughts.split(event)
            if shown:
                writer.write(parts if terminal else [(event.text, False)])
    except KeyboardInterrupt:
        writer.end()  # the shell's prompt begins on a line of its own
        raise
    return dflash_mlx.Result(text, tokens, event.finish_reason or "length", event.stats)


def _compare(fresh: Comparison) -> None:
    """Decode plainly, and repeat both while that takes little time.

    `fresh` has a policy and a drafter that have not seen this prompt: what the answer taught
    them would show a speed that the answer did not have.
    """
    from dflash_mlx.bench.results import PLAIN

    start = time.perf_counter()
    fresh.run(PLAIN)
    runs = fresh.runs[PLAIN]
    while len(runs) < MAX_COMPARED and time.perf_counter() - start < COMPARE_SECONDS:
        fresh.with_fresh_policy().run(PLAIN, fresh.chain)


def _summary(pair: Pair, runs: Comparison, result: Result, thoughts: Thoughts) -> Panel:
    """A panel about the answer; a figure behind a ~ is estimated, not measured."""
    stats, label = result.stats, "drafted" if pair.drafts else "plain"
    rows = [(label, stats.tokens_per_second, "")]
    estimated = ""
    if compared := len(runs.runs) > 1:
        speedup = times(runs.speedup, stats.acceptance_length)
        rows = [("plain", runs.speed("plain"), ""), (label, runs.speed(runs.chain), speedup)]
    elif pair.drafter is not None and stats.rounds >= MIN_STEPS:
        if plain := pair.plain_speed():
            speedup = f"~{times(stats.tokens_per_second / plain, stats.acceptance_length)}"
            estimated = "plain"
            rows = [(estimated, plain, ""), (label, stats.tokens_per_second, speedup)]
    counts = counted(stats.output_tokens, "token")
    if pair.drafts and stats.rounds:
        steps = f"{stats.acceptance_length:.1f} tokens per step in {counted(stats.rounds, 'step')}"
        counts += f": {steps}, drafted by {pair.drafts}"
    lines = [Text(counts)]
    if thoughts.tokens:
        lines.append(Text(_counted_apart(stats, thoughts)))
    if compared and not stats.rounds:
        lines.append(Text("The first token comes from reading the prompt: no step was timed."))
    elif rows[-1][-1].endswith("?"):
        lines.append(Text(DOUBTFUL, style="yellow"))
    if result.finish_reason == "length":
        lines[0].append(f" ({pair.limit_reached(stats)})", style="yellow")
    if compared:
        found = runs.first_difference
        verdict = ("yes", "bold green")
        if found is not None:
            verdict = (f"no, from token {found + 1} on", "bold red")
        lines.append(Text.assemble("identical to plain decoding: ", verdict))
    body = Group(*([speeds(rows, estimated)] if stats.rounds else []), *lines)
    return Panel.fit(body, title=Text(pair.title), title_align="left", border_style="dim")


def _counted_apart(stats: Stats, thoughts: Thoughts) -> str:
    """Tokens, and tokens per step, of the thoughts and of the answer."""
    answer = stats.output_tokens - thoughts.tokens, stats.rounds - thoughts.rounds
    counts = {"thoughts": (thoughts.tokens, thoughts.rounds), "answer": answer}
    parts = []
    for name, (tokens, steps) in counts.items():
        per_step = f", {tokens / steps:.1f} tokens per step" if steps else ""
        parts.append(f"{name}: {counted(tokens, 'token')}{per_step}")
    return "; ".join(parts)


def _as_json(pair: Pair, runs: Comparison, result: Result, thoughts: Thoughts) -> dict[str, Any]:
    stats = result.stats
    compared = len(runs.runs) > 1 or None  # its four fields are null without --compare
    timed = compared if stats.rounds else None  # the first token comes from the prompt's reading
    return {
        "model": pair.target.name,
        "text": result.text,
        "tokens": result.tokens,
        "finish_reason": result.finish_reason,
        "prompt_tokens": stats.prompt_tokens,
        "output_tokens": stats.output_tokens,
        "steps": stats.rounds,
        "rounds": stats.rounds,  # the older name of the same
        "thoughts": {"tokens": thoughts.tokens, "rounds": thoughts.rounds},
        "block_size": stats.block_size,
        "widths": dict(sorted(stats.widths.items())),
        "trees": dict(sorted(stats.trees.items())),
        "seed": stats.seed,
        "tokens_per_step": stats.acceptance_length,
        "tokens_per_round": stats.acceptance_length,
        "tokens_per_second": runs.speed(runs.chain),
        "blas": pair.blas.name,
        "plain_tokens_per_second": timed and runs.speed("plain"),
        "speedup": timed and runs.speedup,
        "identical": compared and runs.first_difference is None,
        "first_difference": compared and runs.first_difference,
        "stats": {name: getattr(stats, name) for name in COUNTERS.split()},
    }


def _stats_as_lines(stats: Stats) -> Iterator[str]:
    """The counters for people, one in each line."""
    special = {
        "peak_bytes": f"{stats.peak_bytes:,}",
        "widths": steps_by_rows(stats.widths),
        "trees": steps_by_rows(stats.trees),
    }
    for name in COUNTERS.split():
        value = special.get(name, getattr(stats, name))
        shown = f"{value:.3f}" if isinstance(value, float) else value
        yield f"{name.replace('round', 'step').replace('_', ' '):20}{shown}"


def read_prompt(prompt: str | None, files: Sequence[Path], stdin_ends: bool = True) -> str:
    """The prompt, the files and what is piped in, in this order, with blank lines between them.

    "-" as the prompt or a file puts stdin there. Otherwise stdin is read unless it is a terminal
    or never ends. A note on a terminal says that it was read: in a shell loop over the lines of a
    file, the first call takes them all.

    Raises:
        SettingsError: stdin is asked for twice or never ends.
        PromptError: there is no text, or it is empty or not UTF-8.
        DataError: a file cannot be read.
    """
    sources = [*([STDIN] if prompt == STDIN else []), *map(str, files)]
    if sources.count(STDIN) > 1:
        raise SettingsError(f"{STDIN} is stdin, which can be read only once: name another --file.")
    if STDIN in sources and not stdin_ends:
        raise SettingsError("mlx.launch never ends stdin: give a text or a --file.")
    parts = [] if prompt in (None, STDIN) else [check_text(str(prompt))]
    parts += [check_text(_read(one), "stdin" if one == STDIN else one) for one in sources]
    if STDIN not in sources and stdin_ends and not sys.stdin.isatty():
        piped = _read(STDIN)
        if piped.strip() and parts and sys.stderr.isatty():
            note(f"With {counted(len(piped.splitlines()), 'line')} of standard input.")
        if piped.strip() or (piped and not parts):
            parts.append(check_text(piped, "The piped text"))
    if not parts:
        raise PromptError(NO_PROMPT)
    return parts[0] if len(parts) == 1 else "\n\n".join(part.strip("\n") for part in parts)


def _read(file: str) -> str:
    """A file's text without its last newline, as in a shell's $(...)."""
    if file != STDIN:
        check_is_text(Path(file))
    try:
        content = sys.stdin.buffer.read() if file == STDIN else Path(file).read_bytes()
    except OSError as error:
        raise DataError(f"{file}: cannot be read ({error.strerror}).") from error
    return content.decode(UTF8, "surrogateescape").removesuffix("\n").removesuffix("\r")


def check_text(text: str, name: str = "The prompt") -> str:
    """The text itself. Raises `PromptError` if it is empty, or bytes that are no text."""
    try:
        text.encode()
    except UnicodeError as error:
        raise PromptError(f"{name} is not UTF-8 text.") from error
    if not text.strip():
        raise PromptError(f"{name} is empty: give some text.")
    return text


def as_messages(text: str, system: str | None) -> list[dict[str, str]]:
    """The prompt as a chat, after a system message if there is one. Raises `PromptError`."""
    messages = [{"role": "user", "content": text}]
    if system is not None:
        messages.insert(0, {"role": "system", "content": check_text(system, "The system message")})
    return messages


def read_schema(given: str | None) -> Any:
    """The JSON schema in a file, or given itself. Raises `DataError` for one that is none."""
    if given is None or given.lstrip().startswith("{"):
        return given and parse_json(given, "--json-schema", DataError)
    if not os.path.exists(given):
        raise DataError(
            f'--json-schema takes a JSON schema, such as \'{{"type": "object"}}\', or a file '
            f"with one: {brief(given)} is neither."
        )
    return read_json(given, DataError)
