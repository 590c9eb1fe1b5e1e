"""Rotary positions of a drafter, as Transformers computes them.

mlx-lm's modules are used for every kind but YaRN, because theirs has no `truncate` and no
`attention_factor`, which published drafters set.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

import mlx.core as mx
import mlx.nn as nn
from mlx_lm.models.rope_utils import initialize_rope

from .config import DraftConfig


class YarnRope(nn.Module):
    """YaRN (arXiv 2309.00071): stretches slow frequencies by `factor` and keeps fast ones.

    It also scales queries and keys by an amplitude.
    """

    def __init__(self, config: DraftConfig, scaling: Mapping[str, Any]) -> None:
        super().__init__()
        self.dims = config.head_dim
        self.traditional = not config.rope_neox
        self.amplitude = config.rope_amplitude
        kept = _kept_frequencies(self.dims, config.rope_theta, scaling)
        periods = config.rope_theta ** (mx.arange(0, self.dims, 2, dtype=mx.float32) / self.dims)
        self._freqs = periods / (kept + (1 - kept) / scaling["factor"])

    def __call__(self, x: mx.array, offset: int | mx.array = 0) -> mx.array:
        """Rotate x [N, H, L, dims], whose first row is at `offset` (one for all, or [N])."""
        return mx.fast.rope(
            x * self.amplitude,
            self.dims,
            traditional=self.traditional,
            base=None,
            scale=1.0,
            offset=offset,
            freqs=self._freqs,
        )


def _kept_frequencies(dims: int, base: float, scaling: Mapping[str, Any]) -> mx.array:
    """How much of each frequency is kept, [dims / 2] from 1 (fast) to 0 (slow)."""
    # The dimensions that turn beta_fast and beta_slow times within the original context.
    ends = []
    for rotations in (scaling.get("beta_fast", 32), scaling.get("beta_slow", 1)):
        length = scaling["original_max_position_embeddings"] / (rotations * 2 * math.pi)
        ends.append(dims * math.log(length) / (2 * math.log(base)))
    low, high = ends
    if scaling.get("truncate", True):
        low = math.floor(low)
        high = math.ceil(high)
    low = max(low, 0)
    high = min(high, dims - 1)
    width = high - low or 0.001  # a step instead of a ramp
    return 1 - mx.clip((mx.arange(dims // 2, dtype=mx.float32) - low) / width, 0, 1)


def make_rope(config: DraftConfig) -> nn.Module:
    """The module that rotates [N, H, L, head_dim] to its positions: rope(x, offset=...).

    Values turn in pairs (i, i + head_dim / 2), or (2i, 2i + 1) if not `rope_neox`.
    """
    scaling = config.rope_scaling
    if scaling is not None and scaling["rope_type"] == "yarn":
        return YarnRope(config, scaling)
    return initialize_rope(
        config.head_dim,
        base=config.rope_theta,
        traditional=not config.rope_neox,
        scaling_config=scaling,
        max_position_embeddings=config.max_position_embeddings,
    )
