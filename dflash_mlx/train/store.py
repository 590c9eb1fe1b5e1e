"""Features on disk: the target reads a fixed set of data once, however many epochs there are."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from random import Random
from typing import Any

import mlx.core as mx

from ..errors import WeightsError
from ..machine.saving import save_arrays
from ..targets import Target
from .batches import Arrays, bucket_length
from .data import Sample
from .features import TOP, Features, features

Collate = Callable[[list[Sample], Random], Arrays]
SAMPLES_OF_A_FILE = 32


def bytes_of_token(taps: int, hidden: int, top: int = TOP) -> int:
    """What a token's features take on disk: taps in bf16, ids and probabilities in f32."""
    return 2 * taps * hidden + 4 + 8 * top


@dataclass(frozen=True)
class Store:
    """Where the features of samples lie.

    Attributes:
        folder: of the files.
        places: sample -> (file's number, its index in it).
    """

    folder: Path
    places: dict[Sample, tuple[int, int]]

    def batch(self, samples: Sequence[Sample]) -> Features:
        """Features of a padded batch, as `features` would give them for its tokens."""
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
class Stored:
    """Makes the batches of another `Collate`, with their features from a store."""

    collate: Collate
    store: Store

    def __call__(self, samples: list[Sample], rng: Random) -> Arrays:
        """The arrays of `collate`, then those of `Features`."""
        return (*self.collate(samples, rng), *self.store.batch(samples))


_NAMES = Features._fields


def build_store(
    target: Target,
    samples: Sequence[Sample],
    layers: Sequence[int],
    folder: Path,
    progress: Callable[[int, int], None] | None = None,
) -> Store:
    """Compute the features of samples, or find them in the folder; files that are there stay.

    Args:
        layers: the target's layers that are tapped.
        progress: called with the samples that are done, and all of them.

    Raises `WeightsError` for a folder of other samples or layers, `OutputError`.
    """
    folder.mkdir(parents=True, exist_ok=True)
    places: dict[Sample, tuple[int, int]] = {}
    for start in range(0, len(samples), SAMPLES_OF_A_FILE):
        number, part = start // SAMPLES_OF_A_FILE, samples[start : start + SAMPLES_OF_A_FILE]
        file, name = _file(folder, number), _fingerprint(part, layers)
        if not file.exists():
            _write(target, part, layers, file, name)
        elif _metadata(file).get("of") != name:
            raise WeightsError(f"{folder} has features of other samples: delete it.")
        places |= {sample: (number, index) for index, sample in enumerate(part)}
        if progress is not None:
            progress(start + len(part), len(samples))
    return Store(folder, places)


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
    """The arrays of a file, each read when it is needed."""
    arrays: Any = mx.load(str(file))
    return arrays


def _metadata(file: Path) -> dict[str, str]:
    loaded: Any = mx.load(str(file), return_metadata=True)
    return loaded[1]


def _padded(array: mx.array, length: int) -> mx.array:
    rest = [(0, 0)] * (array.ndim - 1)
    return mx.pad(array, [(0, length - array.shape[0]), *rest])
