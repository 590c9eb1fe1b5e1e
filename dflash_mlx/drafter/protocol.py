"""What the decoding loop expects of a drafter, and the base class of its sessions.

A drafter is any object with `tap_layers` and `start`. What `start` returns needs `extend` and
`propose` (`SupportsDrafting`). The package's own sessions inherit from `DraftSession`. Further
abilities have base classes: `SupportsResume`, `SupportsSharing` and `SupportsTrees`.
`start_session` always gives the loop a `DraftSession`.

A drafter may also have these attributes; the functions at the end of this file read them:

    block_size       the maximum number of rows that it drafts well, the anchor included
    drafts_trees     whether its sessions have `propose_tree`
    label            its display name; by default the name of the class
    slot_cost(t)     for a drafter that drafts token by token: the likely cost of each token, in
                     plain steps of target t
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
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
    from .draft_tree import DraftTree


class SupportsDrafting(Protocol):
    """What the drafting state of a request must be able to do."""

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


class DraftSession(ABC):
    """One request's drafting state. Further abilities have base classes named `Supports...`.

    Attributes:
        pending_features: how many features the next draft reads before it drafts.
        lookup: drafts from the text, if the drafter has lookups, in addition to other drafts.
    """

    pending_features: int = 0
    lookup: PromptLookup | None = None

    @abstractmethod
    def extend(
        self, taps: mx.array, kept: Sequence[int] | None = None, tokens: Sequence[int] = ()
    ) -> None:
        """Add newly committed tokens, in order.

        Args:
            taps: the features [1, N, K*D] of a forward, which is being computed.
            kept: the rows of the S tokens in this forward, in rising order; None for all.
            tokens: the S tokens. A network that only reads features ignores them.
        """

    @abstractmethod
    def propose(self, anchor: int, width: int) -> Proposal:
        """Draft at most `width` rows that begin with `anchor`, the last committed token."""

    def start_computing(self) -> None:  # noqa: B027
        """Start to compute the waiting features, because another thread may draft with them."""

    def catch_up(self) -> None:  # noqa: B027
        """Read the waiting features if they are too many to be read with the next draft."""

    @property
    def network(self) -> DraftSession | None:
        """The session whose `propose` runs a network; None if all drafts are lookups."""
        return self

    def lookup_rates(self, anchor: int, width: int) -> list[float]:
        """The acceptance rate expected of each slot of a lookup draft of at most `width` rows.

        Each rate assumes that all earlier slots are accepted. Empty if there is no such draft.
        """
        return [] if self.lookup is None else self.lookup.rates(anchor, width)

    def propose_lookup(self, anchor: int, width: int) -> Proposal:
        """Propose the draft that `lookup_rates` rated last, with at most `width` rows."""
        return Proposal([anchor]) if self.lookup is None else self.lookup.propose(anchor, width)


class SupportsTrees(DraftSession):
    """A session that can also draft trees."""

    @abstractmethod
    def propose_tree(self, anchor: int, rows: int, width: int) -> DraftTree:
        """Draft a tree of at most `rows` rows, in paths of at most `width`, and wait for it."""


class SupportsResume(DraftSession):
    """A session that the next request of a conversation can continue.

    The defaults are for a session that only counts tokens.

    Attributes:
        position: how many tokens are committed.
        can_trim: whether `trim_to` can go back to any position. If not, only `rewind` can go back,
            to a checkpoint.
    """

    position: int = 0
    can_trim: bool = True

    def resume(self, sampler: Sampler) -> None:
        """Continue with another request over the same text, with its settings and seed."""

    def trim_to(self, position: int) -> None:
        """Forget all tokens from a position on."""
        self.position = position

    def checkpoint(self) -> Any:
        """Return the current state, for `rewind`. Nothing is copied."""
        return self.position

    def rewind(self, checkpoint: Any) -> None:
        """Go back to the state of a checkpoint."""
        self.position = checkpoint


class SupportsSharing(SupportsResume):
    """A session that other requests can start from a stored copy of.

    The defaults are for a session that only counts tokens.
    """

    def rows(self, start: int, end: int) -> Arrays:
        """The arrays that belong to the tokens from `start` to `end`, by name.

        They are views, which the caller copies.
        """
        return {}

    def state(self) -> Arrays:
        """The arrays that belong to this position only, by name; none if `can_trim`."""
        return {}

    def dry_run(self, taps: mx.array) -> None:
        """Extend the session without computing anything: only shapes of rows and state count."""

    def restore(self, position: int, rows: Sequence[Arrays], state: Arrays, room: int) -> None:
        """Start with `position` tokens, from stored rows and state.

        Args:
            position: how many tokens `rows` hold.
            rows: the rows of consecutive pieces of the text. They must not be changed.
            state: the state at that position. It must not be changed.
            room: how many tokens are about to follow.
        """
        self.position = position


class PlainSession(SupportsSharing):
    """Drafts nothing: plain decoding through the same loop."""

    @property
    def network(self) -> None:
        """None, because there is no network."""

    def extend(
        self, taps: mx.array, kept: Sequence[int] | None = None, tokens: Sequence[int] = ()
    ) -> None:
        """Count the tokens."""
        self.position += taps.shape[1] if kept is None else len(kept)

    def propose(self, anchor: int, width: int) -> Proposal:
        """Propose only the anchor."""
        return Proposal([anchor])


class AdaptedSession(DraftSession):
    """Wraps a user's session that has only `extend(taps)` and `propose`."""

    def __init__(self, session: SupportsDrafting) -> None:
        self.session = session

    def extend(
        self, taps: mx.array, kept: Sequence[int] | None = None, tokens: Sequence[int] = ()
    ) -> None:
        """Pass on the features, and start to compute them: another thread may use them."""
        taps = taps if kept is None else gathered(taps, kept)
        mx.async_eval(taps)
        self.session.extend(taps)

    def propose(self, anchor: int, width: int) -> Proposal:
        """Let the user's session draft. Raises `ProposalError` unless it returns a `Proposal`."""
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
    """The maximum number of rows of a draft, the anchor included; None for no limit."""
    return getattr(drafter, "block_size", None)


def drafts_trees(drafter: Drafter | None) -> bool:
    """Whether a drafter's sessions have `propose_tree`."""
    return getattr(drafter, "drafts_trees", False)


def label(drafter: Drafter) -> str:
    """A drafter's display name, such as "DFlash", "lookup" or "DFlash2+lookup"."""
    return getattr(drafter, "label", type(drafter).__name__)


def cache_bytes(drafter: Drafter | None, target: Target, tokens: int) -> int:
    """The bytes of a session's caches after this many tokens; 0 if they cannot be stored.

    Only shapes are used; no array is computed.
    """
    session = start_session(drafter, target, Sampler())
    if drafter is None or not isinstance(session, SupportsSharing):
        return 0
    width = len(drafter.tap_layers) * target.hidden_size
    session.dry_run(mx.zeros((1, tokens, width), target.embed(mx.array([[0]])).dtype))
    return sum(x.nbytes for x in (session.rows(0, tokens) | session.state()).values())


def slot_cost(drafter: Drafter | None, target: Target) -> float | None:
    """The likely cost of each drafted token, in plain steps of the target.

    None if a whole draft costs about as much as one token.
    """
    cost: Callable[[Target], float] | None = getattr(drafter, "slot_cost", None)
    return None if cost is None else cost(target)


def is_drafter(value: object) -> TypeGuard[Drafter]:
    """Whether a value has what `Drafter` names.

    `isinstance` cannot tell: since Python 3.12 it ignores `__getattr__`, which an MLX module needs
    for tuples such as `tap_layers`.
    """
    start: object = getattr(value, "start", None)
    return callable(start) and hasattr(value, "tap_layers") and not isinstance(value, type)


def check_pair(target: object, drafter: object) -> None:
    """Raise `SettingsError` unless these are a target, and a drafter or None."""
    if not hasattr(target, "tokenizer") or isinstance(target, type):
        raise SettingsError(
            f"target must be a target, as dm.load_target(...) returns, not {brief(target)}."
        )
    if not (drafter is None or is_drafter(drafter)):
        raise SettingsError(
            f"drafter must be None or a drafter (dm.load_drafter(...)), not {brief(drafter)}."
        )
