"""Prompts that the target writes itself: what a chat model says where a user would speak.

An instruction-tuned model that is given nothing but the header of a user's turn goes on with a
plausible one (Magpie, arXiv 2406.08464). Turns that nearly repeat an earlier one are dropped.
"""

from __future__ import annotations

import re
from collections import Counter, defaultdict
from collections.abc import Callable, Sequence
from pathlib import Path

import mlx.core as mx
from jinja2 import TemplateError
from mlx_lm.sample_utils import apply_top_p

from ..errors import DataError, PromptError
from ..targets import Target
from .answers import Answering, append, complete, whole_lines

TEMPERATURE, TOP_P = 1.0, 0.95
SAME = 0.7  # of the pairs of words of two turns that are shared: then they are nearly the same
MOST_BARREN = 20  # rounds in a row that bring nothing new
_SENTINEL = "user turn goes here"


class Sampling:
    """Samples tokens from log-probabilities [N, V]; the same seed gives the same tokens."""

    def __init__(self, seed: int, temperature: float = TEMPERATURE, top_p: float = TOP_P) -> None:
        self._key, self._temperature, self._top_p = mx.random.key(seed), temperature, top_p

    def __call__(self, logprobs: mx.array) -> mx.array:
        self._key, key = mx.random.split(self._key)
        return mx.random.categorical(
            apply_top_p(logprobs, self._top_p) / self._temperature, key=key
        )


class Novelty:
    """Which texts are new: those that share few pairs of words with every earlier one."""

    def __init__(self) -> None:
        self._with: dict[tuple[str, ...], list[int]] = defaultdict(list)
        self._sizes: list[int] = []

    def add(self, text: str) -> bool:
        """Whether a text is new; then later ones are compared with it."""
        words = re.findall(r"\w+", text.lower())
        pairs = {*zip(words, words[1:], strict=False)} or {tuple(words)}
        common = Counter(number for pair in pairs for number in self._with[pair])
        for number, shared in common.items():
            if shared >= SAME * (len(pairs) + self._sizes[number] - shared):
                return False
        for pair in pairs:
            self._with[pair].append(len(self._sizes))
        self._sizes.append(len(pairs))
        return True


def user_header(target: Target) -> tuple[str, str]:
    """The text before a user's first turn, and the text that ends it, by the chat template.

    Raises `PromptError` for a target without a template, or with one that hides the turn.
    """
    tokenizer = target.tokenizer
    if not tokenizer.has_chat_template:
        raise PromptError(
            f"{target.name} has no chat template, so it cannot write its own data: give --data."
        )
    messages = [{"role": "user", "content": _SENTINEL}]
    try:
        text = tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=True)
    except TemplateError as error:
        raise PromptError(f"The chat template refuses a user's turn: {error}") from error
    before, found, after = str(text).partition(_SENTINEL)
    if not found:
        raise PromptError(f"The chat template of {target.name} leaves out what the user says.")
    return before, after


def write_turns(
    target: Target,
    count: int,
    path: Path,
    settings: Answering,
    seed: int = 0,
    progress: Callable[[int, int], None] | None = None,
) -> list[str]:
    """`count` different user turns in the target's own words; `path` keeps round after round.

    Args:
        settings: `max_tokens` of a turn, `chunk` of them a round.
        progress: called with the turns so far and those wanted.

    Raises `PromptError` without a chat template, `DataError` where the target has no more to say,
    `OutputError`.
    """
    before, after = user_header(target)
    header = target.tokenizer.encode(before, add_special_tokens=False)
    rounds = whole_lines(path)
    turns: list[str] = []
    novelty, barren, number = Novelty(), 0, 0
    while len(turns) < count:
        if number == len(rounds):
            found = _round(target, header, after, settings, seed * 1_000_003 + number)
            append(path, iter([{"turns": found}]))
            rounds.append({"turns": found})
        new = [turn for turn in rounds[number]["turns"] if novelty.add(turn)]
        number, turns, barren = number + 1, turns + new, 0 if new else barren + 1
        if barren == MOST_BARREN:
            raise DataError(
                f"{target.name} has said {len(turns)} different things and repeats itself: ask "
                f"for no more than that (--synthesize {max(len(turns), 1)}), or give --data."
            )
        if progress is not None:
            progress(min(len(turns), count), count)
    return turns[:count]


def _round(
    target: Target, header: Sequence[int], after: str, settings: Answering, seed: int
) -> list[str]:
    """Some turns, those that ended and say something."""
    answers = complete(target, [header] * settings.chunk, settings, Sampling(seed))
    end = after.strip() or after
    turns = []
    for answer in answers:
        tokens = answer.answer[:-1] if answer.ended else answer.answer
        text, found, _ = target.tokenizer.decode(list(tokens)).partition(end)
        # What was cut off in the middle is no turn.
        if (answer.ended or found) and len(text.split()) > 1:
            turns.append(text.strip())
    return turns
