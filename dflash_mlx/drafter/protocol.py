"""What the decoding loop expects of a drafter, and the base class of its sessions.

A drafter is any object with `tap_layers` and `start`. What `start` returns needs `extend` and
`propose` (`SupportsDrafting`). A session that can do more inherits from `DraftSession` and
overrides what it can do better. `start_session` gives the loop a `DraftSession` in any case.

A drafter may also have these attributes; the functions at the end of this file read them:

    block_size       the most rows that it drafts well, the anchor included
    drafts_trees     whether its sessions have `propose_tree`
    label            its name for people, if not the class's
    slot_cost(t)     of a drafter that drafts token by token over target t: what each token is
                     likely to cost, in plain steps of the target
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from itertools import accumulate
from operator import mul
from typing import TYPE_CHECKING, Any, Protocol, TypeGuard

import mlx.core as mx

from ..errors import ProposalError, SettingsError
from ..proposal import Proposal
from ..sampling import Sampler
from ..targets.taps import gathered
from ..validation import brief
from .prompt_lookup import PromptLookup

if TYPE_CHECKING:
    from ..targets import Target
    from ..targets.caches import Arrays
    from .tree import DraftTree


NETWORK_RATE = 0.85  # acceptance rate of a network's slots, if no policy measures it


class SupportsDrafting(Protocol):
    """The least that a request's drafting state can do."""

    def extend(self, taps: mx.array) -> None:
        """Add the features [1, S, K*D] of S newly committed tokens, in order.

        The prompt's come first. K is the number of `tap_layers`; without any, [1, S, 0].
        """

    def propose(self, anchor: int, width: int) -> Proposal:
        """Draft at most `width` rows that begin with `anchor`, the last committed token."""


class Drafter(Protocol):
    """Drafts for any number of requests; each has its own session."""

    @property
    def tap_layers(self) -> tuple[int, ...]:
        """The target layers whose outputs it reads, in the order it expects them; () for none."""

    def start(self, target: Target, sampler: Sampler) -> SupportsDrafting:
        """Begin one request; the sampler holds its settings and the noise of its seed."""


class DraftSession:
    """One request's drafting state, with a default for everything but `extend` and `propose`.

    Attributes:
        resumable: whether the next request of a conversation can go on with this session: it has
            `position`, `resume`, `trim_to`, `checkpoint` and `rewind`.
        storable: whether other requests can start from a stored copy: it has `position`, `rows`,
            `state` and `restore`.
        lookup: drafts from the text, if the drafter has lookups. They add to its other drafts.
    """

    resumable: bool = False
    storable: bool = False
    lookup: PromptLookup | None = None

    @property
    def position(self) -> int:
        """Committed tokens so far."""
        return 0

    @property
    def pending_features(self) -> int:
        """How many of them the next draft has to read before it drafts."""
        return 0

    @property
    def can_trim(self) -> bool:
        """Whether `trim_to` can go back to any position; else only `rewind` to a checkpoint."""
        return True

    def extend(self, taps: mx.array) -> None:
        """Add the features [1, S, K*D] of S newly committed tokens; see `SupportsDrafting`."""
        mx.async_eval(taps)  # the drafter may use them in another thread
        self.extend_rows(taps, range(taps.shape[1]))

    def extend_rows(self, taps: mx.array, kept: Sequence[int]) -> None:
        """Add the rows `kept`, in rising order, of the features [1, N, K*D] of a forward.

        A session overrides this, or `extend`.
        """
        taps = gathered(taps, kept)
        mx.async_eval(taps)  # the drafter may use them in another thread
        self.extend(taps)

    def read_tokens(self, tokens: Sequence[int]) -> None:
        """Add newly committed tokens, in order; `extend` gets their features."""

    def read_text(self, tokens: Sequence[int]) -> None:
        """`read_tokens`, also for the lookup."""
        self.read_tokens(tokens)
        if self.lookup is not None:
            self.lookup.read(tokens)

    def propose(self, anchor: int, width: int) -> Proposal:
        """Draft at most `width` rows that begin with `anchor`, the last committed token."""
        raise NotImplementedError

    def propose_tree(self, anchor: int, rows: int, width: int) -> DraftTree:
        """Draft a tree of at most `rows` rows, whose paths have at most `width`; this waits."""
        raise NotImplementedError

    @property
    def network(self) -> DraftSession | None:
        """The session whose `propose` runs a network; None if all drafts are lookups.

        Networks of many requests can draft in one pass (`draft_batch`).
        """
        return self

    def lookup_rates(self, anchor: int, width: int) -> list[float]:
        """The acceptance rate expected of each slot of a lookup draft of at most `width` rows.

        Each is given that the slots before it are right. Empty if there is no such draft.
        """
        return [] if self.lookup is None else self.lookup.rates(anchor, width)

    def propose_lookup(self, anchor: int, width: int) -> Proposal:
        """The draft that `lookup_rates` rated last, of at most `width` rows; it costs nothing."""
        return Proposal([anchor]) if self.lookup is None else self.lookup.propose(anchor, width)

    def propose_best(self, anchor: int, width: int) -> Proposal:
        """The chain of at most `width` rows that promises more tokens, without a policy."""
        rates, network = self.lookup_rates(anchor, width), [NETWORK_RATE] * (width - 1)
        if self.network is None or sum(accumulate(rates, mul)) > sum(accumulate(network, mul)):
            return self.propose_lookup(anchor, width)
        return self.propose(anchor, width)

    def resume(self, sampler: Sampler) -> None:
        """Continue with another request over the same text, with its settings and seed."""

    def trim_to(self, position: int) -> None:
        """Forget all tokens from a position on."""
        raise NotImplementedError

    def checkpoint(self) -> Any:
        """The current state, for `rewind`; nothing is copied."""
        raise NotImplementedError

    def rewind(self, checkpoint: Any) -> None:
        """Go back to the state of a checkpoint."""
        raise NotImplementedError

    def rows(self, start: int, end: int) -> Arrays:
        """What belongs to the tokens from `start` to `end`, by name; views, to be copied."""
        return {}

    def state(self) -> Arrays:
        """What belongs to this position alone, by name; nothing if `can_trim`."""
        return {}

    def dry_run(self, taps: mx.array) -> None:
        """As `extend`, but nothing need be computed: only the shapes of rows and state count."""
        self.extend(taps)

    def restore(self, position: int, rows: Sequence[Arrays], state: Arrays, room: int) -> None:
        """Start with `position` tokens, from the `rows` of consecutive pieces and the `state`.

        Args:
            position: tokens that `rows` hold.
            rows: of consecutive pieces of the text, never changed here.
            state: of that position, never changed here.
            room: tokens that are about to follow.
        """


class PlainSession(DraftSession):
    """Drafts nothing: plain decoding through the same loop."""

    resumable = storable = True
    position = 0

    @property
    def network(self) -> None:
        """There is none."""

    def extend_rows(self, taps: mx.array, kept: Sequence[int]) -> None:
        """Count the tokens."""
        self.position += len(kept)

    def propose(self, anchor: int, width: int) -> Proposal:
        """The anchor alone."""
        return Proposal([anchor])

    def trim_to(self, position: int) -> None:
        """Forget all tokens from a position on."""
        self.position = position

    def checkpoint(self) -> int:
        """The position."""
        return self.position

    def rewind(self, checkpoint: int) -> None:
        """Go back to a checkpoint."""
        self.position = checkpoint

    def restore(self, position: int, rows: Sequence[Arrays], state: Arrays, room: int) -> None:
        """Start with this many tokens."""
        self.position = position


class AdaptedSession(DraftSession):
    """Gives the defaults of `DraftSession` to a session that does not inherit from it."""

    position = 0

    def __init__(self, session: SupportsDrafting) -> None:
        self.session = session

    def extend(self, taps: mx.array) -> None:
        """See `SupportsDrafting`."""
        self.session.extend(taps)
        self.position += taps.shape[1]

    def propose(self, anchor: int, width: int) -> Proposal:
        """See `SupportsDrafting`."""
        proposal = self.session.propose(anchor, width)
        if not isinstance(proposal, Proposal):
            raise ProposalError(f"propose must return a Proposal, not {brief(proposal)}.")
        return proposal


def start_session(drafter: Drafter | None, target: Target, sampler: Sampler) -> DraftSession:
    """Begin one request of a drafter, the package's own or a user's; None drafts nothing.

    Raises `SettingsError` for what cannot draft.
    """
    if drafter is None:
        return PlainSession()
    session = drafter.start(target, sampler)
    if isinstance(session, DraftSession):
        return session
    if not (hasattr(session, "extend") and hasattr(session, "propose")):
        raise SettingsError(
            "A drafter's start must return an object with extend and propose, "
            f"not {brief(session)}."
        )
    return AdaptedSession(session)


def block_size(drafter: Drafter) -> int | None:
    """The most rows of its drafts, the anchor included; None if any number will do."""
    return getattr(drafter, "block_size", None)


def drafts_trees(drafter: Drafter | None) -> bool:
    """Whether its sessions have `propose_tree`."""
    return getattr(drafter, "drafts_trees", False)


def label(drafter: Drafter) -> str:
    """Its name for people: "DFlash", "lookup", "DFlash2+lookup"."""
    return getattr(drafter, "label", type(drafter).__name__)


def cache_bytes(drafter: Drafter | None, target: Target, tokens: int) -> int:
    """Bytes of a session's caches after this many tokens; 0 if they cannot be stored.

    Nothing is computed.
    """
    session = start_session(drafter, target, Sampler())
    if drafter is None or not session.storable:
        return 0
    width = len(drafter.tap_layers) * target.hidden_size
    session.dry_run(mx.zeros((1, tokens, width), target.embed(mx.array([[0]])).dtype))
    return sum(x.nbytes for x in (session.rows(0, tokens) | session.state()).values())


def slot_cost(drafter: Drafter | None, target: Target) -> float | None:
    """What each drafted token is likely to cost; None if all of a draft cost about as one."""
    cost: Callable[[Target], float] | None = getattr(drafter, "slot_cost", None)
    return None if cost is None else cost(target)


def is_drafter(value: object) -> TypeGuard[Drafter]:
    """Whether a value has what `Drafter` names.

    `isinstance` does not tell: since Python 3.12 it passes over `__getattr__`, and an MLX module
    keeps tuples such as `tap_layers` behind it.
    """
    started: object = getattr(value, "start", None)
    return callable(started) and hasattr(value, "tap_layers") and not isinstance(value, type)


def check_pair(target: object, drafter: object) -> None:
    """Raise `SettingsError` unless these are a target, and a drafter or None."""
    if not hasattr(target, "tokenizer") or isinstance(target, type):
        raise SettingsError(f"target must be such as dm.load_target(...), not {brief(target)}.")
    if not (drafter is None or is_drafter(drafter)):
        raise SettingsError(
            f"drafter must be None or a drafter (dm.load_drafter(...)), not {brief(drafter)}."
        )
