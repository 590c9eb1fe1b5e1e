"""A bias and mlx-lm's penalties, each in one operation for the rows of many requests."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import mlx.core as mx
import numpy as np

from .settings import RequestSettings

PENALTIES = {"repetition": 1.0, "presence": 0.0, "frequency": 0.0}  # amounts that change nothing

# A request's settings, the end of its text, drafts [n] int32, and, for each of its rows, which of
# the drafts follow the text in the row's history.
History = tuple[RequestSettings, Sequence[int], mx.array, Sequence[Sequence[int]]]


def add_bias(biases: Sequence[Mapping[int, float] | None], logits: mx.array) -> mx.array:
    """The logits [N, V] with the bias of each row's request, token -> addend."""
    if not any(biases):
        return logits
    most = mx.finfo(logits.dtype).max / 2  # f16 ends at 65,504
    added = [(row, *each) for row, bias in enumerate(biases) for each in (bias or {}).items()]
    rows, tokens, values = zip(*added, strict=True)
    clipped = mx.array([max(-most, min(value, most)) for value in values], logits.dtype)
    return logits.at[mx.array(rows), mx.array(tokens)].add(clipped)


def window(settings: RequestSettings, kind: str) -> int:
    """How many of the last tokens a penalty looks at; 0 if it changes nothing."""
    if getattr(settings, f"{kind}_penalty") == PENALTIES[kind]:
        return 0
    size: int = getattr(settings, f"{kind}_context_size")
    return size


def penalize(histories: Sequence[History], logits: mx.array) -> mx.array:
    """The logits [N, V] after the penalties of each row's request."""
    active = [kind for kind in PENALTIES if any(window(one, kind) for one, *_ in histories)]
    if not active:
        return logits
    tokens, rows, first = list[mx.array](), list[tuple[RequestSettings, np.ndarray]](), 0
    for settings, text, drafts, paths in histories:
        tokens += [mx.array([*text], mx.int32), drafts]
        known, first = np.arange(first, first + len(text)), first + len(text)
        rows += [(settings, np.concatenate([known, first + np.array(path, int)])) for path in paths]
        first += len(drafts)
    # Shorter windows are padded with the token V, whose logits are one more column.
    every = mx.concatenate([*tokens, mx.array([logits.shape[-1]], mx.int32)])
    logits = mx.pad(logits, [(0, 0), (0, 1)])
    for kind in active:
        seen = [at[max(0, len(at) - window(settings, kind)) :] for settings, at in rows]
        places = np.full((len(rows), max(map(len, seen))), first, np.int32)
        for row, at in enumerate(seen):
            places[row, : len(at)] = at
        ids = every[mx.array(places)]
        amounts = [getattr(settings, f"{kind}_penalty") for settings, _ in rows]
        amount = mx.array(amounts, logits.dtype)[:, None]
        if kind == "frequency":
            logits = logits.at[mx.arange(len(rows))[:, None], ids].subtract(amount)
            continue
        found = mx.take_along_axis(logits, ids, axis=-1)
        if kind == "presence":
            found = found - amount
        else:
            found = mx.where(found < 0, found * amount, found / amount)
        logits = mx.put_along_axis(logits, ids, found, axis=-1)
    return logits[:, :-1]
