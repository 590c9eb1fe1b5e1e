"""Write the target's answers, and keep the hidden states of the forwards that wrote them.

The trainer would compute them again, for as much time as writing took. mlx-lm's batch generator
does not hand them out; so this is a small one, for models whose layers all have plain KV caches.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import mlx.core as mx
import numpy as np
from mlx_lm.models.cache import BatchKVCache

from dflash_mlx.targets import Target
from dflash_mlx.train.answer_writer import Answer
from dflash_mlx.train.features import TOP, Features

ROWS = 64  # answers written together
REFILL = 8  # an eighth as many prompts are read together
TEMPERATURE = 0.2
TOP_P = 0.9  # as published with the model
SAMPLED = 4  # one answer in so many is sampled, the others are greedy
REPEATED = 32  # an answer that repeats its last 32 tokens is ended


@dataclass
class Row:
    """A conversation that is answered: its token ids, and the features after each of them.

    K layers of width D are tapped, and the T likeliest tokens are kept.
    """

    number: int  # of its prompt
    tokens: list[int]  # prompt and answer
    start: int  # of the answer
    sampled: bool  # or greedy
    limit: int  # the most tokens of the answer
    taps: list[np.ndarray] = field(default_factory=list)  # [n, K*D] of each forward, as bf16 bits
    # Of each token of the answer:
    choices: list[int] = field(default_factory=list)  # the likeliest token
    tops: list[np.ndarray] = field(default_factory=list)  # the likeliest tokens [T]
    shares: list[np.ndarray] = field(default_factory=list)  # their probabilities [T]
    over: bool = False  # whether the answer is over, or repeats itself

    @property
    def answer(self) -> Answer:
        """Prompt and answer."""
        return Answer(tuple(self.tokens[: self.start]), tuple(self.tokens[self.start :]), True)

    def features(self) -> Features:
        """The features of all tokens, with zeros where no forward computed them.

        No forward reads the last token. Choices are kept from the prompt's last token on.
        """
        around = (self.start - 1, 1)  # zeros before and after
        whole = (0, 0)
        taps = mx.array(np.concatenate(self.taps)).view(mx.bfloat16)
        return Features(
            mx.pad(taps, [(0, 1), whole]),
            mx.pad(mx.array(self.choices), [around]),
            mx.pad(mx.array(np.stack(self.tops).astype(np.int32)), [around, whole]),
            mx.pad(mx.array(np.stack(self.shares)), [around, whole]),
        )

    def add(self, token: int, stops: Sequence[int]) -> None:
        """Append the answer's next token, and end the answer at one of `stops` or if it repeats."""
        tokens = self.tokens
        tokens.append(token)
        length = len(tokens) - self.start
        tail = tokens[-REPEATED:]
        self.over = token in stops or length >= self.limit
        if length > 2 * REPEATED and not self.over:
            # Comparing the last token first saves time.
            self.over = any(
                tokens[-1 - shift] == token and tokens[-REPEATED - shift : -shift] == tail
                for shift in range(1, REPEATED + 1)
            )


class Writer:
    """Answers prompts, and keeps features.

    Args:
        target: the model.
        layers: the layers to tap.
        rows: answers that are written together.
    """

    def __init__(self, target: Target, layers: Sequence[int], rows: int = ROWS) -> None:
        self._target = target
        self._layers = layers
        self._most = rows
        self._refill = max(1, rows // REFILL)
        self._rows: list[Row] = []
        self._cache: list[BatchKVCache] = []

    def answer(
        self,
        prompts: Sequence[Sequence[int]],
        max_tokens: int,
        on_step: Callable[[int, int], None] = lambda done, tokens: None,
    ) -> list[Row]:
        """Answer all prompts, the longest first, and return them in their order.

        Args:
            prompts: token ids.
            max_tokens: of each answer.
            on_step: called after each step with the counts of whole answers and of written tokens.
        """
        longest = sorted(range(len(prompts)), key=lambda i: -len(prompts[i]))
        waiting = [
            Row(
                number=i,
                tokens=list(prompts[i]),
                start=len(prompts[i]),
                sampled=i % SAMPLED == SAMPLED - 1,
                limit=max_tokens,
            )
            for i in longest
        ]
        stops = self._target.tokenizer.eos_token_ids
        done = []
        tokens = 0
        while waiting or self._rows:
            over = [row.over for row in self._rows]
            free = self._most - len(self._rows) + sum(over)
            # Caches are copied when rows go, so some wait for the others.
            if sum(over) and (free >= self._refill or all(over)):
                done += [row for row, end in zip(self._rows, over, strict=True) if end]
                self._keep([i for i, end in enumerate(over) if not end])
            while waiting and len(self._rows) <= self._most - self._refill:
                new = waiting[: self._refill]
                waiting = waiting[self._refill :]
                self._read(new, stops)
            if self._rows:
                tokens += len(self._rows)
                last = mx.array([[row.tokens[-1]] for row in self._rows])
                self._write(self._rows, last, self._cache, stops)
            on_step(len(done), tokens)
        return sorted(done, key=lambda row: row.number)

    def _keep(self, rows: list[int]) -> None:
        """Drop the answers that are not at these places of the batch."""
        self._rows = [self._rows[i] for i in rows]
        if not rows:
            self._cache = []
        for cache in self._cache:
            cache.filter(mx.array(rows))

    def _read(self, rows: list[Row], stops: Sequence[int]) -> None:
        """Read prompts, write their answers' first tokens, and let them join the others."""
        longest = max(len(row.tokens) for row in rows)
        padding = [longest - len(row.tokens) for row in rows]
        cache = [BatchKVCache(padding) for _ in range(self._target.num_layers)]
        padded = [[0] * pad + row.tokens for pad, row in zip(padding, rows, strict=True)]
        self._write(rows, mx.array(padded), cache, stops)
        if self._cache:
            for mine, other in zip(self._cache, cache, strict=True):
                mine.extend(other)
            mx.eval([mine.state[:2] for mine in self._cache])
        else:
            self._cache = cache
        self._rows = self._rows + rows

    def _write(
        self, rows: list[Row], tokens: mx.array, cache: list[BatchKVCache], stops: Sequence[int]
    ) -> None:
        """Read `tokens` [N, S] in a forward, and add the next token to rows that are not over."""
        logits, taps = self._target.features(tokens, self._layers, cache)
        logits = logits[:, -1]
        tops = mx.argpartition(-logits, TOP - 1, axis=-1)[:, :TOP]
        shares = mx.softmax(mx.take_along_axis(logits, tops, axis=-1), axis=-1)
        choices = logits.argmax(axis=-1)
        sampled_rows = [i for i, row in enumerate(rows) if row.sampled]
        draws = sampled(logits[mx.array(sampled_rows)]) if sampled_rows else choices[:0]
        taps = taps.astype(mx.bfloat16).view(mx.uint16)
        mx.eval(taps, tops, shares, choices, draws)
        all_taps = np.array(taps)
        all_tops = np.array(tops)
        all_shares = np.array(shares)
        greedy: list[Any] = choices.tolist()  # type: ignore[assignment]
        drawn = dict(zip(sampled_rows, np.array(draws).tolist(), strict=True))
        for i, row in enumerate(rows):
            if row.over:
                continue
            # Padding comes first, so the tokens that are read now are the last of the row.
            new_tokens = len(row.tokens) - sum(map(len, row.taps))
            row.taps.append(all_taps[i, -new_tokens:].copy())
            row.choices.append(greedy[i])
            row.tops.append(all_tops[i])
            row.shares.append(all_shares[i])
            row.add(drawn.get(i, greedy[i]), stops)


def sampled(logits: mx.array) -> mx.array:
    """Tokens drawn from logits [N, V] at the published temperature and top-p."""
    tops = mx.argpartition(-logits, TOP - 1, axis=-1)[:, :TOP]
    scaled = mx.take_along_axis(logits, tops, axis=-1) / TEMPERATURE
    order = mx.argsort(-scaled, axis=-1)
    scaled, tops = (mx.take_along_axis(a, order, axis=-1) for a in (scaled, tops))
    shares = mx.softmax(scaled, axis=-1)
    before = mx.cumsum(shares, axis=-1) - shares
    drawn = mx.random.categorical(mx.where(before < TOP_P, scaled, -mx.inf))
    return mx.take_along_axis(tops, drawn[:, None], axis=-1)[:, 0]
