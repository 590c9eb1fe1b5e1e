"""Pipelines: every rank has some of the layers, and taps are gathered from all of them.

In mlx-lm's pipeline the last rank has the first layers and rank 0 the last ones. Each rank receives
hidden states, runs its layers and sends the result on; at the end all get rank 0's. The taps of
other ranks' layers come by `Channel.gather`.
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
    """What the layers of a stage do not support. Then no rank uses it."""

    NO_TREES = 1  # draft trees
    NO_TRIM = 2  # trimming caches to any position
    NO_BATCH = 4  # one forward for several requests


def limits(target: Target) -> Limits:
    """The limits of this rank's layers."""
    shares = target.sharing is not None
    able = [target.supports_trees, target.start().can_trim, shares]
    return Limits(sum(limit for limit, is_able in zip(Limits, able, strict=True) if not is_able))


class PipelineStage(Target):
    """Some layers of a target, with its embedding, norm and head.

    Args:
        num_layers: of the whole model.
    """

    def __init__(self, num_layers: int, *of: Any) -> None:
        super().__init__(*of)
        self.num_layers = num_layers

    def _make_taps(self, tap_layers: Sequence[int]) -> Taps:
        return StageTaps(self, internals.first_layer(self.model), tap_layers)


class LeaderStage(PipelineStage, LeaderTarget):
    """The layers of rank 0.

    Args:
        limit: the limits of all ranks.
    """

    def __init__(self, limit: Limits, *of: Any) -> None:
        super().__init__(*of)
        self.can_trim = not limit & Limits.NO_TRIM
        if limit & Limits.NO_TREES and self.why_no_trees is None:
            self.why_no_trees = "a layer on another machine"


class StageTaps(Taps):
    """The tapped layers of this stage.

    Args:
        target: the stage.
        first: the index of its first layer.
        indices: as for `Taps`.
    """

    def __init__(self, target: Target, first: int, indices: Sequence[int]) -> None:
        end = first + len(target.layers)
        self._here = [first <= max(index, 0) < end for index in indices]
        own = [index for index, here in zip(indices, self._here, strict=True) if here]
        super().__init__(target.layers, [max(index - first, -1) for index in own])
        # Hidden states travel from stage to stage in this type.
        like = target.embed(mx.zeros((1, 1), mx.int32))
        self._width = like.shape[-1]
        self._dtype = like.dtype

    def of(self, runs: Runs, rows: int) -> mx.array:
        """The outputs as of `Taps`, with zeros for the layers of other ranks."""
        outputs = super().of(runs, rows)
        if all(self._here):
            return outputs
        own = iter(mx.split(outputs, sum(self._here), axis=-1) if any(self._here) else ())
        zeros = mx.zeros((1, rows, self._width), self._dtype)
        parts = [next(own) if here else zeros for here in self._here]
        return mx.concatenate([part.astype(self._dtype) for part in parts], axis=-1)
