"""Drafters to measure against: right by decree, always wrong, slow, or with noise of their own."""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import replace

import mlx.core as mx

from dflash_mlx.drafter.protocol import Drafter
from dflash_mlx.proposal import Proposal
from dflash_mlx.sampling import Sampler
from dflash_mlx.sharpness import Sharpness
from dflash_mlx.targets import Target


class Oracle:
    """Knows the text, and drafts each of its tokens with probability `p`, a wrong one otherwise.

    Args:
        text: token ids of the prompt and its answer.
        vocab_size: token ids are below it.
        p: how often a slot is right; 0 is always wrong.
    """

    tap_layers = ()

    def __init__(self, text: Sequence[int], vocab_size: int, p: float) -> None:
        self.text, self.vocab_size, self.p = text, vocab_size, p

    def start(self, target: Target, sampler: Sampler) -> OracleSession:
        return OracleSession(self)


class OracleSession:
    """One request of an `Oracle`; the same text and probability always draft the same."""

    def __init__(self, oracle: Oracle) -> None:
        self._oracle, self._random, self._position = oracle, random.Random(0), 0

    def extend(self, taps: mx.array) -> None:
        self._position += taps.shape[1]

    def propose(self, anchor: int, width: int) -> Proposal:
        first = self._position + 1
        return Proposal([anchor, *map(self._token, range(first, first + width - 1))])

    def _token(self, position: int) -> int:
        oracle = self._oracle
        truth = oracle.text[position] if position < len(oracle.text) else 0
        if self._random.random() < oracle.p:
            return truth
        return (truth + self._random.randrange(1, oracle.vocab_size)) % oracle.vocab_size


class Slow:
    """A drafter each of whose drafts takes as long as some forwards of the target more."""

    def __init__(self, drafter: Drafter, forwards: int) -> None:
        self.drafter, self.forwards = drafter, forwards
        self.tap_layers = drafter.tap_layers

    def start(self, target: Target, sampler: Sampler) -> SlowSession:
        return SlowSession(self, target, sampler)


class SlowSession:
    """One request of a `Slow` drafter."""

    def __init__(self, slow: Slow, target: Target, sampler: Sampler) -> None:
        self._session = slow.drafter.start(target, sampler)
        self._target, self._forwards = target, slow.forwards

    def extend(self, taps: mx.array) -> None:
        self._session.extend(taps)

    def propose(self, anchor: int, width: int) -> Proposal:
        if width > 1:
            aside = self._target.start()
            for _ in range(self._forwards):
                logits, _ = aside.verify(Proposal([anchor]))
                mx.eval(logits)
                aside.commit([0])
        return self._session.propose(anchor, width)


class Independent:
    """A drafter that samples its drafts with noise of its own instead of the target's."""

    def __init__(self, drafter: Drafter) -> None:
        self.drafter, self.tap_layers = drafter, drafter.tap_layers

    def start(self, target: Target, sampler: Sampler) -> IndependentSession:
        return IndependentSession(self.drafter, target, sampler)


class IndependentSession:
    """One request of an `Independent` drafter."""

    def __init__(self, drafter: Drafter, target: Target, sampler: Sampler) -> None:
        other = replace(sampler.settings, seed=((sampler.seed or 0) + 1) % 2**32)
        self._sampler = Sampler(other, sharpness=Sharpness((1.0,)))
        self._session = drafter.start(target, self._sampler)

    def extend(self, taps: mx.array) -> None:
        self._sampler.commit([0] * taps.shape[1])  # only the position matters
        self._session.extend(taps)

    def propose(self, anchor: int, width: int) -> Proposal:
        return self._session.propose(anchor, width)
