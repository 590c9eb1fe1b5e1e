"""Answers with the target's features, computed once and kept on the device, and batches of them."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from random import Random

import torch
from torch import Tensor

from .drafter import Batch
from .target import SmolLM2
from .writer import rounded

TOP = 16  # likeliest tokens that are kept of each distribution
SCALE_SAMPLES = 32  # that `tap_scales` reads
SINK_TOKENS = 8  # at the beginning of a text, left out of the scales: their states are unusual
LOGITS = 16384  # most tokens whose logits are in memory at the same time
ROWS = 256  # sequences of a batch at most: each has as many blocks, however short it is


@dataclass(frozen=True)
class Sample:
    """Token ids of a prompt and its answer, which begins at `start`."""

    tokens: Sequence[int]
    start: int

    @property
    def anchors(self) -> range:
        """The positions that a block of the answer may follow."""
        return range(self.start, len(self.tokens) - 1)


class Features:
    """The target's features of samples, one after another.

    Args:
        target: the model.
        layers: the layers to tap.
        samples: what is read.
    """

    @torch.no_grad()
    def __init__(self, target: SmolLM2, layers: Sequence[int], samples: Sequence[Sample]) -> None:
        device = target.device
        self.samples = samples
        lengths = torch.tensor([len(sample.tokens) for sample in samples])
        self._starts = (lengths.cumsum(0) - lengths).to(device)
        self._lengths = lengths.to(device)
        count = int(lengths.sum())
        width = len(layers) * target.hidden_size
        self._tokens = torch.zeros(count, dtype=torch.long, device=device)
        self._taps = torch.zeros((count, width), dtype=target.dtype, device=device)
        self._choices = torch.zeros(count, dtype=torch.int32, device=device)
        self._tops = torch.zeros((count, TOP), dtype=torch.int32, device=device)
        self._shares = torch.zeros((count, TOP), device=device)
        longest = sorted(range(len(samples)), key=lambda number: -len(samples[number].tokens))
        while longest:
            rows = max(1, LOGITS // len(samples[longest[0]].tokens))
            self._fill(target, layers, longest[:rows])
            longest = longest[rows:]

    def _fill(self, target: SmolLM2, layers: Sequence[int], numbers: list[int]) -> None:
        """Compute and store the features of the samples with these numbers, in one forward."""
        places, inside = self._places(torch.tensor(numbers, device=target.device))
        places = places[inside]
        texts = [torch.tensor(self.samples[number].tokens) for number in numbers]
        self._tokens[places] = torch.cat(texts).to(target.device)
        padded = torch.nn.utils.rnn.pad_sequence(texts, batch_first=True).to(target.device)
        hidden, taps = target.read(padded, layers)
        logits = target.head(hidden[inside])
        tops = logits.topk(TOP, dim=-1)
        self._taps[places] = torch.cat([tap[inside] for tap in taps], dim=-1)
        self._choices[places] = tops.indices[:, 0].int()
        self._tops[places] = tops.indices.int()
        self._shares[places] = (tops.values - logits.logsumexp(dim=-1, keepdim=True)).exp()

    def _places(self, numbers: Tensor, width: int | None = None) -> tuple[Tensor, Tensor]:
        """Where the tokens of samples are stored, and which are no padding, [N, S] each."""
        lengths = self._lengths[numbers]
        within = torch.arange(width or int(lengths.max()), device=numbers.device)
        inside = within < lengths[:, None]
        return self._starts[numbers][:, None] + within.minimum(lengths[:, None] - 1), inside

    def batch(self, numbers: list[int], anchors: Sequence[Sequence[int]], count: int) -> Batch:
        """The samples with these numbers, and a block after each of their anchors.

        A sample with fewer than `count` anchors gets blocks without weight.
        """
        device = self._tokens.device
        width = rounded(max(len(self.samples[number].tokens) for number in numbers))
        places, inside = self._places(torch.tensor(numbers, device=device), width)
        filled = torch.zeros((2, len(numbers), count), dtype=torch.long)
        for row, (number, chosen) in enumerate(zip(numbers, anchors, strict=True)):
            filled[0, row] = self.samples[number].start
            filled[0, row, : len(chosen)] = torch.tensor(chosen)
            filled[1, row, : len(chosen)] = len(self.samples[number].tokens)
        filled = filled.to(device)
        return Batch(
            tokens=self._tokens[places] * inside,
            anchors=filled[0],
            ends=filled[1],
            taps=self._taps[places],
            choices=self._choices[places].long(),
            tops=self._tops[places].long(),
            shares=self._shares[places],
        )

    def agreement(self) -> float:
        """The share of the answers' tokens that are the target's choices when it reads the text.

        Greedy answers of the same target reach nearly 1; the rest is rounding.
        """
        same = 0
        count = 0
        for start, sample in zip(self._starts.tolist(), self.samples, strict=True):
            answer = slice(start + sample.start, start + len(sample.tokens))
            before = slice(answer.start - 1, answer.stop - 1)
            same += int((self._choices[before] == self._tokens[answer]).sum())
            count += len(sample.tokens) - sample.start
        return same / count

    def tap_scales(self) -> Tensor:
        """The root mean square [K*D] of each tapped value over the first samples."""
        numbers = torch.arange(min(SCALE_SAMPLES, len(self.samples)), device=self._tokens.device)
        places, inside = self._places(numbers)
        inside[:, :SINK_TOKENS] = False
        return self._taps[places[inside]].float().square().mean(dim=0).sqrt().clamp(min=1e-6)


def training_batches(
    features: Features, tokens: int, anchors: int, random: Random
) -> Iterator[Batch]:
    """Endless batches of about `tokens` tokens; each epoch is in another order. See `epoch`."""
    while True:
        yield from epoch(features, tokens, anchors, random)


def epoch(features: Features, tokens: int, anchors: int, random: Random) -> Iterator[Batch]:
    """Batches of all samples, with at most `anchors` random anchors in each sample.

    The first anchor is the first token of the answer, where decoding drafts first.
    """
    for numbers in groups(features.samples, tokens, random):
        chosen = []
        for number in numbers:
            positions = features.samples[number].anchors
            others = positions[1:]
            drawn = random.sample(others, min(anchors - 1, len(others)))
            chosen.append([positions[0]] + drawn)
        yield features.batch(numbers, chosen, anchors)


def groups(samples: Sequence[Sample], tokens: int, random: Random) -> list[list[int]]:
    """Groups of numbers of samples with similar lengths, each of about `tokens` tokens.

    Some samples are taken twice to fill the last group of a length.
    """
    by_length: dict[int, list[int]] = defaultdict(list)
    for number, sample in enumerate(samples):
        by_length[rounded(len(sample.tokens))].append(number)
    batches = []
    for length, numbers in sorted(by_length.items()):
        rows = max(1, min(ROWS, tokens // length))
        numbers += [random.choice(numbers) for _ in range(-len(numbers) % rows)]
        random.shuffle(numbers)
        batches += [numbers[first : first + rows] for first in range(0, len(numbers), rows)]
    random.shuffle(batches)
    return batches
