"""`dflash-mlx generate`: one answer, and a summary of its drafting."""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import typer

import dflash_mlx
from dflash_mlx.errors import DataError, PromptError, SettingsError
from dflash_mlx.loading.contents import check_is_text
from dflash_mlx.machine.facts import busy
from dflash_mlx.validation import UTF8, brief, parse_json, read_json

from . import options
from .answer import Thoughts, Writer
from .generate_summary import as_json, stats_as_lines, summary
from .machines import Machines, cluster_member, runs_elsewhere, stdin_ends
from .options import DECODING, OUTPUT, argument, flag, option
from .output import (
    as_text,
    check_writable,
    counted,
    note,
    stderr,
    waiting,
    write_result,
)
from .pair import (
    Pair,
    explain,
    note_sampling,
    note_toy,
    open_pair,
    template_variables,
    without_template,
)

if TYPE_CHECKING:
    from dflash_mlx import Result, Target
    from dflash_mlx.bench.measure import Comparison

# --compare repeats a short answer, which takes a tenth of a second: too short to time once.
COMPARE_SECONDS = 2.0
MAX_COMPARED = 9

PROMPT = "Prompt"  # a panel of --help
STDIN = "-"  # a file of this name is stdin, or stdout

PIPED = "The prompt. Piped text follows it; '-' puts it here."
FILES = "Add a file to the prompt; '-' is stdin. Repeatable."
SCHEMA = "Answer with JSON that fits this schema (JSON or a file)."
NO_PROMPT = "No prompt: give one as an argument, or pipe it in."
COMPLETE = "Write to FILE when the answer is complete."


def generate(
    context: typer.Context,
    *,
    prompt: str | None = argument(None, PIPED),
    files: list[Path] | None = option(
        None,
        "--file",
        "-f",
        panel=PROMPT,
        metavar="FILE",
        help=FILES,
    ),
    names: options.Names,
    drafting: options.Drafting,
    weights: options.Weights,
    settings: dict[str, Any] = options.settings(max_tokens=options.MAX_TOKENS),
    system: str | None = options.SYSTEM,
    raw: bool = flag(
        "--no-chat-template",
        panel=DECODING,
        help="Continue the prompt as plain text.",
    ),
    json_schema: str | None = option(None, panel=DECODING, metavar="SCHEMA", help=SCHEMA),
    compare: bool = flag(
        "--compare/--no-compare",
        panel=OUTPUT,
        help="Also decode plainly, to compare.",
    ),
    verbose: bool = options.VERBOSE,
    stats: bool = flag("--stats", panel=OUTPUT, help="Show token counts, times and memory."),
    machines: Machines,
    output: Path | None = option(
        None,
        "--output",
        "-o",
        panel=OUTPUT,
        metavar="FILE",
        help=COMPLETE,
    ),
    json: bool = options.JSON,
) -> None:
    """Answer one prompt. The text goes to stdout, a summary to stderr."""
    if runs_elsewhere(machines, names=names, weights=weights, context=context):
        return
    text = read_prompt(prompt, files or [], stdin_ends(context))
    question = text if raw else as_messages(text, system)
    schema = read_schema(json_schema)
    output = None if str(output) == STDIN else output
    if output is not None:
        check_writable(output)
    options.note_without_effect(settings)
    pair = open_pair(
        names,
        weights,
        drafting=drafting,
        settings=without_template(settings) if raw else settings,
        warm=compare,
        member=cluster_member(context),
    )
    ids = _encode(pair.target, question, settings)
    settings = options.with_seed(settings)
    if schema is not None:
        from dflash_mlx.structured import JsonSchema

        settings["logits_processors"] = [JsonSchema(pair.target, schema)]
    comparison = _prepare_comparison(pair, ids, settings)
    fresh = comparison.with_fresh_policy() if compare else comparison
    thoughts = Thoughts(pair.target, comparison.prompt)
    result = _stream(comparison, thoughts, shown=output is None and not json)
    comparison.runs[comparison.chain] = [result]
    if not json:
        newline = "\n" if result.text and not result.text.endswith("\n") else ""
        write_result(output, newline if output is None else result.text + newline)
    if compare and pair.drafter is not None and result.tokens:
        _compare(fresh, result, warn_if_busy=not json)
    if json:
        content = as_json(pair, runs=comparison, result=result, thoughts=thoughts)
        write_result(output, f"{as_text(content)}\n")
    else:
        stderr().print(summary(pair, runs=comparison, result=result, thoughts=thoughts))
        if stats:
            for line in stats_as_lines(result.stats):
                note(line)
        note_toy(context)
        note_sampling(pair.target, options.given(context))
    if verbose:
        explain(pair, result.stats, settings["temperature"])
    if schema is not None and result.finish_reason == "length":
        raise SettingsError(f"The JSON is incomplete: {pair.limit_reached(result.stats)}.")


def _prepare_comparison(pair: Pair, prompt: list[int], settings: Mapping[str, Any]) -> Comparison:
    """Prepare to decode a prompt (ids), with drafts and maybe also plainly."""
    from dflash_mlx.bench.measure import Comparison

    plain_settings = {name: settings[name] for name in settings.keys() - pair.drafting.keys()}
    return Comparison(
        pair.target,
        pair.drafter,
        prompt=prompt,
        settings=without_template(plain_settings),
        drafting=pair.drafting,
    )


def _encode(
    target: Target, prompt: str | list[dict[str, str]], settings: dict[str, Any]
) -> list[int]:
    """Convert the prompt to token ids. Raises `PromptError`."""
    from dflash_mlx.prompt import encode_prompt

    if not isinstance(prompt, str) and not target.tokenizer.has_chat_template:
        raise PromptError(f"{target.name} has no chat template: add --no-chat-template.")
    return encode_prompt(target, prompt, template_variables(target, settings))


def _stream(comparison: Comparison, thoughts: Thoughts, shown: bool) -> Result:
    """Generate once. If `shown`, print the text while it streams, on a terminal with dim thoughts.

    Returns the result.
    """
    text = ""
    tokens: list[int] = []
    writer = Writer()
    is_terminal = sys.stdout.isatty()
    settings = {**comparison.settings, **comparison.drafting}
    events = dflash_mlx.stream_generate(
        comparison.target, comparison.drafter, comparison.prompt, **settings
    )
    try:
        for event in events:
            text += event.text
            tokens += event.tokens
            parts = thoughts.split(event)
            if shown:
                writer.write(parts if is_terminal else [(event.text, False)])
    except KeyboardInterrupt:
        writer.end()  # so that the shell's prompt begins on a new line
        raise
    return dflash_mlx.Result(
        text=text,
        tokens=tokens,
        finish_reason=event.finish_reason or "length",
        stats=event.stats,
    )


def _compare(fresh: Comparison, result: Result, warn_if_busy: bool) -> None:
    """Decode plainly, and repeat both methods while that takes little time.

    The policy and the drafter of `fresh` have not seen this prompt. What they learned from the
    answer would show a speed that the answer did not have.
    """
    from dflash_mlx.bench.results import PLAIN

    warning = busy() if warn_if_busy else None
    if warning:
        note(warning)
    tokens = counted(result.stats.output_tokens, "token")
    with waiting(f"Decoding {tokens} plainly, to compare"):
        start = time.perf_counter()
        fresh.run(PLAIN)
        runs = fresh.runs[PLAIN]
        while len(runs) < MAX_COMPARED and time.perf_counter() - start < COMPARE_SECONDS:
            fresh.with_fresh_policy().run(PLAIN, fresh.chain)


def read_prompt(prompt: str | None, files: Sequence[Path], stdin_ends: bool = True) -> str:
    """Join the prompt, the files and the piped text, in this order, with blank lines between them.

    "-" as the prompt or a file puts stdin there. Otherwise stdin is read unless it is a terminal
    or never ends. A note on a terminal says that it was read: in a shell loop over the lines of a
    file, the first call takes them all.

    Raises:
        SettingsError: stdin is named twice, or never ends.
        PromptError: there is no text, or it is empty or not UTF-8.
        DataError: a file cannot be read.
    """
    sources = [STDIN] if prompt == STDIN else []
    sources += map(str, files)
    if sources.count(STDIN) > 1:
        raise SettingsError(f"{STDIN} is stdin, which can be read only once: name another --file.")
    if STDIN in sources and not stdin_ends:
        raise SettingsError("mlx.launch never ends stdin: give a text or a --file.")
    parts = [] if prompt in (None, STDIN) else [check_text(str(prompt))]
    for source in sources:
        parts.append(check_text(_read(source), "stdin" if source == STDIN else source))
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
    """Read a file's text without its last newline, like a shell's $(...)."""
    if file != STDIN:
        check_is_text(Path(file))
    try:
        content = sys.stdin.buffer.read() if file == STDIN else Path(file).read_bytes()
    except OSError as error:
        raise DataError(f"{file}: cannot be read ({error.strerror}).") from error
    return content.decode(UTF8, "surrogateescape").removesuffix("\n").removesuffix("\r")


def check_text(text: str, name: str = "The prompt") -> str:
    """Return the text. Raises `PromptError` if it is empty, or not UTF-8."""
    try:
        text.encode()
    except UnicodeError as error:
        raise PromptError(f"{name} is not UTF-8 text.") from error
    if not text.strip():
        raise PromptError(f"{name} is empty: give some text.")
    return text


def as_messages(text: str, system: str | None) -> list[dict[str, str]]:
    """Make a chat of the prompt and an optional system message. Raises `PromptError`."""
    messages = [{"role": "user", "content": text}]
    if system is not None:
        messages.insert(0, {"role": "system", "content": check_text(system, "The system message")})
    return messages


def read_schema(value: str | None) -> Any:
    """Read the value of --json-schema, which is JSON or a file. Raises `DataError`."""
    if value is None:
        return None
    if value.lstrip().startswith("{"):
        return parse_json(value, "--json-schema", DataError)
    if not os.path.exists(value):
        raise DataError(
            f'--json-schema takes a JSON schema, such as \'{{"type": "object"}}\', or a file '
            f"with one: {brief(value)} is neither."
        )
    return read_json(value, DataError)
