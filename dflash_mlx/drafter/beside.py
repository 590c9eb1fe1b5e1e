"""A network and a lookup side by side: each drafts where it knows more.

The lookup knows at once whether the text has been here before, at no cost, and how often it was
right in such places. So it is asked first. A policy, which knows what rounds cost, has the network
drafted beside it or not at all; without one the longer expectation wins.
"""

from __future__ import annotations

from collections.abc import Sequence
from copy import deepcopy
from typing import TYPE_CHECKING, Any

import mlx.core as mx

from ..hindsight import Hindsight
from ..proposal import Proposal
from ..sharpness import matching
from .lookup import Lookup, LookupSession
from .protocol import drafts_trees, label
from .tree import DraftTree

if TYPE_CHECKING:
    from ..sampling import Sampler
    from ..targets import Target
    from ..targets.caches import Arrays
    from .calibration import Calibration
    from .network import DFlash
    from .session import DraftSession

HOPE, HOPE_WEIGHT = 0.85, 4.0  # how often a slot of the network is right, and its weight in drafts
RESCUE, RESCUE_WEIGHT = 0.3, 4.0  # how often the lookup is right where the network is wrong at once
MEMORY = 0.97  # a draft's weight against the next one's


class Known:
    """What is known of both; kept, it serves all requests."""

    def __init__(self) -> None:
        self.lookup = Lookup()
        self._slots, self._right = 0.0, 0.0  # of the network, looked at and right
        self._missed, self._rescued = 0.0, 0.0

    @property
    def rate(self) -> float:
        """How often a slot of the network is right when those before it are."""
        return (self._right + HOPE_WEIGHT * HOPE) / (self._slots + HOPE_WEIGHT)

    @property
    def rescue(self) -> float:
        """How often the lookup's first slot is right where the network's is wrong."""
        return (self._rescued + RESCUE_WEIGHT * RESCUE) / (self._missed + RESCUE_WEIGHT)

    def learn(self, drafted: int, right: int) -> None:
        """Take in a draft of the network of so many slots, of which the first ones were right."""
        self._slots = MEMORY * self._slots + min(right + 1, drafted)
        self._right = MEMORY * self._right + right

    def learn_rescue(self, rescued: bool) -> None:
        """Take in a round where the network's first slot was wrong, and whether the lookup's was
        right."""
        self._missed = MEMORY * self._missed + 1
        self._rescued = MEMORY * self._rescued + rescued


class Beside:
    """A network's drafter with a lookup beside it.

    Args:
        network: what drafts where the text is new.
    """

    def __init__(self, network: DFlash) -> None:
        self.network, self.known = network, Known()
        self.drafts_trees = drafts_trees(network)

    def __repr__(self) -> str:
        """A line, as of the network."""
        return f"Beside({self.network!r})"

    @property
    def tap_layers(self) -> tuple[int, ...]:
        """The network's."""
        return self.network.tap_layers

    @property
    def block_size(self) -> int:
        """The network's."""
        return self.network.block_size

    @property
    def identity(self) -> str:
        """The network's: what the lookup costs is nothing beside it."""
        return self.network.identity

    def cache_bytes(self, tokens: int) -> int:
        """The network's."""
        return self.network.cache_bytes(tokens)

    @property
    def label(self) -> str:
        """What people read."""
        return f"{label(self.network)}+lookup"

    def apart(self) -> Beside:
        """The same network, and what is known so far to be gone on with apart."""
        other = Beside(self.network)
        other.known = deepcopy(self.known)
        return other

    def start(self, target: Target, sampler: Sampler) -> BesideSession:
        """Begin one request. Raises `IncompatibleDrafterError`."""
        lookup = self.known.lookup.start(target, sampler)
        return BesideSession(self.network.start(target, sampler), lookup, self.known)


class BesideSession:
    """One request's drafting by both."""

    only_foresees = False

    def __init__(self, network: DraftSession, lookup: LookupSession, known: Known) -> None:
        self.network, self.lookup, self._known = network, lookup, known
        # What both drafted for a place; the network's tokens stay on the device until it is passed.
        self._waiting: Hindsight[tuple[Proposal, list[int]]] = Hindsight()

    def foresee(self, anchor: int, width: int) -> list[float]:
        """The lookup's; see `LookupSession.foresee`."""
        return self.lookup.foresee(anchor, width)

    def propose_foreseen(self, anchor: int, width: int) -> Proposal:
        """The lookup's draft."""
        return self.lookup.propose_foreseen(anchor, width)

    @property
    def rescue(self) -> float:
        """How often the lookup is right at once where the network is wrong at once."""
        return self._known.rescue

    @property
    def rate(self) -> float:
        """How often a slot of the network is right when those before it are."""
        return self._known.rate

    def propose_network(self, anchor: int, width: int) -> Proposal:
        """The network's draft."""
        proposal = self.network.propose(anchor, width)
        self.drafted(anchor, proposal)
        return proposal

    def drafted(self, anchor: int, proposal: Proposal) -> None:
        """Take in the network's draft, to learn from it when the text has passed it."""
        if len(proposal) > 1:
            guess: Any = self.lookup.propose_foreseen(anchor, 2).tokens
            self._waiting.add(len(proposal), (proposal, guess[1:]))

    def propose_both(self, anchor: int, width: int, more: int) -> Proposal:
        """A tree of two branches: the network's draft of `width` rows, the lookup's of `more`."""
        first = self.propose_network(anchor, width)
        other: Any = self.lookup.propose_foreseen(anchor, more + 1).tokens[1:]
        drafted: Any = first.tokens
        tokens = mx.concatenate([mx.array(drafted), mx.array(other, mx.int32)])
        rows = len(first)
        parents = [*range(-1, rows - 1), 0, *range(rows, rows + len(other) - 1)]
        return Proposal(tokens, tuple(parents))

    def propose(self, anchor: int, width: int) -> Proposal:
        """The draft of which more is expected, of at most `width` rows."""
        rates = self.foresee(anchor, width)
        if _expected(rates) > _expected([self.rate] * (width - 1)):
            return self.propose_foreseen(anchor, width)
        return self.propose_network(anchor, width)

    def propose_tree(
        self, anchor: int, rows: int, width: int, calibration: Calibration
    ) -> DraftTree:
        """The network's tree; see `DraftSession.propose_tree`."""
        return self.network.propose_tree(anchor, rows, width, calibration)

    @property
    def says_confidence(self) -> bool:
        """Whether the network does."""
        return self.network.says_confidence

    def confidence(self) -> mx.array:
        """The network's, of its last chain."""
        return self.network.confidence()

    def read(self, tokens: Sequence[int]) -> None:
        """Take in newly committed tokens, in order."""
        self.lookup.read(tokens)
        for (proposal, guess), text in self._waiting.commit(tokens):
            tokens_of: Any = proposal.tokens
            drafted: Any = mx.array(tokens_of)[1:].tolist()
            right = matching(drafted, text[1:])
            self._known.learn(len(drafted), right)
            if guess and not right:
                self._known.learn_rescue(guess[0] == text[1])

    def extend(self, taps: mx.array) -> None:
        """Take in the features of newly committed tokens, for the network."""
        self.network.extend(taps)

    def extend_by(self, taps: mx.array, kept: Sequence[int]) -> None:
        """The same, of a round; see `DraftSession.extend_by`."""
        self.network.extend_by(taps, kept)

    @property
    def unread(self) -> int:
        """How many tokens' features wait for the network's next draft."""
        return self.network.unread

    @property
    def position(self) -> int:
        """Tokens that were taken in."""
        return self.network.position

    @property
    def can_trim(self) -> bool:
        """Whether `trim_to` can go back to any position, or only `rewind` to a checkpoint."""
        return self.network.can_trim

    def resume(self, sampler: Sampler) -> None:
        """Go on with another request over the same text."""
        self.network.resume(sampler)
        self.lookup.resume(sampler)
        self._waiting = Hindsight()

    def trim_to(self, position: int) -> None:
        """Forget all tokens from a position on."""
        self.network.trim_to(position)
        self.lookup.trim_to(position)
        self._waiting = Hindsight()

    def checkpoint(self) -> tuple[Any, int]:
        """This state, to come back to."""
        return self.network.checkpoint(), self.lookup.checkpoint()

    def rows(self, start: int, end: int) -> Arrays:
        """The network's."""
        return self.network.rows(start, end)

    def state(self) -> Arrays:
        """The network's."""
        return self.network.state()

    def restore(self, position: int, rows: Sequence[Arrays], state: Arrays, room: int) -> None:
        """Begin with what the network took in; the lookup reads the text."""
        self.network.restore(position, rows, state, room)

    def rewind(self, checkpoint: tuple[Any, int]) -> None:
        """Forget all tokens since the checkpoint."""
        self.network.rewind(checkpoint[0])
        self.lookup.rewind(checkpoint[1])
        self._waiting = Hindsight()


def _expected(rates: Sequence[float]) -> float:
    """Tokens that slots right so often bring."""
    path, tokens = 1.0, 0.0
    for rate in rates:
        path *= rate
        tokens += path
    return tokens
