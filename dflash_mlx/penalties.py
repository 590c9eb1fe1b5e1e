"""A bias and penalties, each in one operation for the rows of many requests.

The repetition penalty is mlx-lm's: it looks at the last tokens, the prompt's among them. Presence
and frequency penalties are OpenAI's: they count the tokens of the generated text, all of it, and
none of the prompt's.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence

import mlx.core as mx
import numpy as np

from .settings import RequestSettings

NO_REPETITION = 1.0  # the amount that changes nothing


class Penalties:
    """One request's penalties, and what they look at.

    Args:
        settings: of the request.
        prompt: its token ids.

    Attributes:
        repetition, presence, frequency: the amounts.
        window: how many of the last tokens `repetition` looks at; 0 if it changes nothing.
        recent: these tokens.
        counts: token -> how often the generated text has it; empty without another penalty.
        active: whether any penalty changes anything.
    """

    def __init__(self, settings: RequestSettings, prompt: Sequence[int] = ()) -> None:
        self.repetition = settings.repetition_penalty
        self.presence = settings.presence_penalty
        self.frequency = settings.frequency_penalty
        repeats = self.repetition != NO_REPETITION
        self.window = settings.repetition_context_size if repeats else 0
        self.recent = list(prompt[-self.window :]) if repeats else []
        self.counts: Counter[int] = Counter()
        self.active = repeats or self.counts_text

    @property
    def counts_text(self) -> bool:
        """Whether a penalty counts the generated text."""
        return self.presence != 0 or self.frequency != 0

    def commit(self, tokens: Sequence[int]) -> None:
        """Add tokens to the text."""
        if self.window:
            self.recent = [*self.recent, *tokens][-self.window :]
        if self.counts_text:
            self.counts.update(tokens)


# A request's penalties, its drafts [n] int32, and, for each of its rows, which of the drafts follow
# the text in the row's history.
History = tuple[Penalties, mx.array, Sequence[Sequence[int]]]


def add_bias(biases: Sequence[Mapping[int, float] | None], logits: mx.array) -> mx.array:
    """The logits [N, V] with the bias of each row's request, token -> addend."""
    if not any(biases):
        return logits
    most = mx.finfo(logits.dtype).max / 2  # f16 ends at 65,504
    added = [(row, *each) for row, bias in enumerate(biases) for each in (bias or {}).items()]
    rows, tokens, values = zip(*added, strict=True)
    clipped = mx.array([max(-most, min(value, most)) for value in values], logits.dtype)
    return logits.at[mx.array(rows), mx.array(tokens)].add(clipped)


def penalize(histories: Sequence[History], logits: mx.array) -> mx.array:
    """The logits [N, V] after the penalties of each row's request, in mlx-lm's order."""
    if any(penalties.window for penalties, *_ in histories):
        logits = _penalize_recent(histories, logits)
    if any(penalties.counts_text for penalties, *_ in histories):
        logits = _penalize_written(histories, logits)
    return logits


def _penalize_recent(histories: Sequence[History], logits: mx.array) -> mx.array:
    """The logits after repetition penalties."""
    tokens: list[mx.array] = []
    amounts: list[float] = []
    seen: list[np.ndarray] = []  # for each row, places of the tokens that its penalty looks at
    first = 0
    for penalties, drafts, paths in histories:
        tokens += [mx.array(penalties.recent, mx.int32), drafts]
        text = np.arange(first, first + len(penalties.recent))
        first += len(penalties.recent)
        for path in paths:
            places = np.concatenate([text, first + np.array(path, int)])
            seen.append(places[max(0, len(places) - penalties.window) :])
            amounts.append(penalties.repetition)
        first += len(drafts)
    # Shorter windows are padded with the token V, whose logits are one more column.
    every = mx.concatenate([*tokens, mx.array([logits.shape[-1]], mx.int32)])
    padded = np.full((len(seen), max(map(len, seen))), first, np.int32)
    for row, places in enumerate(seen):
        padded[row, : len(places)] = places
    ids = every[mx.array(padded)]
    logits = mx.pad(logits, [(0, 0), (0, 1)])
    amount = mx.array(amounts, logits.dtype)[:, None]
    values = mx.take_along_axis(logits, ids, axis=-1)
    values = mx.where(values < 0, values * amount, values / amount)
    return mx.put_along_axis(logits, ids, values, axis=-1)[:, :-1]


def _penalize_written(histories: Sequence[History], logits: mx.array) -> mx.array:
    """The logits after presence and frequency penalties.

    Counts are whole numbers before they are multiplied, so it does not matter which of the tokens
    are drafts.
    """
    counts = mx.zeros((len(histories), logits.shape[-1]))
    requests: list[int] = []  # of each row
    rows: list[int] = []  # for each draft before a row: the row, and the draft's place
    places: list[int] = []
    first = 0
    for request, (penalties, drafts, paths) in enumerate(histories):
        if penalties.counts:
            ids = mx.array(list(penalties.counts), mx.int32)
            counts = counts.at[request, ids].add(mx.array(list(penalties.counts.values())))
        for path in paths:
            rows += [len(requests)] * len(path)
            places += [first + place for place in path]
            requests.append(request)
        first += len(drafts)
    counts = counts[mx.array(requests)]
    if rows:
        every = mx.concatenate([drafts for _, drafts, _ in histories])
        counts = counts.at[mx.array(rows), every[mx.array(places)]].add(1.0)
    of_rows = [histories[request][0] for request in requests]
    presence = mx.array([penalties.presence for penalties in of_rows])[:, None]
    frequency = mx.array([penalties.frequency for penalties in of_rows])[:, None]
    penalty = frequency * counts + presence * (counts > 0)
    return logits - penalty.astype(logits.dtype)
