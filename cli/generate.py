"""`dflash-mlx generate`: one answer, and what drafting did for it."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING, Any

import typer
from rich.console import Group
from rich.text import Text

import dflash_mlx
from dflash_mlx.errors import PromptError

from . import generate_options, options
from .counters import counter_lines, counters
from .generate_question import read_prompt, utf8
from .output import as_line, as_text, check_writable, write_whole
from .pair import Pair, explain, open_pair
from .screen import note, panel, print_json, show_text, speeds, stderr, waiting

if TYPE_CHECKING:
    from dflash_mlx import Event, Result
    from dflash_mlx.bench.measure import Comparison

# One short answer is over in a tenth of a second, far too short to time once.
COMPARE_SECONDS, COMPARE_PAIRS = 2.0, 9


def generate(
    *,
    prompt: generate_options.Prompt = None,
    file: generate_options.File = None,
    names: options.Names,
    no_draft: options.NoDraft = False,
    weights: options.Weights,
    max_tokens: options.MaxTokens = 256,
    sampling: options.Sampling,
    rounds: options.Rounds,
    stop: options.Stop = None,
    system: generate_options.System = None,
    raw: generate_options.Raw = False,
    compare: generate_options.Compare = True,
    verbose: options.Verbose = False,
    stats: generate_options.Stats = False,
    output: generate_options.Output = None,
    json: options.Json = False,
) -> None:
    """Answer one prompt: the text goes to stdout, a summary to stderr."""
    if raw and system is not None:
        raise typer.BadParameter("goes without --no-chat-template", param_hint="--system")
    text = read_prompt(prompt, file)
    asked = text if raw else _messages(text, system)
    if output is not None:
        check_writable(output)
    pair = open_pair(names, weights, rounds, no_draft)
    comparison = _comparison(pair, asked, max_tokens, stop or [])
    comparison.sampling = sampling.settings()
    result = _stream(comparison, quiet=json or output is not None)
    if compare and pair.drafter is not None and result.tokens:
        with waiting("Decoding plainly, to compare (--no-compare skips this)"):
            _compare(comparison)
    content = _as_json(pair, comparison, result) if json else None
    if content is not None and stats:
        content["stats"] = counters(result.stats)
    if output is not None:
        write_whole(output, as_text(result.text) if content is None else as_line(content))
    elif content is not None:
        print_json(content)
    if content is None:
        stderr().print(panel(pair.title, _summary(pair, comparison, result)))
        for line in counter_lines(result.stats) if stats else ():
            note(line)
    if verbose:
        explain(pair, result.stats)


def _messages(text: str, system: str | None) -> list[dict[str, str]]:
    asked = [{"role": "user", "content": text}]
    if system is not None:
        asked.insert(0, {"role": "system", "content": utf8(system, "The system message")})
    return asked


def _comparison(
    pair: Pair, prompt: str | list[dict[str, str]], max_tokens: int, stop: list[str]
) -> Comparison:
    from dflash_mlx.bench.measure import Comparison
    from dflash_mlx.prompt import encode_prompt

    if not isinstance(prompt, str) and not pair.target.tokenizer.has_chat_template:
        raise PromptError(f"{pair.target.name} has no chat template: add --no-chat-template.")
    ids = encode_prompt(pair.target, prompt)
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


def _stream(comparison: Comparison, quiet: bool) -> Result:
    """Generate once, writing the text as it comes; the run counts as the first drafted one."""
    events: list[Event] = []
    show_text(
        dflash_mlx.stream_generate(
            comparison.target,
            comparison.drafter,
            comparison.prompt,
            max_tokens=comparison.max_tokens,
            block_size=comparison.block_size,
            kv_bits=comparison.kv_bits,
            stop=comparison.stop,
            policy=comparison.policy,
            **comparison.sampling,
        ),
        events,
        quiet,
    )
    result = dflash_mlx.Result(
        text="".join(event.text for event in events),
        tokens=[token for event in events for token in event.tokens],
        finish_reason=events[-1].finish_reason or "length",
        stats=events[-1].stats,
    )
    comparison.drafted.append(result)
    return result


def _compare(comparison: Comparison) -> None:
    """Complete the first pair, and run more of them while that takes no time to speak of."""
    start = time.perf_counter()
    comparison.run_plain()
    while len(comparison.plain) < COMPARE_PAIRS and time.perf_counter() - start < COMPARE_SECONDS:
        comparison.run_pair()


def _summary(pair: Pair, comparison: Comparison, result: Result) -> Group:
    """What the panel says."""
    stats, runs = result.stats, comparison
    if not runs.plain:
        name = "plain" if runs.drafter is None else "DFlash"
        rows = [(name, stats.tokens_per_second, "")]
    else:
        rows = [
            ("plain", runs.plain_speed, ""),
            ("DFlash", runs.drafted_speed, f"{runs.speedup:.2f}x"),
        ]
    counts = f"{stats.output_tokens} tokens"
    if runs.drafter is not None:
        counts += f" in {stats.rounds} rounds: {stats.acceptance_length:.1f} tokens per round"
    lines = [Text(counts)]
    if result.finish_reason == "length":
        lines[0].append(f" ({pair.limit_reached(stats)})", style="yellow")
    if runs.plain:
        lines.append(_verdict(runs.first_difference))
    return Group(speeds(rows), *lines)


def _verdict(difference: int | None) -> Text:
    if difference is None:
        return Text.assemble("identical to plain decoding: ", ("yes", "bold green"))
    return Text.assemble(
        "identical to plain decoding: ", (f"no, from token {difference + 1} on", "bold red")
    )


def _as_json(pair: Pair, comparison: Comparison, result: Result) -> dict[str, Any]:
    stats, runs = result.stats, comparison
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
    if runs.plain:
        content |= {
            "plain_tokens_per_second": runs.plain_speed,
            "speedup": runs.speedup,
            "identical": runs.first_difference is None,
            "first_difference": runs.first_difference,
        }
    return content
