"""The drafter of plain decoding: nothing is drafted, so the baseline runs through the same loop."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from ..proposal import Proposal

if TYPE_CHECKING:
    import mlx.core as mx

    from ..sampling import Sampler
    from ..targets import Target
    from ..targets.caches import Arrays


class NoDrafter:
    """Proposes the anchor alone. It is its own session: there is nothing to remember but where."""

    tap_layers = ()

    def __init__(self) -> None:
        self.position = 0

    def start(self, target: Target, sampler: Sampler) -> NoDrafter:
        """A session of one request."""
        return NoDrafter()

    def extend(self, taps: mx.array) -> None:
        """Take in that so many tokens were committed, [1, S, 0]."""
        self.position += taps.shape[1]

    def extend_by(self, taps: mx.array, kept: Sequence[int]) -> None:
        """Take in that so many tokens were committed."""
        self.position += len(kept)

    def propose(self, anchor: int, width: int) -> Proposal:
        """The anchor."""
        return Proposal([anchor])

    can_trim = True

    def resume(self, sampler: Sampler) -> None:
        """Go on with another request over the same text."""

    def trim_to(self, position: int) -> None:
        """Forget all tokens from a position on."""
        self.position = position

    def checkpoint(self) -> int:
        """This state, to come back to."""
        return self.position

    def rewind(self, checkpoint: int) -> None:
        """Forget all tokens since the checkpoint."""
        self.position = checkpoint

    def rows(self, start: int, end: int) -> Arrays:
        """None."""
        return {}

    def state(self) -> Arrays:
        """None."""
        return {}

    def restore(self, position: int, rows: Sequence[Arrays], state: Arrays, room: int) -> None:
        """Begin with so many tokens."""
        self.position = position
