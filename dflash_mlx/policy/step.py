"""What a planner returns and what it learns from: candidates, and the outcome of a step."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, NamedTuple

from ..errors import ProposalError
from ..proposal import Proposal

if TYPE_CHECKING:
    from ..drafter.protocol import DraftSession
    from ..drafter.tree import DraftTree


class StepOutcome(NamedTuple):
    """How a step went.

    Attributes:
        proposal: what the target verified.
        accepted: drafted rows that it kept.
        tokens: what it committed, its own last token included.
        seconds: that the step took; None where that is not known.
        shared: whether other requests were part of the step.
    """

    proposal: Proposal
    accepted: int
    tokens: Sequence[int]
    seconds: float | None = None
    shared: bool = False


@dataclass(frozen=True)
class Candidate:
    """What a request could have verified in a step that it shares with other requests.

    Attributes:
        paths: [n], falling: how likely each drafted row is accepted.
        propose: makes the proposal of so many rows, the anchor included; None for a chain that is
            yet to be drafted by the request's network, together with those of others.
        required: whether all rows have to be verified, whatever they cost.
    """

    paths: Sequence[float]
    propose: Callable[[int], Proposal] | None = None
    required: bool = False


@dataclass(frozen=True)
class TreeCandidate:
    """A tree that has to be drafted before its rows can be compared with others.

    Attributes:
        session: that drafts it.
        rows, length: as `DraftSession.propose_tree` takes them.
        ready: makes a candidate of the tree.
    """

    session: DraftSession
    rows: int
    length: int
    ready: Callable[[DraftTree], Candidate]


def checked(proposal: Proposal, rows: int) -> Proposal:
    """A proposal of at most so many rows. Raises `ProposalError` if it has more."""
    if len(proposal) > rows:
        raise ProposalError(f"A proposal has {len(proposal)} rows, at most {rows} were asked.")
    return proposal
