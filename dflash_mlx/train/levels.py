"""How large the tapped values are, and the measure in which a drafter learns to read them.

Of a language model's hidden states some dimensions are hundreds of times as large as the others
(arXiv 2402.17762), and late layers are larger than early ones. A fusion that begins with weights of
one size sees those alone, and learns to see the others slowly. So it learns weights of values that
are all about 1; with the levels divided out again they are the weights of the values themselves.
"""

from __future__ import annotations

from collections.abc import Sequence

import mlx.core as mx

from ..targets import Target
from .data import Sample
from .features import features
from .store import Store

READ = 32  # samples
FIRST = 8  # tokens left out, where attention parks: their states are as nowhere else
LEAST = 1e-6


def tap_levels(
    target: Target, layers: Sequence[int], samples: Sequence[Sample], store: Store | None = None
) -> mx.array:
    """The root mean square [K*D] of each tapped value over some samples.

    Args:
        layers: the layers that are tapped.
        store: where the samples' features lie; None computes them.
    """
    sums, count = mx.zeros(()), 0
    for sample in samples[:READ]:
        if store is None:
            taps = features(target, mx.array([sample.tokens]), layers).taps
        else:
            taps = store.batch([sample]).taps
        start = min(FIRST, len(sample.tokens) - 1)
        taps = taps[0, start : len(sample.tokens)].astype(mx.float32)
        sums, count = sums + mx.square(taps).sum(axis=0), count + len(taps)
        mx.eval(sums)
    levels = mx.maximum(mx.sqrt(sums / count), LEAST)
    mx.eval(levels)
    return levels
