"""A model of which every rank has some layers, and all that they tap brought together.

mlx-lm's pipeline, in which the last rank has the first layers and rank 0 the last ones: each rank
receives hidden states, runs its layers and sends them on, and at the end all get rank 0's. What
drafters read of layers that rank 0 lacks comes in one more sum over all ranks, to which each gives
what its own layers put out, and zeros in the others' places. That takes no links but those of the
ring, and adding zeros changes nothing.
"""

from __future__ import annotations

from collections.abc import Sequence
from enum import IntFlag
from typing import Any

import mlx.core as mx

from ..targets import Target, internals
from ..targets.batched import BatchVerifier
from ..targets.overrides import Overrides
from ..targets.taps import Taps
from .sessions import LeadingTarget


class Limits(IntFlag):
    """What a stage's layers do not allow, and so none does; each rank has layers of its own."""

    NO_TREES = 1  # no draft trees
    NO_CUT = 2  # caches have windows or states, which go back to marks only
    NO_FOREST = 4  # no forward of several requests


def limits(target: Target) -> Limits:
    """Of this rank's layers."""
    found = {
        Limits.NO_TREES: not target.supports_trees,
        Limits.NO_CUT: not target.start().can_trim,
        Limits.NO_FOREST: BatchVerifier(target).level is None,
    }
    return Limits(sum(limit for limit, is_so in found.items() if is_so))


class Stage(Target):
    """Some layers of a target, and its embedding, norm and head.

    Args:
        num_layers: of the whole model, of which mlx-lm leaves less to see.
    """

    def __init__(self, num_layers: int, *of: Any) -> None:
        super().__init__(*of)
        self.num_layers = num_layers

    def _recorder(self, layers: Sequence[int], overrides: Overrides) -> Taps:
        first = internals.first_layer(self._backbone)
        return StageTaps(self, first, layers, overrides)


class LeadingStage(Stage, LeadingTarget):
    """The layers of rank 0.

    Args:
        limit: of the layers of all ranks.
    """

    def __init__(self, limit: Limits, *of: Any) -> None:
        super().__init__(*of)
        self.can_trim = not limit & Limits.NO_CUT
        if limit & Limits.NO_TREES and self._why_no_trees is None:
            self._why_no_trees = "a layer on another machine"


class StageTaps(Taps):
    """Records what is here of the layers that are tapped.

    Args:
        target: the stage.
        first: the number of its first layer.
        indices, overrides: as of `Taps`.
    """

    def __init__(
        self, target: Target, first: int, indices: Sequence[int], overrides: Overrides
    ) -> None:
        end = first + len(target.layers)
        self._here = [first <= max(index, 0) < end for index in indices]
        own = [index for index, here in zip(indices, self._here, strict=True) if here]
        super().__init__(target.layers, [max(index - first, -1) for index in own], overrides)
        # What goes from stage to stage, and so what all of them record, is of this type.
        like = target.embed(mx.zeros((1, 1), mx.int32))
        self._width, self._dtype = like.shape[-1], like.dtype

    def take(self, rows: int) -> mx.array:
        """As of `Taps`, with zeros for the layers that are not here."""
        found = super().take(rows)
        if all(self._here):
            return found
        own = iter(mx.split(found, sum(self._here), axis=-1) if any(self._here) else ())
        zeros = mx.zeros((1, rows, self._width), self._dtype)
        parts = [next(own) if here else zeros for here in self._here]
        return mx.concatenate([part.astype(self._dtype) for part in parts], axis=-1)


def carried(group: mx.distributed.Group, answer: Any) -> Any:
    """A forward's logits and taps, of one request or of a list of them, with all layers' taps.

    One sum over all ranks, which comes after everything that the forward itself sends.
    """
    pairs = answer if isinstance(answer, list) else [answer]
    taps = [tap for _, tap in pairs]
    if not any(tap.size for tap in taps):
        return answer
    logits = [x for x, _ in pairs if x is not None]
    own = mx.concatenate([tap.reshape(-1) for tap in taps if tap.size])
    total = mx.distributed.all_sum(mx.depends(own, logits) if logits else own, group=group)
    whole, start = [], 0
    for logit, tap in pairs:
        part = total[start : start + tap.size].reshape(tap.shape) if tap.size else tap
        whole.append((logit, part))
        start += tap.size
    return whole if isinstance(answer, list) else whole[0]
