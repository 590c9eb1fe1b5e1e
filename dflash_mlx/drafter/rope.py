"""Rotary positions of a drafter, as the library it was trained in computes them.

mlx-lm's own rope modules serve every kind but YaRN: its version has no `truncate` and no
`attention_factor`, which published drafters set, and would leave them out without a word.
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
    """YaRN (arXiv 2309.00071): slow frequencies stretched by `factor`, fast ones left alone.

    Queries and keys also grow a little, which sharpens the attention over the longer context.
    """

    def __init__(self, config: DraftConfig, scaling: Mapping[str, Any]) -> None:
        super().__init__()
        self.dims, self.traditional = config.head_dim, not config.rope_neox
        base, factor = config.rope_theta, scaling["factor"]
        periods = base ** (mx.arange(0, self.dims, 2, dtype=mx.float32) / self.dims)
        kept = _kept(self.dims, base, scaling)
        self._freqs = periods / (kept + (1 - kept) / factor)
        self.magnitude = config.rope_amplitude

    def __call__(self, x: mx.array, offset: int | mx.array = 0) -> mx.array:
        """Rotate x [N, H, L, dims], whose first row is at `offset` (one for all, or [N])."""
        return mx.fast.rope(
            x * self.magnitude,
            self.dims,
            traditional=self.traditional,
            base=None,
            scale=1.0,
            offset=offset,
            freqs=self._freqs,
        )


def _kept(dims: int, base: float, scaling: Mapping[str, Any]) -> mx.array:
    """How much of each frequency stays as it is, [dims / 2] from 1 (fast) to 0 (slow)."""
    original = scaling["original_max_position_embeddings"]

    def dimension(rotations: float) -> float:
        """The dimension that turns this often within the original context."""
        return dims * math.log(original / (rotations * 2 * math.pi)) / (2 * math.log(base))

    low, high = dimension(scaling.get("beta_fast", 32)), dimension(scaling.get("beta_slow", 1))
    if scaling.get("truncate", True):
        low, high = math.floor(low), math.ceil(high)
    low, high = max(low, 0), min(high, dims - 1)
    if low == high:
        high += 0.001  # a step instead of a ramp
    ramp = (mx.arange(dims // 2, dtype=mx.float32) - low) / (high - low)
    return 1 - mx.clip(ramp, 0, 1)


def make_rope(config: DraftConfig) -> nn.Module:
    """The module that turns [N, H, L, head_dim] to its positions: rope(x, offset=...).

    Values are turned in pairs (i, i + head_dim / 2), or (2i, 2i + 1) where the config says so.
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
