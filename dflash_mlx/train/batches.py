"""Samples of similar length in batches of fixed shape, in an order that only the seed decides.

`mx.compile` builds one graph per shape, so lengths are rounded up to a multiple of `BUCKET` and
every batch of a bucket has the same number of rows. The position of a stream (epoch, index) is
all that a checkpoint has to remember of the data.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Sequence
from random import Random

import mlx.core as mx

from .data import Sample

BUCKET = 16

Arrays = tuple[mx.array, ...]


def bucket_length(length: int) -> int:
    """`length` rounded up to a whole bucket."""
    return -(-length // BUCKET) * BUCKET


def group(samples: Sequence[Sample], tokens: int, rng: Random) -> list[list[Sample]]:
    """Shuffled batches of about `tokens` tokens each, padding included, one bucket per batch.

    A bucket whose samples do not fill its last batch repeats some of them.
    """
    buckets = defaultdict(list)
    for sample in samples:
        buckets[bucket_length(len(sample.tokens))].append(sample)
    batches = []
    for length, members in sorted(buckets.items()):
        rows = max(1, tokens // length)
        members += [rng.choice(members) for _ in range(-len(members) % rows)]
        rng.shuffle(members)
        batches += [members[i : i + rows] for i in range(0, len(members), rows)]
    rng.shuffle(batches)
    return batches


class BatchStream:
    """An endless stream of batches that can be resumed at any position.

    Args:
        epoch: the samples of epoch e, always the same for the same e.
        collate: makes the arrays of a batch; the `Random` it gets depends on the position alone.
        tokens: tokens of a batch, padding included.
        seed: of the order and of what `collate` draws.
        position: (epoch, batch of that epoch) to start at.
    """

    def __init__(
        self,
        epoch: Callable[[int], Sequence[Sample]],
        collate: Callable[[list[Sample], Random], Arrays],
        tokens: int,
        seed: int,
        position: tuple[int, int] = (0, 0),
    ) -> None:
        self._epoch, self._collate, self._tokens, self._seed = epoch, collate, tokens, seed
        self._batches: list[list[Sample]] = []
        self.position = position
        self._load()

    def _load(self) -> None:
        epoch, _ = self.position
        samples, rng = self._epoch(epoch), Random(f"{self._seed} {epoch}")
        self._batches = group(samples, self._tokens, rng)

    def next(self) -> Arrays:
        """The arrays of the next batch."""
        epoch, index = self.position
        if index >= len(self._batches):
            self.position = epoch, index = epoch + 1, 0
            self._load()
        self.position = (epoch, index + 1)
        rng = Random(f"{self._seed} {epoch} {index}")
        return self._collate(self._batches[index], rng)
