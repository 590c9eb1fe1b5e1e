"""The target's features that a drafter learns from: tapped layers, choices, likeliest tokens.

Only the `TOP` likeliest tokens of each distribution are kept, because the rest of a vocabulary of
49,152 or 250,000 tokens has almost no probability. At most `BOUND` bytes of logits exist at a time.

Some dimensions of a language model's hidden states are hundreds of times larger than the others
(arXiv 2402.17762), and late layers are larger than early ones. A fusion layer that starts with
weights of one size would see only those. So taps are divided by their scale (`tap_scales`) during
training, and the scales are folded into the fusion weights at the end.
"""

from __future__ import annotations

from collections.abc import Sequence
from hashlib import sha256
from pathlib import Path
from typing import NamedTuple

import mlx.core as mx
import numpy as np
from mlx_lm.models.cache import make_prompt_cache

from ..machine.saving import save_arrays
from ..targets import Target
from .dataset import Sample

# The number of tokens that are kept of each distribution.
TOP = 16
# Bytes of logits that exist at a time.
BOUND = 256 * 2**20
# The number of samples that `tap_scales` reads, and the smallest scale it returns.
SCALE_SAMPLES = 32
MIN_SCALE = 1e-6
# The first tokens of a text do not count for the scales: attention sinks have unusual states.
SINK_TOKENS = 8


class Features(NamedTuple):
    """Features of sequences [N, S]; position s holds the prediction after token s.

    Attributes:
        taps: [N, S, K*D], outputs of the tapped layers.
        choices: [N, S], the target's likeliest next tokens.
        tops: [N, S, T], its T likeliest tokens, unordered.
        shares: [N, S, T], their probabilities at temperature 1, f32.
    """

    taps: mx.array
    choices: mx.array
    tops: mx.array
    shares: mx.array


def features(target: Target, tokens: mx.array, layers: Sequence[int]) -> Features:
    """Compute teacher-forced features of whole sequences [N, S], lazily and without a gradient.

    Long sequences are read in parts, through the target's caches.

    Args:
        target: the target.
        tokens: [N, S].
        layers: the layers to tap.
    """
    rows, length = tokens.shape
    top = min(TOP, target.vocab_size)
    # A logit has 4 bytes.
    part_length = max(1, min(length, BOUND // (4 * target.vocab_size * rows)))
    cache = make_prompt_cache(target.model) if part_length < length else None
    parts: list[tuple[mx.array, ...]] = []
    for start in range(0, length, part_length):
        piece = tokens[:, start : start + part_length]
        if parts:  # otherwise MLX may compute the logits of all parts at the same time
            [piece] = mx.depends([piece], [parts[-1][-1]])
        logits, taps = target.features(piece, layers, cache)
        parts.append((taps, *_head(logits.astype(mx.float32), top)))
    joined = [mx.concatenate(list(arrays), axis=1) for arrays in zip(*parts, strict=True)]
    return Features(*map(mx.stop_gradient, joined))


def _head(logits: mx.array, top: int) -> tuple[mx.array, mx.array, mx.array]:
    """Choices, likeliest tokens and their probabilities."""
    tops = mx.argpartition(-logits, top - 1, axis=-1)[..., :top]
    likely = mx.take_along_axis(logits, tops, axis=-1)
    shares = mx.exp(likely - mx.logsumexp(logits, axis=-1, keepdims=True))
    return logits.argmax(axis=-1), tops, shares


class KeptFeatures:
    """Features of samples, computed once and kept in a folder, one file per sample.

    With a large target, its forward takes most of a step, and every epoch has the same samples.
    Taps are stored in bf16, as most targets compute them.
    """

    def __init__(self, target: Target, layers: Sequence[int], folder: Path) -> None:
        self._target = target
        self._layers = layers
        self._folder = folder
        folder.mkdir(parents=True, exist_ok=True)

    def __call__(self, samples: Sequence[Sample], length: int) -> Features:
        """Features of samples [N, length], zeros after a sample's end. Raises `OutputError`."""
        loaded = [self._load(sample) for sample in samples]
        return Features(*(_padded(arrays, length) for arrays in zip(*loaded, strict=True)))

    def _load(self, sample: Sample) -> Features:
        path = self._path(sample)
        if not path.exists():
            new = features(self._target, mx.array([sample.tokens]), self._layers)
            self.save(sample, Features(*(array[0] for array in new)))
        return Features(**mx.load(str(path)))  # type: ignore[arg-type]

    def save(self, sample: Sample, sample_features: Features) -> None:
        """Keep the features [S, ...] of a sample. Raises `OutputError`."""
        taps = sample_features.taps.astype(mx.bfloat16)
        shares = sample_features.shares.astype(mx.float16)
        stored = sample_features._replace(taps=taps, shares=shares)
        save_arrays(self._path(sample), stored._asdict(), {})

    def _path(self, sample: Sample) -> Path:
        key = np.array([*self._layers, -1, *sample.tokens], np.int32)
        return self._folder / f"{sha256(key.tobytes()).hexdigest()[:32]}.safetensors"


def _padded(arrays: Sequence[mx.array], length: int) -> mx.array:
    """Arrays [S, ...] of different lengths as one [N, length, ...]."""
    rest = [(0, 0)] * (arrays[0].ndim - 1)
    return mx.stack([mx.pad(array, [(0, length - len(array)), *rest]) for array in arrays])


def tap_scales(
    target: Target,
    layers: Sequence[int],
    samples: Sequence[Sample],
    kept: KeptFeatures | None = None,
) -> mx.array:
    """The root mean square [K*D] of each tapped value over some samples."""
    sums = mx.zeros(())
    count = 0
    for sample in samples[:SCALE_SAMPLES]:
        tokens = mx.array([sample.tokens])
        taps = (kept([sample], tokens.size) if kept else features(target, tokens, layers)).taps
        start = min(SINK_TOKENS, len(sample.tokens) - 1)
        taps = taps[0, start:].astype(mx.float32)
        sums = sums + mx.square(taps).sum(axis=0)
        count = count + len(taps)
        mx.eval(sums)
    scales = mx.maximum(mx.sqrt(sums / count), MIN_SCALE)
    mx.eval(scales)
    return scales
