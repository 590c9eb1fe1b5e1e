"""Many requests' rows in one forward of the target: a forest of drafts.

All rows lie side by side in one sequence, as many of each request as it proposed. What takes rows
one by one (embedding, projections, MLPs, experts, norms, the head) reads its weights once for all
of them. What looks at other rows, attention and recurrence, runs for each request on the request's
own cache, which is the one that it has alone. So rollback, marks, quantized keys and trees stay
what they are, widths and commits are each request's own, and nothing is copied or padded when
requests come and go. `forest_layers` says how.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import mlx.core as mx

from ..proposal import Proposal
from .forest_layers import Layers
from .forest_rows import Rows
from .overrides import Overrides
from .segment import Segment
from .taps import Taps
from .target import Target, TargetSession

Verified = tuple[mx.array, mx.array]  # logits [N, V], taps [1, N, K*D]
# What a model raises that wants more of its cache, or of rows, than there is of many requests'.
UNFIT = (AttributeError, IndexError, TypeError, ValueError)


class BatchVerifier:
    """Verifies what many requests of one target propose.

    Attributes:
        level: how far rows stay together. 1: all the way, but for what each looks at. 0: attention
            or recurrence is called once for each request. None: the model's forward takes one
            request's rows only, so there is one for each.
    """

    def __init__(self, target: Target) -> None:
        self._target = target
        self._tapped: dict[tuple[int, ...], tuple[Overrides, Taps]] = {}
        self._layers = next(filter(None, map(self._try, (1, 0))), None)
        self.level = None if self._layers is None else self._layers.level

    def verify(
        self, sessions: Sequence[TargetSession], proposals: Sequence[Proposal]
    ) -> list[Verified]:
        """One forward over all proposals. Every session is then as after its own `verify`.

        Args:
            sessions: of this target, each of them once.
            proposals: what each of them verifies; chains and trees, of any numbers of rows.

        Returns:
            Of each session the logits [N, V] after its N rows and their taps [1, N, K*D]. Lazy:
            nothing is evaluated yet.

        Raises as `TargetSession.verify` does, before anything has changed. Exact verification
        takes `Wiring.widest` rows at once: more of them, of several requests, are more forwards.
        """
        verified: list[Verified] = self._target.verify_batch(self._forward, sessions, proposals)
        return verified

    def _forward(
        self, sessions: Sequence[TargetSession], proposals: Sequence[Proposal]
    ) -> list[Verified]:
        segments = [one.segment(of) for one, of in zip(sessions, proposals, strict=True)]
        results: list[Verified] = []
        for first, end in self._forwards([len(proposal) for proposal in proposals]):
            if self._layers is None or end == first + 1:
                results.append(sessions[first].verify(proposals[first]))
            else:
                results += self._verify(self._layers, sessions[first:end], segments[first:end])
        return results

    def _forwards(self, widths: Sequence[int]) -> Iterator[tuple[int, int]]:
        """The requests whose rows go together: from the first to before the end."""
        wiring, first = self._target.wiring, 0
        most = None if wiring is None else wiring.widest
        for end in range(1, len(widths) + 1):
            alone = self.level is None or end == len(widths)
            if alone or (most is not None and sum(widths[first : end + 1]) > most):
                yield first, end
                first = end

    def _verify(
        self, layers: Layers, sessions: Sequence[TargetSession], segments: Sequence[Segment]
    ) -> list[Verified]:
        """One forward over several segments."""
        for session, segment in zip(sessions, segments, strict=True):
            session.begin(segment.proposal)
        wanted = [session.tap_layers for session in sessions]
        tapped = tuple(dict.fromkeys(layer for each in wanted for layer in each))
        rows, (overrides, recorder) = Rows(segments), self._taps(tapped)
        logits = layers.forward(rows, overrides)
        taps = recorder.take(len(rows))
        parts = zip(rows.split(logits, 0), rows.split(taps), wanted, strict=True)
        return [(part, _columns(tap, tapped, each)) for part, tap, each in parts]

    def _taps(self, tapped: tuple[int, ...]) -> tuple[Overrides, Taps]:
        """What records the outputs of these layers."""
        if tapped not in self._tapped:
            with self._target.forward_lock:
                overrides = self._target.overrides()
                self._tapped[tapped] = overrides, self._target.tap(tapped, overrides)
        return self._tapped[tapped]

    def _try(self, level: int) -> Layers | None:
        """The layers at a level; None if the model's forward cannot be built with them.

        It is built over two new requests' rows, and never computed.
        """
        sessions = self._target.start(), self._target.start()
        segments = [sessions[0].segment(Proposal([0, 0])), sessions[1].segment(Proposal([0]))]
        try:
            layers = Layers(self._target, segments[0].rollbacks, level)
            self._verify(layers, sessions, segments)
        except UNFIT:
            return None
        return layers


def _columns(taps: mx.array, tapped: Sequence[int], wanted: Sequence[int]) -> mx.array:
    """Of taps [1, N, K*D] of the tapped layers those of the wanted ones, in their order."""
    if tuple(tapped) == tuple(wanted) or not tapped:
        return taps
    if not wanted:
        return taps[:, :, :0]
    parts = mx.split(taps, len(tapped), axis=-1)
    return mx.concatenate([parts[tapped.index(layer)] for layer in wanted], axis=-1)
