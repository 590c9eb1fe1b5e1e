"""Estimate the memory and disk that training needs, before it starts."""

from __future__ import annotations

import shutil
import warnings
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

from mlx.utils import tree_flatten

from ..drafter.config import DraftConfig
from ..drafter.dspark import network_for
from ..errors import NotEnoughMemoryError, OutputError
from ..machine.facts import memory_bytes
from ..machine.folders import nearest_there
from ..targets import Target
from .dataset import bucket_length
from .drafter import DrafterSettings
from .features import BOUND

GB = 1e9
WARN_SHARE = 0.8  # of the memory; the system and other programs need the rest
COPIES = 5  # of the drafter in f32: weights, gradient, two of the optimizer, the best so far
STORED = 4  # copies in a checkpoint
ACTIVATIONS = 40  # of width D, kept for the gradient per row and layer


@dataclass(frozen=True)
class Estimate:
    """Estimated bytes, rather too many than too few.

    Attributes:
        target: weights of the target.
        drafter: weights of the drafter, with gradients and optimizer.
        step: activations of a step.
        checkpoint: on disk.
    """

    target: int
    drafter: int
    step: int
    checkpoint: int

    @property
    def memory(self) -> int:
        return self.target + self.drafter + self.step


def estimate(
    target: Target,
    config: DraftConfig,
    settings: DrafterSettings,
    lengths: Iterable[int],
) -> Estimate:
    """Estimate the training of a drafter of this shape.

    Args:
        lengths: tokens of each sample.
    """
    weights = sum(a.nbytes for _, a in tree_flatten(target.model.parameters()))
    drafter = 4 * sum(a.size for _, a in tree_flatten(network_for(config)(config).parameters()))
    step = max(_values(config, settings, length) for length in {*map(bucket_length, lengths)})
    return Estimate(
        target=weights,
        drafter=COPIES * drafter,
        step=2 * (4 * step + BOUND),  # two micro-batches side by side
        checkpoint=2 * STORED * drafter,  # the next one is written before the last one goes
    )


def _values(config: DraftConfig, settings: DrafterSettings, length: int) -> int:
    """Activations of a batch of sequences of this length.

    Short sequences need more: more of them fill a batch, each with all its anchors.
    """
    rows = max(1, settings.tokens // length) * settings.anchors * config.block_size
    kept = ACTIVATIONS * config.hidden_size
    kept += 2 * config.num_attention_heads * (config.block_size + length)
    taps = max(settings.tokens, length) * (len(config.target_layer_ids) + 8) * config.hidden_size
    return rows * config.num_hidden_layers * kept + taps


def check(found: Estimate, folder: Path, tokens: int, anchors: int) -> None:
    """Raise `NotEnoughMemoryError` or `OutputError` with the option to lower.

    Warns if training needs nearly all memory.
    """
    if found.memory > WARN_SHARE * (memory := memory_bytes()):
        parts = {"--tokens": found.step, "--layers": found.drafter, "--target-bits": found.target}
        lower = max(parts, key=lambda name: parts[name])
        advice = {
            "--tokens": f"lower --tokens ({tokens}) or --anchors ({anchors})",
            "--layers": "lower --layers",
            "--target-bits": "load the model in fewer bits (--target-bits 4)",
        }[lower]
        needed = f"{found.memory / GB:.1f} GB of memory, this machine has {memory / GB:.1f} GB"
        if found.memory > memory:
            raise NotEnoughMemoryError(f"Training needs about {needed}: {advice}.")
        said = f"training needs about {needed}: close other programs, or {advice}."
        warnings.warn(f"dflash-mlx: {said}", stacklevel=1)
    folder = nearest_there(folder)
    if found.checkpoint > (free := shutil.disk_usage(folder).free):
        raise OutputError(
            f"{folder}: training needs about {found.checkpoint / GB:.1f} GB of disk, "
            f"{free / GB:.1f} GB are free: make room, or choose another --out."
        )
