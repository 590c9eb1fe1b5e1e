"""The target's features that a drafter learns from: tapped layers, choices, likeliest tokens.

Only the `TOP` likeliest tokens of each distribution are kept: the rest of a vocabulary of 49,152 or
250,000 has almost no probability. Logits exist only for as many rows as `BOUND` bytes hold.

Features can be stored on disk, so that the target reads the data once for all epochs.

Some dimensions of a language model's hidden states are hundreds of times larger than the others
(arXiv 2402.17762), and late layers are larger than early ones. A fusion layer that starts with
weights of one size would see only those. So taps are divided by their scale (`tap_scales`) during
training, and the scales are folded into the fusion weights at the end.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from random import Random
from typing import Any, NamedTuple

import mlx.core as mx
from mlx_lm.models.cache import make_prompt_cache

from ..errors import WeightsError
from ..machine.saving import save_arrays
from ..targets import Target
from .dataset import Arrays, Sample, bucket_length

TOP = 16  # tokens of each distribution
BOUND = 256 * 2**20  # bytes of logits that exist at once


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


def features(
    target: Target, tokens: mx.array, layers: Sequence[int], top: int = TOP, bound: int = BOUND
) -> Features:
    """Teacher-forced features of whole sequences [N, S], lazy and without a gradient.

    Args:
        layers: the layers to tap.
        top: T.
        bound: bytes of float32 logits that exist at once; longer sequences are read in parts,
            through the target's caches.
    """
    rows, length = tokens.shape
    top = min(top, target.vocab_size)
    part = max(1, min(length, bound // (4 * target.vocab_size * rows)))
    overrides = target.overrides()
    taps = target.tap(layers, overrides)
    cache = make_prompt_cache(target.model) if part < length else None
    found: list[tuple[mx.array, ...]] = []
    with overrides.installed():
        for start in range(0, length, part):
            piece = tokens[:, start : start + part]
            if found:  # keeps MLX from computing the logits of all parts at once
                [piece] = mx.depends([piece], [found[-1][-1]])
            logits = target.model(piece, cache=cache) if cache else target.model(piece)
            found.append((taps.take(piece.shape[1]), *_head(logits.astype(mx.float32), top)))
    return Features(
        *(mx.stop_gradient(mx.concatenate([*parts], axis=1)) for parts in zip(*found, strict=True))
    )


def _head(logits: mx.array, top: int) -> tuple[mx.array, mx.array, mx.array]:
    """Choices, likeliest tokens and their probabilities."""
    tops = mx.argpartition(-logits, top - 1, axis=-1)[..., :top]
    likely = mx.take_along_axis(logits, tops, axis=-1)
    shares = mx.exp(likely - mx.logsumexp(logits, axis=-1, keepdims=True))
    return logits.argmax(axis=-1), tops, shares


Collate = Callable[[list[Sample], Random], Arrays]
SAMPLES_PER_FILE = 32


def bytes_of_token(taps: int, hidden: int, top: int = TOP) -> int:
    """Bytes on disk per token: taps in bf16, ids and probabilities in 32 bits."""
    return 2 * taps * hidden + 4 + 8 * top


@dataclass(frozen=True)
class FeatureStore:
    """Features of samples on disk.

    Attributes:
        folder: holds the files.
        places: sample -> (number of its file, index in the file).
    """

    folder: Path
    places: dict[Sample, tuple[int, int]]

    def batch(self, samples: Sequence[Sample]) -> Features:
        """Features of a padded batch, equal to those of `features`."""
        length = bucket_length(max(len(sample.tokens) for sample in samples))
        files: dict[int, dict[str, mx.array]] = {}
        rows = []
        for sample in samples:
            number, index = self.places[sample]
            if number not in files:
                files[number] = _load(_file(self.folder, number))
            rows.append([_padded(files[number][f"{index}.{name}"], length) for name in _NAMES])
        return Features(*(mx.stack([*parts]) for parts in zip(*rows, strict=True)))


@dataclass(frozen=True)
class WithFeatures:
    """Adds stored features to the batches of another `Collate`."""

    collate: Collate
    store: FeatureStore

    def __call__(self, samples: list[Sample], rng: Random) -> Arrays:
        """The arrays of `collate`, followed by those of `Features`."""
        return (*self.collate(samples, rng), *self.store.batch(samples))


_NAMES = Features._fields


def build_feature_store(
    target: Target,
    samples: Sequence[Sample],
    layers: Sequence[int],
    folder: Path,
    progress: Callable[[int, int], None] | None = None,
) -> FeatureStore:
    """Compute the features of samples and store them; existing files are reused.

    Args:
        layers: the tapped layers of the target.
        progress: called with the number of finished samples and of all samples.

    Raises `WeightsError` if the folder has features of other samples or layers, `OutputError`.
    """
    folder.mkdir(parents=True, exist_ok=True)
    places: dict[Sample, tuple[int, int]] = {}
    for start in range(0, len(samples), SAMPLES_PER_FILE):
        number, part = start // SAMPLES_PER_FILE, samples[start : start + SAMPLES_PER_FILE]
        file, name = _file(folder, number), _fingerprint(part, layers)
        if not file.exists():
            _write(target, part, layers, file, name)
        elif _metadata(file).get("of") != name:
            raise WeightsError(f"{folder} has features of other samples: delete it.")
        places |= {sample: (number, index) for index, sample in enumerate(part)}
        if progress is not None:
            progress(start + len(part), len(samples))
    return FeatureStore(folder, places)


def _write(
    target: Target, samples: Sequence[Sample], layers: Sequence[int], file: Path, name: str
) -> None:
    arrays = {}
    for index, sample in enumerate(samples):
        found = features(target, mx.array([sample.tokens]), layers)
        taps = found.taps.astype(mx.bfloat16)
        for field, array in zip(_NAMES, (taps, *found[1:]), strict=True):
            arrays[f"{index}.{field}"] = array[0]
        mx.eval([arrays[f"{index}.{field}"] for field in _NAMES])
    save_arrays(file, arrays, {"of": name})


def _fingerprint(samples: Sequence[Sample], layers: Sequence[int]) -> str:
    content = json.dumps([list(layers), [sample.tokens for sample in samples]])
    return hashlib.sha256(content.encode()).hexdigest()


def _file(folder: Path, number: int) -> Path:
    return folder / f"features-{number:05}.safetensors"


def _load(file: Path) -> dict[str, mx.array]:
    """The arrays of a file, read lazily."""
    arrays: Any = mx.load(str(file))
    return arrays


def _metadata(file: Path) -> dict[str, str]:
    loaded: Any = mx.load(str(file), return_metadata=True)
    return loaded[1]


def _padded(array: mx.array, length: int) -> mx.array:
    rest = [(0, 0)] * (array.ndim - 1)
    return mx.pad(array, [(0, length - array.shape[0]), *rest])


SCALE_SAMPLES = 32
FIRST = 8  # tokens left out: attention sinks, whose states are unlike all others
MIN_SCALE = 1e-6


def tap_scales(
    target: Target,
    layers: Sequence[int],
    samples: Sequence[Sample],
    store: FeatureStore | None = None,
) -> mx.array:
    """The root mean square [K*D] of each tapped value over some samples.

    Args:
        layers: the tapped layers.
        store: stored features of the samples; None computes them.
    """
    sums, count = mx.zeros(()), 0
    for sample in samples[:SCALE_SAMPLES]:
        if store is None:
            taps = features(target, mx.array([sample.tokens]), layers).taps
        else:
            taps = store.batch([sample]).taps
        start = min(FIRST, len(sample.tokens) - 1)
        taps = taps[0, start : len(sample.tokens)].astype(mx.float32)
        sums, count = sums + mx.square(taps).sum(axis=0), count + len(taps)
        mx.eval(sums)
    scales = mx.maximum(mx.sqrt(sums / count), MIN_SCALE)
    mx.eval(scales)
    return scales
