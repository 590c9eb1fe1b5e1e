"""How many tokens a step of greedy decoding yields, computed from finished greedy answers.

What a block drafts depends only on the text up to its anchor, and how much of it is kept on the
text after it. So blocks at all positions of an answer are drafted together, and counting then goes
from block to block as decoding would.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from .drafter import Drafter
from .features import Features, Sample
from .stored import Weights

ROWS = 16  # answers at a time


@torch.no_grad()
def acceptance(drafter: Drafter, weights: Weights, features: Features) -> tuple[int, int]:
    """How many tokens all answers have, and how many steps with whole blocks write them.

    The first token of an answer comes from the prompt's own forward, and does not count.
    """
    tokens = 0
    steps = 0
    samples = features.samples
    for first in range(0, len(samples), ROWS):
        numbers = list(range(first, min(first + ROWS, len(samples))))
        anchors = [list(samples[number].anchors) for number in numbers]
        batch = features.batch(numbers, anchors, max(map(len, anchors)))
        accepted = drafter(weights, batch).accepted().tolist()
        for number, counts in zip(numbers, accepted, strict=True):
            tokens += len(samples[number].anchors)
            steps += walk(samples[number], counts)
    return tokens, steps


def walk(sample: Sample, accepted: Sequence[int]) -> int:
    """The steps of an answer. Each keeps what was accepted after its anchor, and one more token.

    Args:
        sample: prompt and answer.
        accepted: the tokens accepted after each of `sample.anchors`.
    """
    steps = 0
    place = 0
    while place < len(sample.anchors):
        place += accepted[place] + 1
        steps += 1
    return steps
