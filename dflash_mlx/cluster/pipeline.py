"""Pipelines: every rank has some of the layers, and taps are gathered from all ranks.

In mlx-lm's pipeline the last rank has the first layers, and rank 0 has the last ones. Each rank
receives hidden states, runs its layers and sends the result on; at the end, rank 0 sends its result
to all. `Channel.gather` brings the taps of the other ranks' layers.
"""

from __future__ import annotations

from collections.abc import Sequence
from enum import IntFlag
from typing import Any

import mlx.core as mx

from ..targets import Target, internals
from ..targets.taps import Runs, Taps
from .leader_target import LeaderTarget


class Limits(IntFlag):
    """What the layers of a stage do not support. If one rank has a limit, all ranks keep to it."""

    NO_TREES = 1  # draft trees
    NO_TRIM = 2  # trimming caches to any position
    NO_BATCH = 4  # one forward for several requests


def limits(target: Target) -> Limits:
    """The limits of this rank's layers."""
    result = Limits(0)
    if not target.supports_trees:
        result |= Limits.NO_TREES
    if not target.start().can_trim:
        result |= Limits.NO_TRIM
    if target.sharing is None:
        result |= Limits.NO_BATCH
    return result


class PipelineStage(Target):
    """Some layers of a target, with its embedding, norm and head.

    Args:
        num_layers: the number of layers in the whole model.
        target_arguments: the arguments of the next class, `Target` or `LeaderTarget`.
    """

    def __init__(self, num_layers: int, *target_arguments: Any) -> None:
        super().__init__(*target_arguments)
        self.num_layers = num_layers

    def _make_taps(self, tap_layers: Sequence[int]) -> Taps:
        return StageTaps(self, internals.first_layer(self.model), tap_layers)


class LeaderStage(PipelineStage, LeaderTarget):
    """The layers of rank 0.

    Args:
        limit: the limits of all ranks together.
        stage_arguments: the arguments of `PipelineStage`.
    """

    def __init__(self, limit: Limits, *stage_arguments: Any) -> None:
        super().__init__(*stage_arguments)
        self.can_trim = not limit & Limits.NO_TRIM
        if limit & Limits.NO_TREES and self.why_no_trees is None:
            self.why_no_trees = "a layer on another machine"


class StageTaps(Taps):
    """The tapped layers of this stage.

    Args:
        target: the stage.
        first: the index of its first layer.
        indices: the tapped layers of the whole model; -1 is the embedding.
    """

    def __init__(self, target: Target, first: int, indices: Sequence[int]) -> None:
        end = first + len(target.layers)
        self._here = []  # whether each tapped layer is in this stage
        local_indices = []
        for index in indices:
            # The embedding, -1, is tapped by the stage with the first layer.
            is_here = first <= max(index, 0) < end
            self._here.append(is_here)
            if is_here:
                local_indices.append(max(index - first, -1))
        super().__init__(target.layers, local_indices)
        # Hidden states travel from stage to stage in this type.
        like = target.embed(mx.zeros((1, 1), mx.int32))
        self._width = like.shape[-1]
        self._dtype = like.dtype

    def of(self, runs: Runs, rows: int) -> mx.array:
        """The outputs that `Taps.of` returns, with zeros for the layers of other ranks."""
        outputs = super().of(runs, rows)
        if all(self._here):
            return outputs
        zeros = mx.zeros((1, rows, self._width), self._dtype)
        parts = []
        start = 0
        for is_here in self._here:
            if is_here:
                output = outputs[..., start : start + self._width]
                parts.append(output.astype(self._dtype))
                start += self._width
            else:
                parts.append(zeros)
        return mx.concatenate(parts, axis=-1)
