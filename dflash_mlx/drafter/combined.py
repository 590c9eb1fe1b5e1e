"""A network and a lookup: the draft that promises more tokens is verified.

The lookup is free and says at once whether the text has read like this before, so it is asked
first. A policy knows what steps cost and compares both itself; `propose` compares expected tokens.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import accumulate
from operator import mul
from typing import TYPE_CHECKING, Any

from ..proposal import Proposal
from .lookup import LookupSession
from .protocol import (
    Drafter,
    DraftSession,
    block_size,
    cache_bytes,
    drafts_trees,
    identity,
    label,
    start_session,
)
from .tree import DraftTree

if TYPE_CHECKING:
    import mlx.core as mx

    from ..sampling import Sampler
    from ..targets import Target
    from ..targets.caches import Arrays
    from .calibration import Calibration

NETWORK_RATE = 0.85  # acceptance rate of the network's slots, if no policy measures it


class CombinedDrafter:
    """A network's drafter with a lookup.

    Args:
        network: drafts where the text is new.
    """

    def __init__(self, network: Drafter) -> None:
        self.network = network
        self.tap_layers, self.block_size = network.tap_layers, block_size(network)
        self.drafts_trees, self.identity = drafts_trees(network), identity(network)
        self.label = f"{label(network)}+lookup"

    def __repr__(self) -> str:
        """One line."""
        return f"CombinedDrafter({self.network!r})"

    def cache_bytes(self, tokens: int) -> int:
        """The network's."""
        return cache_bytes(self.network, tokens)

    def start(self, target: Target, sampler: Sampler) -> CombinedSession:
        """Begin one request. Raises `IncompatibleDrafterError`."""
        return CombinedSession(start_session(self.network, target, sampler))


class CombinedSession(DraftSession):
    """One request's drafts by a network's session and a lookup."""

    def __init__(self, network: DraftSession) -> None:
        self._network, self._lookup = network, LookupSession()
        self.resumable, self.storable = network.resumable, network.storable
        self.has_confidence = network.has_confidence

    @property
    def network(self) -> DraftSession:
        """The network's session."""
        return self._network

    def lookup_rates(self, anchor: int, width: int) -> list[float]:
        """The lookup's."""
        return self._lookup.lookup_rates(anchor, width)

    def propose_lookup(self, anchor: int, width: int) -> Proposal:
        """The lookup's draft."""
        return self._lookup.propose_lookup(anchor, width)

    def propose(self, anchor: int, width: int) -> Proposal:
        """The draft of at most `width` rows that promises more tokens."""
        rates = self.lookup_rates(anchor, width)
        if _expected(rates) > _expected([NETWORK_RATE] * (width - 1)):
            return self.propose_lookup(anchor, width)
        return self._network.propose(anchor, width)

    def propose_tree(
        self, anchor: int, rows: int, width: int, calibration: Calibration
    ) -> DraftTree:
        """The network's tree."""
        return self._network.propose_tree(anchor, rows, width, calibration)

    def confidence(self) -> mx.array | None:
        """The network's, of its last chain."""
        return self._network.confidence()

    def read_tokens(self, tokens: Sequence[int]) -> None:
        """Add newly committed tokens, for the lookup."""
        self._lookup.read_tokens(tokens)

    def extend(self, taps: mx.array) -> None:
        """Add the features of newly committed tokens, for the network."""
        self._network.extend(taps)

    def extend_rows(self, taps: mx.array, kept: Sequence[int]) -> None:
        """Add features of a verify step, for the network."""
        self._network.extend_rows(taps, kept)

    @property
    def unread(self) -> int:
        """The network's."""
        return self._network.unread

    @property
    def position(self) -> int:
        """The network's."""
        return self._network.position

    @property
    def can_trim(self) -> bool:
        """Whether the network's session can."""
        return self._network.can_trim

    def resume(self, sampler: Sampler) -> None:
        """Continue with another request over the same text."""
        self._network.resume(sampler)
        self._lookup.resume(sampler)

    def trim_to(self, position: int) -> None:
        """Forget all tokens from a position on."""
        self._network.trim_to(position)
        self._lookup.trim_to(position)

    def checkpoint(self) -> tuple[Any, int]:
        """Those of both."""
        return self._network.checkpoint(), self._lookup.checkpoint()

    def rewind(self, checkpoint: tuple[Any, int]) -> None:
        """Go back to a checkpoint."""
        self._network.rewind(checkpoint[0])
        self._lookup.rewind(checkpoint[1])

    def rows(self, start: int, end: int) -> Arrays:
        """The network's."""
        return self._network.rows(start, end)

    def state(self) -> Arrays:
        """The network's."""
        return self._network.state()

    def restore(self, position: int, rows: Sequence[Arrays], state: Arrays, room: int) -> None:
        """Restore the network's session; `read_tokens` gets the text."""
        self._network.restore(position, rows, state, room)


def _expected(rates: Sequence[float]) -> float:
    """How many slots are expected to be right, given the rate of each."""
    return sum(accumulate(rates, mul))
