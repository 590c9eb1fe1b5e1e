"""Estimate the memory that training needs, before it starts."""

from __future__ import annotations

from collections.abc import Iterable

from mlx.utils import tree_flatten

from ..drafter.config import DraftConfig
from ..drafter.networks import network_for
from ..errors import NotEnoughMemoryError
from ..kernels.shapes import weight_bytes
from ..machine.facts import GB, usable_bytes
from ..targets import Target
from .dataset import bucket_length
from .drafter import DrafterSettings
from .features import BOUND

# Copies of the drafter in f32: weights, gradient, two of the optimizer, and the best so far.
COPIES = 5
# Activations of the hidden size that the gradient needs, per row and layer.
ACTIVATIONS = 40


def memory_needed(
    target: Target,
    config: DraftConfig,
    settings: DrafterSettings,
    lengths: Iterable[int],
) -> int:
    """Estimate the bytes that training a drafter of this shape needs. Errs on the high side.

    Args:
        target: the target.
        config: the shape of the drafter.
        settings: the settings of the training.
        lengths: the number of tokens in each sample.
    """
    weights = weight_bytes(target.model)
    parameters = tree_flatten(network_for(config)(config).parameters())
    drafter = 4 * sum(array.size for _, array in parameters)
    buckets = {bucket_length(length, settings.tokens) for length in lengths}
    step = max(_values(config, settings, length) for length in buckets)
    # Two micro-batches run at the same time.
    return weights + COPIES * drafter + 2 * (4 * step + BOUND)


def _values(config: DraftConfig, settings: DrafterSettings, length: int) -> int:
    """The number of activations in a batch of sequences of this length.

    Short sequences need more memory: more of them fit into a batch, each with all its anchors.
    """
    rows = max(1, settings.tokens // length) * settings.anchors * config.block_size
    kept = ACTIVATIONS * config.hidden_size
    # Scores and weights of attention over the context and the block.
    kept += 2 * config.num_attention_heads * (config.block_size + length)
    taps = max(settings.tokens, length) * (len(config.target_layer_ids) + 8) * config.hidden_size
    return rows * config.num_hidden_layers * kept + taps


def check_memory(needed: int, settings: DrafterSettings) -> None:
    """Raise `NotEnoughMemoryError` if training needs more than the usable memory."""
    usable = usable_bytes()
    if needed > usable:
        raise NotEnoughMemoryError(
            f"Training needs about {needed / GB:.1f} GB of memory, of which this machine can use "
            f"{usable / GB:.1f} GB: lower --tokens ({settings.tokens}), --anchors "
            f"({settings.anchors}) or --layers, or load the model in fewer bits (--target-bits 4)."
        )
