"""One request's draft lengths: what each step proposes, and what is learnt from it."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import accumulate
from math import exp
from typing import TYPE_CHECKING, Any

from ..drafter.protocol import DraftSession, SupportsTrees
from ..errors import ProposalError
from ..proposal import Proposal
from .budget import Budget, expected_loss
from .draft_policy import DraftPolicy
from .estimates import AcceptanceEstimates, path_probabilities
from .step_costs import LENGTHS, MOST_ROWS

if TYPE_CHECKING:
    from ..drafter.tree import DraftTree

GAIN = 1.02  # what drafting has to promise over plain decoding
MOST_PLAIN = 8  # plain steps in a row that are decided at once,
PATIENCE = 2  # which double after so many decisions for a plain step
PROBE_ROWS = 4  # of a step that finds out whether drafting pays by now
MOST_UNREAD = 24  # features that a draft may read first, and its time still counts


@dataclass(frozen=True)
class DraftCandidate:
    """What a request could have verified in a step that it shares with other requests.

    Attributes:
        path_probs: [n], falling: how likely each drafted row is accepted.
        propose: makes the proposal of so many rows, the anchor included; None for a chain that is
            yet to be drafted by the request's network, together with those of others.
        required: whether all rows have to be verified, whatever they cost.
        unread: features that the network reads before it drafts.
        left: tokens that the text may still have, if they are few.
    """

    path_probs: Sequence[float]
    propose: Callable[[int], Proposal] | None = None
    required: bool = False
    unread: int = 0
    left: int = MOST_ROWS


@dataclass(frozen=True)
class TreeCandidate:
    """A tree that has to be drafted before its rows can be compared with others.

    Attributes:
        session: that drafts it.
        rows, width: as `SupportsTrees.propose_tree` takes them.
        ready: makes a candidate of the tree.
    """

    session: SupportsTrees
    rows: int
    width: int
    ready: Callable[[DraftTree], DraftCandidate]


class Planner:
    """Plans one request's steps: every draft as long as allowed.

    Args:
        tree_rows: of every tree, its root included; None drafts chains.
    """

    def __init__(self, tree_rows: int | None = None) -> None:
        self._tree_rows = tree_rows

    def propose(self, session: DraftSession, anchor: int, width: int) -> Proposal:
        """The rows of the next step, the anchor first, in paths of at most `width` rows.

        Raises `ProposalError` when the drafter returns more rows than it was asked for.
        """
        network = session.network
        rows = self._tree_rows
        if rows is not None and width > 1 and isinstance(network, SupportsTrees):
            return network.propose_tree(anchor, rows, width).propose(rows)
        if self._takes_lookup(session, session.lookup_rates(anchor, width), width):
            return checked(session.propose_lookup(anchor, width), width)
        return checked(session.propose(anchor, width), width)

    def _takes_lookup(self, session: DraftSession, rates: Sequence[float], width: int) -> bool:
        """Whether a lookup of these rates promises more than half of what a network can draft."""
        return session.network is None or sum(path_probabilities(rates)) > (width - 1) / 2

    def next_is_plain(self, session: DraftSession, anchor: int, width: int) -> bool:
        """Whether the step after this plain one is plain, too, whatever this one brings."""
        return self.finds_no_draft(session, anchor, width)

    def finds_no_draft(self, session: DraftSession, anchor: int, width: int) -> bool:
        """Whether plain steps are all that is left, or nothing is at hand to be tried."""
        return width == 1

    def candidate(
        self, session: DraftSession, anchor: int, width: int
    ) -> DraftCandidate | TreeCandidate:
        """What could be verified in a step that other requests share; else as `propose`."""
        network = session.network
        if self._tree_rows is not None and width > 1 and isinstance(network, SupportsTrees):
            return TreeCandidate(network, rows=self._tree_rows, width=width, ready=self._ready)
        rates = session.lookup_rates(anchor, width)
        if self._takes_lookup(session, rates, width):
            propose = partial(session.propose_lookup, anchor)
            return DraftCandidate([1.0] * len(rates), propose, required=True)
        return DraftCandidate([1.0] * (width - 1), required=True)

    def observe(self, proposal: Proposal, tokens: Sequence[int], seconds: float | None) -> None:
        """Take in how a step went.

        Args:
            proposal: what the target verified.
            tokens: the accepted drafts, and the token that the target chose after them.
            seconds: that the step took; None where that is not known.
        """

    def observe_shared(self, proposal: Proposal, tokens: Sequence[int]) -> None:
        """Take in a step that other requests shared, as `observe` does."""

    def _ready(self, tree: DraftTree, left: int = MOST_ROWS) -> DraftCandidate:
        self._tree: DraftTree | None = tree
        return DraftCandidate(_tree_probs(tree), tree.propose, bool(self._tree_rows), left=left)


class AdaptivePlanner(Planner):
    """Drafts as many rows as bring the most tokens per second, and none where none pay."""

    def __init__(self, policy: DraftPolicy, temperature: float = 0.0) -> None:
        super().__init__()
        self._estimates = policy.learnt(temperature)
        self._own = AcceptanceEstimates(policy.block_size - 1)  # of this request alone
        self._policy = policy
        self._costs = policy.costs
        self._trees = policy.trees
        self._by_slot = policy.slot_cost is not None  # a longer draft costs more, used or not
        self._budget = Budget()
        self._plain_left = 0  # plain steps that are decided, the current one included
        self._in_vain = 0  # decisions in a row that found nothing to draft
        # What the step drafts, its tree if it is one, and the features that its network reads first
        self._kind = "chain"
        self._tree = None
        self._unread = 0

    def propose(self, session: DraftSession, anchor: int, width: int) -> Proposal:
        """The chain, tree or lookup draft that promises the most tokens per second."""
        self._kind = "chain"
        self._tree = None
        self._unread = 0
        if self._costs.needs_plain_step():
            return Proposal([anchor])
        width = min(width, self._policy.block_size)
        network = session.network
        length = 1
        if self._plain_left == 0:
            length = 1 if network is None else self._length(width)
            self._in_vain = 0 if length > 1 else self._in_vain + 1
            self._plain_left = plain_steps_after(self._in_vain)
        if rates := session.lookup_rates(anchor, width)[: width - 1]:
            probs = path_probabilities(rates)
            speed = max(GAIN, self._speed(length))
            rows = self._best("lookup", probs=probs, rows=range(2, len(probs) + 2), speed=speed)
            if rows > 1:
                self._kind = "lookup"
                return checked(session.propose_lookup(anchor, rows), rows)
        if network is None or length == 1:
            return Proposal([anchor])
        self._unread = network.pending_features
        if isinstance(network, SupportsTrees) and (trees := self._trees):
            if trees.should_draft_tree(self._speed(length)):
                return self._propose_tree(network, anchor, length if self._by_slot else width)
        return checked(network.propose(anchor, length), length)

    def next_is_plain(self, session: DraftSession, anchor: int, width: int) -> bool:
        """Whether more plain steps are decided, and the text does not repeat itself here."""
        return self._plain_left > 1 and self.finds_no_draft(session, anchor, width)

    def finds_no_draft(self, session: DraftSession, anchor: int, width: int) -> bool:
        """Whether the text does not repeat itself here."""
        return not session.lookup_rates(anchor, width)

    def candidate(
        self, session: DraftSession, anchor: int, width: int
    ) -> DraftCandidate | TreeCandidate:
        """The draft of which more is expected."""
        self._kind = "chain"
        self._tree = None
        self._plain_left = 0
        width = min(width, self._policy.block_size)
        network = session.network
        probs = self._own.seen_by(self._estimates)[: width - 1]
        lookup_probs = path_probabilities(session.lookup_rates(anchor, width))
        if network is None or sum(lookup_probs) > sum(probs):
            self._kind = "lookup"
            return DraftCandidate(lookup_probs, partial(session.propose_lookup, anchor), left=width)
        trees = self._trees is not None and width > 1 and not self._by_slot
        if trees and isinstance(network, SupportsTrees):
            self._kind = "tree"
            return TreeCandidate(
                network, rows=MOST_ROWS, width=width, ready=partial(self._ready, left=width)
            )
        return DraftCandidate(probs, unread=network.pending_features, left=width)

    def observe(self, proposal: Proposal, tokens: Sequence[int], seconds: float | None) -> None:
        """Learn how often drafts are right and what steps take, and book what it cost."""
        rows = len(proposal)
        if rows == 1:
            self._estimates.fade()
        self._learn(proposal, tokens)
        cost = self._costs.cost(self._kind, rows)
        self._costs.observe(self._kind, rows, seconds if self._unread <= MOST_UNREAD else None)
        self._budget.record(cost, len(tokens))
        self._policy.count(rows > 1 and self._kind != "lookup", len(tokens), cost)
        if self._tree is not None and self._trees is not None:
            self._trees.observe(len(tokens), cost)

    def observe_shared(self, proposal: Proposal, tokens: Sequence[int]) -> None:
        """Learn how often drafts are right. The batch observes what its steps cost.

        Plain steps of many requests would fade the estimates, and probes come anyway.
        """
        self._learn(proposal, tokens)

    def _learn(self, proposal: Proposal, tokens: Sequence[int]) -> None:
        """Learn from the accepted drafts of a step, and the token after them."""
        drafted = len(proposal) - 1
        accepted = len(tokens) - 1
        if not drafted:
            self._plain_left = max(0, self._plain_left - 1)
        elif self._kind == "chain":
            for estimates in (self._estimates, self._own):
                estimates.learn(drafted, accepted)
        elif self._tree is not None:
            self._learn_from_tree(self._tree, tokens)

    def _length(self, width: int) -> int:
        """Rows of the best chain; 1 for a plain step."""
        rows = [*LENGTHS[: bisect_left(LENGTHS, width)], width]
        best = self._best("chain", self._estimates.path_probs, rows)
        probe = min(PROBE_ROWS, self._policy.block_size)
        if best == 1 < probe <= width:
            cost = self._costs.cost("chain", probe)
            if cost <= self._budget.max_cost and self._policy.should_probe(cost):
                return probe
        return best

    def _best(
        self, kind: str, probs: Sequence[float], rows: Sequence[int], speed: float = GAIN
    ) -> int:
        """The best of these numbers of rows; 1 if none is within the budget and beats `speed`."""
        tokens = [*accumulate(probs, initial=1.0)]
        best = 1
        budget = self._budget
        for count, cost in zip(rows, self._costs.costs(kind, rows), strict=True):
            if tokens[count - 1] <= speed * cost or cost > budget.max_cost:
                continue
            if cost <= budget.free_cost or expected_loss(probs, cost) <= budget.max_expected_loss:
                best = count
                speed = tokens[count - 1] / cost
        return best

    def _speed(self, length: int) -> float:
        """Tokens per plain step's time that are expected of a chain."""
        tokens = 1 + sum(self._estimates.path_probs[: length - 1])
        return tokens / self._costs.cost("chain", length)

    def _propose_tree(self, session: SupportsTrees, anchor: int, width: int) -> Proposal:
        """The part of a tree that promises the most tokens per second."""
        self._tree = session.propose_tree(anchor, MOST_ROWS, width)
        self._kind = "tree"
        probs = _tree_probs(self._tree)
        best = self._best("tree", probs, range(2, len(probs) + 2), speed=0.0)
        return self._tree.propose(max(2, best))

    def _learn_from_tree(self, tree: DraftTree, text: Any) -> None:
        """Learn from a tree what a chain in its place would have taught."""
        chain: Any = tree.propose_chain(tree.slots + 1).tokens
        pairs = zip(chain[1:], text, strict=False)
        right = next((at for at, (a, b) in enumerate(pairs) if a != b), min(tree.slots, len(text)))
        looked_at = min(right + 1, tree.slots, len(text))
        self._estimates.learn(looked_at, right)


def plain_steps_after(in_vain: int) -> int:
    """Plain steps to take at once, after so many decisions in a row that found nothing to draft."""
    return min(MOST_PLAIN, 2 ** (in_vain // PATIENCE)) if in_vain else 0


def _tree_probs(tree: DraftTree) -> list[float]:
    """How likely each drafted row of a tree is accepted."""
    return [exp(log_prob) for log_prob in tree.log_probs[1:]]


def checked(proposal: Proposal, rows: int) -> Proposal:
    """A proposal of at most so many rows. Raises `ProposalError` if it has more."""
    if len(proposal) > rows:
        raise ProposalError(f"A proposal has {len(proposal)} rows, at most {rows} were asked.")
    return proposal
