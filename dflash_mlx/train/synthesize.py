"""Let the target write prompts: what a chat model says in the user's place.

An instruction-tuned model that is given only the header of a user's turn continues with a plausible
one (Magpie, arXiv 2406.08464). A base model, without a chat template, opens a text instead. Turns
that repeat the words of an earlier one are dropped.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import mlx.core as mx
from mlx_lm.sample_utils import make_sampler

from ..chat_template import apply_chat_template
from ..errors import DataError, PromptError
from ..targets import Target
from .answer_writer import AnswerSettings, append, complete_prompts, whole_lines

# top-p would sort 262,144 tokens a step, for seconds on a CPU
TEMPERATURE = 1.0
MIN_P = 0.05
MAX_BARREN = 20  # rounds in a row without a new turn
OPENING = 24  # tokens with which a base model opens a text
_SENTINEL = "user turn goes here"


@dataclass(frozen=True)
class TurnProgress:
    """User turns that the target has written so far."""

    turns: int
    wanted: int


def user_header(target: Target) -> tuple[str, str]:
    """The chat template's text before a user's first turn, and the text after it.

    Raises `PromptError` without a chat template, or if the template hides the turn.
    """
    tokenizer = target.tokenizer
    if not tokenizer.has_chat_template:
        raise PromptError(f"{target.name} has no chat template: give texts, and --keep-answers.")
    messages = [{"role": "user", "content": _SENTINEL}]
    text = apply_chat_template(tokenizer, messages)
    before, found, after = text.partition(_SENTINEL)
    if not found:
        raise PromptError(f"The chat template of {target.name} leaves out what the user says.")
    return before, after


def turn_start(target: Target) -> tuple[list[int], str | None]:
    """Token ids that a user's turn follows, and the text after it; BOS and None for a base model.

    Raises `PromptError`.
    """
    tokenizer = target.tokenizer
    if tokenizer.has_chat_template or tokenizer.bos_token_id is None:
        opening, after = user_header(target)
        return list(tokenizer.encode(opening, add_special_tokens=False)), after
    return [tokenizer.bos_token_id], None


def write_turns(
    target: Target,
    count: int,
    path: Path,
    settings: AnswerSettings,
    seed: int = 0,
    progress: Callable[[TurnProgress], None] = lambda event: None,
) -> list[str]:
    """Write `count` different user turns; `path` keeps them round by round.

    Args:
        settings: `max_tokens` of a turn, `chunk` turns per round.

    Raises `PromptError` as `turn_start`, `DataError` if the target only repeats itself,
    `OutputError`.
    """
    header, after = turn_start(target)
    if after is None:
        settings = replace(settings, max_tokens=OPENING)
    rounds = whole_lines(path)
    turns: dict[tuple[str, ...], str] = {}  # by their words
    barren = 0
    number = 0
    while len(turns) < count:
        if number == len(rounds):
            found = _write_round(
                target,
                header=header,
                after=after,
                settings=settings,
                seed=seed * 1_000_003 + number,
            )
            append(path, [{"turns": found}])
            rounds.append({"turns": found})
        before = len(turns)
        for turn in rounds[number]["turns"]:
            turns.setdefault(tuple(re.findall(r"\w+", turn.lower())), turn)
        number = number + 1
        barren = 0 if len(turns) > before else barren + 1
        if barren == MAX_BARREN:
            raise DataError(
                f"{target.name} wrote {len(turns)} different turns and now repeats itself: ask "
                f"for no more (--synthesize {max(len(turns), 1)}), or give --data."
            )
        progress(TurnProgress(min(len(turns), count), count))
    return [*turns.values()][:count]


def _write_round(
    target: Target, header: Sequence[int], after: str | None, settings: AnswerSettings, seed: int
) -> list[str]:
    """Turns that ended, or openings of a text, of more than one word."""
    mx.random.seed(seed)
    sampler = make_sampler(TEMPERATURE, min_p=MIN_P)
    answers = complete_prompts(
        target, prompts=[header] * settings.chunk, settings=settings, sampler=sampler
    )
    turns = []
    for answer in answers:
        tokens = answer.answer[:-1] if answer.ended else answer.answer
        text = target.tokenizer.decode(list(tokens))
        whole = after is None or answer.ended
        if after is not None:
            text, found, _ = text.partition(after.strip() or after)
            whole = whole or bool(found)
        if whole and len(text.split()) > 1:
            turns.append(text.strip())
    return turns
