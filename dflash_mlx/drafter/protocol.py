"""What drafts: the shapes that the loop, the policies and conversations ask for.

A drafter is anything with `tap_layers` and `start`; what it starts for a request needs `extend`
and `propose` (`Drafter`, `Session`). All else is optional, a protocol of its own each, and whoever
wants it asks with `isinstance`:

    of a drafter    `Bounded`       the widest block that it was made for
                    `Identified`    a name under which what its drafts cost is remembered
                    `Labelled`      what people call it, where that is not its class's name
                    `TreeDrafter`   its sessions are `TreeSession`s
                    `Weighed`       what its caches take is known
    of a session    `Gathers`       takes the features of kept rows out of those of a round itself
                    `ReadsLate`     reads features when it drafts, and says how many wait for that
                    `SaysConfidence` says how likely its drafts are right
                    `Foresees`      has drafts that cost nothing, and knows what they are worth
                    `ReadsText`     is told the committed tokens, not only their features
                    `Resumable`     can go on with the next turn of a conversation
                    `Storable`      what it took in can be stored, for other requests to begin with
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Protocol, TypeGuard, TypeVar, cast, runtime_checkable

from ..errors import SettingsError
from ..proposal import Proposal
from ..validation import brief, check_type

if TYPE_CHECKING:
    import mlx.core as mx

    from ..sampling import Sampler
    from ..targets import Target
    from ..targets.caches import Arrays
    from .calibration import Calibration
    from .tree import DraftTree

MarkT = TypeVar("MarkT")


class Session(Protocol):
    """One request's drafting state."""

    def extend(self, taps: mx.array) -> None:
        """Take in the features [1, S, K*D] of S newly committed tokens, in order.

        The whole prompt's come first; K is the number of `tap_layers`, and without any the
        features are [1, S, 0].
        """

    def propose(self, anchor: int, width: int) -> Proposal:
        """A draft of at most `width` rows that begins with `anchor`, the last committed token."""


@runtime_checkable
class Drafter(Protocol):
    """What a request is drafted by; shared by all requests, so nothing of theirs is in it."""

    @property
    def tap_layers(self) -> tuple[int, ...]:
        """The target layers whose outputs it reads, in the order it expects them; () for none."""

    def start(self, target: Target, sampler: Sampler) -> Session:
        """Begin one request; the sampler knows its settings and the noise of its seed."""


@runtime_checkable
class Bounded(Protocol):
    """A drafter made for blocks of a certain size."""

    @property
    def block_size(self) -> int:
        """The most rows that it drafts well, the anchor included."""


@runtime_checkable
class Identified(Protocol):
    """A drafter that can be told from all others from one run of the program to the next."""

    @property
    def identity(self) -> str:
        """The same for drafters whose drafts cost the same, as weights of one shape do."""


@runtime_checkable
class Weighed(Protocol):
    """A drafter that knows what its sessions take."""

    def cache_bytes(self, tokens: int) -> int:
        """Bytes of a session's caches after so many tokens."""


@runtime_checkable
class Labelled(Protocol):
    """A drafter that people do not call by the name of its class."""

    @property
    def label(self) -> str:
        """In a word."""


@runtime_checkable
class Learns(Protocol):
    """A drafter that learns from one request what it does in the next."""

    def apart(self) -> Drafter:
        """The same drafter, which goes on from what this one knows and teaches it nothing."""


class TreeSession(Session, Protocol):
    """A session that drafts trees, too."""

    def propose_tree(
        self, anchor: int, rows: int, width: int, calibration: Calibration
    ) -> DraftTree:
        """A tree of at most `rows` rows, whose paths have at most `width`; this waits.

        `calibration` makes probabilities of what the drafter says.
        """


@runtime_checkable
class TreeDrafter(Protocol):
    """A drafter whose sessions draft trees, if it says so."""

    drafts_trees: bool

    def start(self, target: Target, sampler: Sampler) -> TreeSession:
        """As of `Drafter`."""


@runtime_checkable
class Gathers(Protocol):
    """A session that needs no array of its own for the features of every round's kept rows.

    Each such array is one more pass of the device; taken out where they are used, they are none.
    """

    def extend_by(self, taps: mx.array, kept: Sequence[int]) -> None:
        """Take in rows of the features [1, N, K*D] of a round, which are computed: see `extend`.

        `kept` are the rows, rising.
        """


@runtime_checkable
class ReadsLate(Protocol):
    """A session whose next draft first reads all features that came since the last one."""

    @property
    def unread(self) -> int:
        """Of how many tokens they are."""


@runtime_checkable
class SaysConfidence(Protocol):
    """A session that says of its chains how likely each slot is right, given those before it."""

    @property
    def says_confidence(self) -> bool:
        """Whether it does: not every network has a head for it."""

    def confidence(self) -> mx.array:
        """Logits [L] of the L slots of the last chain, on the device."""


@runtime_checkable
class Foresees(Protocol):
    """A session with drafts on the host: they cost nothing, and are judged before they are made."""

    @property
    def only_foresees(self) -> bool:
        """Whether it has no others; else it is a `Both`."""

    def foresee(self, anchor: int, width: int) -> list[float]:
        """How likely each slot of such a draft of at most `width` rows is right, those before it
        being; empty for no draft."""

    def propose_foreseen(self, anchor: int, width: int) -> Proposal:
        """The draft that `foresee` spoke of last, of at most `width` rows."""


class Both(Foresees, Protocol):
    """A session with drafts of a network as well."""

    @property
    def network(self) -> Session:
        """Whose drafts those are; they may be made together with those of other requests."""

    @property
    def rate(self) -> float:
        """How often a slot of the network is right when those before it are, at any time."""

    def drafted(self, anchor: int, proposal: Proposal) -> None:
        """Take in what `network` has drafted after an anchor that was foreseen."""

    @property
    def rescue(self) -> float:
        """How often the foreseen draft is right at once where the network's is wrong at once."""

    def propose_network(self, anchor: int, width: int) -> Proposal:
        """The network's draft of at most `width` rows, after `foresee`."""

    def propose_both(self, anchor: int, width: int, more: int) -> Proposal:
        """A tree of the network's draft of `width` rows and of `more` rows of the foreseen one."""


@runtime_checkable
class ReadsText(Protocol):
    """A session that drafts from the text itself."""

    def read(self, tokens: Sequence[int]) -> None:
        """Take in newly committed tokens, in order: those whose features `extend` gets."""


@runtime_checkable
class Resumable(Protocol[MarkT]):
    """A session that the next request of a conversation can go on with."""

    @property
    def position(self) -> int:
        """Tokens that were taken in."""

    @property
    def can_trim(self) -> bool:
        """Whether `trim_to` can go back to any position, or only `rewind` to a checkpoint."""

    def resume(self, sampler: Sampler) -> None:
        """Go on with another request over the same text, whose settings and seed are these."""

    def trim_to(self, position: int) -> None:
        """Forget all tokens from a position on."""

    def checkpoint(self) -> MarkT:
        """This state, to come back to."""

    def rewind(self, checkpoint: MarkT) -> None:
        """Forget all tokens since the checkpoint."""


@runtime_checkable
class Storable(Protocol):
    """A session that another request's can begin where it was, told so by arrays.

    Rows belong to tokens, and a stretch's can be laid behind another's; the state belongs to a
    position. Names are the session's own. One that `ReadsText` is told the text as well.
    """

    @property
    def position(self) -> int:
        """Tokens that were taken in."""

    @property
    def can_trim(self) -> bool:
        """Whether rows are all there is, so that any position can be begun from."""

    def rows(self, start: int, end: int) -> Arrays:
        """What belongs to the tokens from `start` to `end`, by name; slices, to be copied."""

    def state(self) -> Arrays:
        """What is good at this position alone, by name."""

    def restore(self, position: int, rows: Sequence[Arrays], state: Arrays, room: int) -> None:
        """Begin with `position` tokens, by their rows, stretch after stretch, and their state.

        `room` is how many tokens are about to follow. Nothing given is ever changed.
        """


def block_size(drafter: Drafter) -> int | None:
    """The most rows of its blocks; None where any number will do."""
    return drafter.block_size if isinstance(drafter, Bounded) else None


class Abilities:
    """What the session of one request can, asked once: `isinstance` looks up every member anew."""

    def __init__(self) -> None:
        self._of: type | None = None
        self._foresees = self._reads_late = self._says_confidence = False

    def foresees(self, session: object) -> TypeGuard[Foresees]:
        """Whether it is a `Foresees`."""
        self._ask(session)
        return self._foresees

    def unread(self, session: object) -> int:
        """How many tokens' features its next draft reads first, if it is a `ReadsLate`."""
        self._ask(session)
        return cast(ReadsLate, session).unread if self._reads_late else 0

    def says_confidence(self, session: object) -> TypeGuard[SaysConfidence]:
        """Whether it `SaysConfidence`, and does."""
        self._ask(session)
        return self._says_confidence

    def _ask(self, session: object) -> None:
        if type(session) is not self._of:
            self._of = type(session)
            self._foresees = isinstance(session, Foresees)
            self._reads_late = isinstance(session, ReadsLate)
            self._says_confidence = isinstance(session, SaysConfidence) and session.says_confidence


def label(drafter: Drafter) -> str:
    """What drafts, in a word: "DFlash", "lookup", "DFlash2+lookup"."""
    return drafter.label if isinstance(drafter, Labelled) else type(drafter).__name__


def apart(drafter: Drafter) -> Drafter:
    """The same drafter; what it learns from now on the given one does not know."""
    return drafter.apart() if isinstance(drafter, Learns) else drafter


def drafts_trees(drafter: Drafter) -> bool:
    """Whether its sessions are `TreeSession`s."""
    return isinstance(drafter, TreeDrafter) and drafter.drafts_trees


def check_pair(target: object, drafter: object) -> None:
    """Raise `SettingsError` unless these are a target, and a drafter or None."""
    if not hasattr(target, "tokenizer") or isinstance(target, type):
        raise SettingsError(f"target must be such as dm.load_target(...), not {brief(target)}.")
    check_type("drafter", drafter, Drafter, "dm.load_drafter(...)")
