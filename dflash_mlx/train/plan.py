"""What training takes, estimated before anything starts, with what to lower if it is too much."""

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
from .batches import bucket_length
from .drafter import DrafterSettings
from .features import BOUND
from .store import bytes_of_token

GB = 1e9
NEARLY = 0.8  # of the memory: the system and other programs have the rest
COPIES = 5  # of the drafter in f32: itself, its gradient, two of the optimizer, the best so far
STORED = 4  # of them in a checkpoint
ROWS_HELD = 40  # activations of width D that each row of a block keeps for the gradient, a layer


@dataclass(frozen=True)
class Estimate:
    """Bytes, each rounded up rather than down.

    Attributes:
        target: the target's weights.
        drafter: the drafter's, with gradients and the optimizer.
        step: activations of a step.
        checkpoint: on disk.
        features: on disk, if they are cached.
    """

    target: int
    drafter: int
    step: int
    checkpoint: int
    features: int

    @property
    def memory(self) -> int:
        return self.target + self.drafter + self.step

    @property
    def disk(self) -> int:
        return self.checkpoint + self.features


def estimate(
    target: Target,
    config: DraftConfig,
    settings: DrafterSettings,
    lengths: Iterable[int],
    cached_tokens: int = 0,
) -> Estimate:
    """What training a drafter of this shape takes.

    Args:
        lengths: tokens of each sample.
        cached_tokens: tokens of the data whose features are kept on disk.
    """
    weights = sum(a.nbytes for _, a in tree_flatten(target.model.parameters()))
    drafter = 4 * sum(a.size for _, a in tree_flatten(network_for(config)(config).parameters()))
    width, taps = config.hidden_size, len(config.target_layer_ids)
    step = max(_values(config, settings, length) for length in {*map(bucket_length, lengths)})
    return Estimate(
        target=weights,
        drafter=COPIES * drafter,
        step=2 * (4 * step + BOUND),  # two micro-batches side by side
        checkpoint=2 * STORED * drafter,  # the next one is written before the last one goes
        features=cached_tokens * bytes_of_token(taps, width),
    )


def _values(config: DraftConfig, settings: DrafterSettings, length: int) -> int:
    """Values that the forward of a batch keeps, of sequences of this length.

    The shorter they are, the more of them fill a batch, and each has all its anchors.
    """
    rows = max(1, settings.tokens // length) * settings.anchors * config.block_size
    kept = ROWS_HELD * config.hidden_size
    kept += 2 * config.num_attention_heads * (config.block_size + length)
    taps = max(settings.tokens, length) * (len(config.target_layer_ids) + 8) * config.hidden_size
    return rows * config.num_hidden_layers * kept + taps


def check(found: Estimate, folder: Path, tokens: int, anchors: int) -> None:
    """Raise `NotEnoughMemoryError` or `OutputError`, saying what to lower, before work begins.

    Memory that is nearly all taken only warns.
    """
    if found.memory > NEARLY * (memory := memory_bytes()):
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
    if found.disk > (free := shutil.disk_usage(folder).free):
        cached = found.features > found.checkpoint
        advice = "leave out --cache-features" if cached else "make room, or choose another --out"
        raise OutputError(
            f"{folder}: training needs about {found.disk / GB:.1f} GB of disk, "
            f"{free / GB:.1f} GB are free: {advice}."
        )
