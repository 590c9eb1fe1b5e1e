"""Lets the target write prompts: what a chat model would say as the user.

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

# Sampling uses min-p because top-p would sort up to 262,144 tokens a step: seconds on a CPU.
TEMPERATURE = 1.0
MIN_P = 0.05
# Writing ends with an error after this many consecutive rounds without a new turn.
MAX_BARREN = 20
# The number of tokens with which a base model opens a text.
OPENING = 24
_SENTINEL = "user turn goes here"


@dataclass(frozen=True)
class TurnProgress:
    """User turns that the target has written so far."""

    turns: int
    wanted: int


def user_header(target: Target) -> tuple[str, str]:
    """The chat template's text before a user's first turn, and the text after it.

    Raises:
        PromptError: there is no chat template, or it leaves out the turn.
    """
    tokenizer = target.tokenizer
    if not tokenizer.has_chat_template:
        raise PromptError(f"{target.name} has no chat template: give texts, and --keep-answers.")
    messages = [{"role": "user", "content": _SENTINEL}]
    text = apply_chat_template(tokenizer, messages)
    before, sentinel, after = text.partition(_SENTINEL)
    if not sentinel:
        raise PromptError(f"The chat template of {target.name} leaves out what the user says.")
    return before, after


def turn_start(target: Target) -> tuple[list[int], str | None]:
    """The token ids before a user's turn, and the text after it; BOS and None for a base model.

    Raises:
        PromptError: there is no usable chat template.
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
    """Write `count` different user turns.

    Args:
        target: the model that writes them.
        count: how many turns.
        path: a file of finished rounds, from which an interrupted run continues.
        settings: `max_tokens` of a turn, and `chunk` turns per round.
        seed: seeds the sampling.
        progress: called after every round.

    Raises:
        DataError: the target only repeats itself.
        PromptError, OutputError: the errors of `turn_start` and of writing the file.
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
            new_turns = _write_round(
                target,
                header=header,
                after=after,
                settings=settings,
                seed=seed * 1_000_003 + number,  # other numbers in each round and with each seed
            )
            append(path, [{"turns": new_turns}])
            rounds.append({"turns": new_turns})
        before = len(turns)
        for turn in rounds[number]["turns"]:
            turns.setdefault(tuple(re.findall(r"\w+", turn.lower())), turn)
        number += 1
        barren = 0 if len(turns) > before else barren + 1
        if barren == MAX_BARREN:
            raise DataError(
                f"{target.name} wrote {len(turns)} different turns and now repeats itself: ask "
                f"for no more (--synthesize {max(len(turns), 1)}), or give --data."
            )
        progress(TurnProgress(min(len(turns), count), count))
    return list(turns.values())[:count]


def _write_round(
    target: Target, header: Sequence[int], after: str | None, settings: AnswerSettings, seed: int
) -> list[str]:
    """Write one round of turns, or of openings of a text if `after` is None.

    Turns that were cut off are left out, and so are those of a single word.

    Args:
        target: the model that writes them.
        header: the token ids before a turn.
        after: the chat template's text after a turn, at which a turn ends.
        settings: `max_tokens` of a turn, and `chunk` turns per round.
        seed: seeds the sampling.
    """
    mx.random.seed(seed)
    sampler = make_sampler(TEMPERATURE, min_p=MIN_P)
    answers = complete_prompts(
        target, prompts=[header] * settings.chunk, settings=settings, sampler=sampler
    )
    turns = []
    for answer in answers:
        tokens = answer.answer[:-1] if answer.ended else answer.answer
        text = target.tokenizer.decode(list(tokens))
        is_complete = after is None or answer.ended
        if after is not None:
            text, end, _ = text.partition(after.strip() or after)
            is_complete = is_complete or bool(end)
        if is_complete and len(text.split()) > 1:
            turns.append(text.strip())
    return turns
