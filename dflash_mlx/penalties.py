"""A bias and penalties, each in one operation for the rows of many requests.

The repetition penalty is mlx-lm's: it looks at the last tokens, including the prompt's. Presence
and frequency penalties are OpenAI's: they count the tokens of the whole generated text, but not the
prompt's.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence

import mlx.core as mx
import numpy as np

from .settings import RequestSettings

NO_REPETITION = 1.0  # the repetition penalty that changes nothing


class Penalties:
    """One request's penalties, and the tokens that they depend on.

    Args:
        settings: the request's settings.
        prompt: the request's token ids.

    Attributes:
        repetition, presence, frequency: the penalties.
        window: how many of the last tokens `repetition` looks at; 0 if it changes nothing.
        recent: those tokens.
        counts: token -> how often it occurs in the generated text; empty if no penalty counts.
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


# A request's penalties, its drafts [n] int32, and the path of each row: the indices of the drafts
# that follow the text in the row's history.
History = tuple[Penalties, mx.array, Sequence[Sequence[int]]]


def add_bias(biases: Sequence[Mapping[int, float] | None], logits: mx.array) -> mx.array:
    """Add the bias of each row's request (token -> number) to the logits [N, V]."""
    if not any(biases):
        return logits
    largest = mx.finfo(logits.dtype).max / 2  # f16 ends at 65,504
    rows: list[int] = []
    tokens: list[int] = []
    values: list[float] = []
    for row, bias in enumerate(biases):
        for token, value in (bias or {}).items():
            rows.append(row)
            tokens.append(token)
            values.append(max(-largest, min(value, largest)))
    addends = mx.array(values, logits.dtype)
    return logits.at[mx.array(rows), mx.array(tokens)].add(addends)


def penalize(histories: Sequence[History], logits: mx.array) -> mx.array:
    """Apply the penalties of each row's request to the logits [N, V], in mlx-lm's order."""
    if any(penalties.window for penalties, _, _ in histories):
        logits = _penalize_repetition(histories, logits)
    if any(penalties.counts_text for penalties, _, _ in histories):
        logits = _penalize_occurrences(histories, logits)
    return logits


def _penalize_repetition(histories: Sequence[History], logits: mx.array) -> mx.array:
    """Apply repetition penalties to the logits [N, V]."""
    # The recent tokens and the drafts of all requests, one after the other.
    tokens: list[mx.array] = []
    # For each row, the penalty, and the positions in `tokens` of what the penalty looks at.
    penalty_of_row: list[float] = []
    windows: list[np.ndarray] = []
    end = 0
    for penalties, drafts, paths in histories:
        tokens += [mx.array(penalties.recent, mx.int32), drafts]
        text = np.arange(end, end + len(penalties.recent))
        end += len(penalties.recent)
        for path in paths:
            positions = np.concatenate([text, end + np.array(path, int)])
            windows.append(positions[max(0, len(positions) - penalties.window) :])
            penalty_of_row.append(penalties.repetition)
        end += len(drafts)
    # Pad shorter windows with the token V, and give that token a column of its own.
    all_tokens = mx.concatenate([*tokens, mx.array([logits.shape[-1]], mx.int32)])
    padded = np.full((len(windows), max(map(len, windows))), end, np.int32)
    for row, positions in enumerate(windows):
        padded[row, : len(positions)] = positions
    ids = all_tokens[mx.array(padded)]
    logits = mx.pad(logits, [(0, 0), (0, 1)])
    penalty = mx.array(penalty_of_row, logits.dtype)[:, None]
    values = mx.take_along_axis(logits, ids, axis=-1)
    values = mx.where(values < 0, values * penalty, values / penalty)
    return mx.put_along_axis(logits, ids, values, axis=-1)[:, :-1]


def _penalize_occurrences(histories: Sequence[History], logits: mx.array) -> mx.array:
    """Apply presence and frequency penalties to the logits [N, V].

    Counts are whole numbers before they are multiplied, so it does not matter which of the tokens
    are drafts.
    """
    text_counts = mx.zeros((len(histories), logits.shape[-1]))
    request_of_row: list[int] = []
    # For each draft in the history of a row: the row, and the draft's position among all drafts.
    rows: list[int] = []
    positions: list[int] = []
    end = 0
    for request, (penalties, drafts, paths) in enumerate(histories):
        if penalties.counts:
            ids = mx.array(list(penalties.counts), mx.int32)
            values = mx.array(list(penalties.counts.values()))
            text_counts = text_counts.at[request, ids].add(values)
        for path in paths:
            rows += [len(request_of_row)] * len(path)
            positions += [end + index for index in path]
            request_of_row.append(request)
        end += len(drafts)
    counts = text_counts[mx.array(request_of_row)]
    if rows:
        all_drafts = mx.concatenate([drafts for _, drafts, _ in histories])
        counts = counts.at[mx.array(rows), all_drafts[mx.array(positions)]].add(1.0)
    penalties_of_row = [histories[request][0] for request in request_of_row]
    presence = mx.array([penalties.presence for penalties in penalties_of_row])[:, None]
    frequency = mx.array([penalties.frequency for penalties in penalties_of_row])[:, None]
    penalty = frequency * counts + presence * (counts > 0)
    return logits - penalty.astype(logits.dtype)
