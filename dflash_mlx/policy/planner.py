"""Plans the steps of one request: what each step proposes, and what it teaches."""

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
from .step_costs import CHAIN_LENGTHS, MAX_TREE_ROWS

if TYPE_CHECKING:
    from ..drafter.draft_tree import DraftTree

# Drafting has to promise this speed, relative to plain decoding.
MIN_SPEEDUP = 1.02
# At most this many plain steps are decided at once. The number starts at 1 and doubles after every
# second decision for plain steps.
MAX_PLAIN_STEPS = 8
DECISIONS_TO_DOUBLE = 2
# The number of rows in a probe: a step that finds out whether drafting has begun to pay off.
PROBE_ROWS = 4
# A draft that first reads more unread features than this is not timed.
MAX_TIMED_FEATURES = 24


@dataclass(frozen=True)
class DraftCandidate:
    """What one request offers to verify in a step that it shares with other requests.

    Attributes:
        path_probs: [n], in falling order: the probability that each drafted row is accepted.
        propose: returns a proposal with the given number of rows, the anchor included. None for a
            chain that the network has yet to draft, together with those of other requests.
        required: whether all rows have to be verified, whatever they cost.
        unread: the number of features that the network reads before it drafts.
        left: the number of tokens that the text may still have, if it is small.
    """

    path_probs: Sequence[float]
    propose: Callable[[int], Proposal] | None = None
    required: bool = False
    unread: int = 0
    left: int = MAX_TREE_ROWS


@dataclass(frozen=True)
class TreeCandidate:
    """A tree that has to be drafted before its rows can be compared with other candidates.

    Attributes:
        session: the session that drafts the tree.
        rows, width: the arguments for `SupportsTrees.propose_tree`.
        ready: turns the drafted tree into a candidate.
    """

    session: SupportsTrees
    rows: int
    width: int
    ready: Callable[[DraftTree], DraftCandidate]


class Planner:
    """Plans the steps of one request. This class always drafts as many rows as allowed.

    Args:
        tree_rows: the number of rows in every tree, its root included; None to draft chains.
    """

    def __init__(self, tree_rows: int | None = None) -> None:
        self._tree_rows = tree_rows

    def propose(self, session: DraftSession, anchor: int, width: int) -> Proposal:
        """Propose the rows of the next step, the anchor first, in paths of at most `width` rows.

        Raises:
            ProposalError: the drafter returned too many rows.
        """
        network = session.network
        rows = self._tree_rows
        if rows is not None and width > 1 and isinstance(network, SupportsTrees):
            return network.propose_tree(anchor, rows, width).propose(rows)
        if self._takes_lookup(session, session.lookup_rates(anchor, width), width):
            return checked(session.propose_lookup(anchor, width), width)
        return checked(session.propose(anchor, width), width)

    def _takes_lookup(self, session: DraftSession, rates: Sequence[float], width: int) -> bool:
        """Whether lookup promises more than half of the longest draft of the network."""
        return session.network is None or sum(path_probabilities(rates)) > (width - 1) / 2

    def next_is_plain(self, session: DraftSession, anchor: int, width: int) -> bool:
        """Whether the step after this plain one will be plain whatever token this one returns."""
        return self.finds_no_draft(session, anchor, width)

    def finds_no_draft(self, session: DraftSession, anchor: int, width: int) -> bool:
        """Whether there is nothing to draft here without asking the network."""
        return width == 1

    def candidate(
        self, session: DraftSession, anchor: int, width: int
    ) -> DraftCandidate | TreeCandidate:
        """Return what this request offers to verify in a step that other requests share."""
        network = session.network
        if self._tree_rows is not None and width > 1 and isinstance(network, SupportsTrees):
            return TreeCandidate(network, rows=self._tree_rows, width=width, ready=self._ready)
        rates = session.lookup_rates(anchor, width)
        if self._takes_lookup(session, rates, width):
            propose = partial(session.propose_lookup, anchor)
            return DraftCandidate([1.0] * len(rates), propose=propose, required=True)
        return DraftCandidate([1.0] * (width - 1), required=True)

    def observe(self, proposal: Proposal, tokens: Sequence[int], seconds: float | None) -> None:
        """Record the result of a step.

        Args:
            proposal: the rows that the target verified.
            tokens: the accepted drafts, and the token that the target chose after them.
            seconds: the duration of the step; None if it is not known.
        """

    def observe_shared(self, proposal: Proposal, tokens: Sequence[int]) -> None:
        """Record the result of a step that other requests shared, which `observe` does not time."""

    def _ready(self, tree: DraftTree, left: int = MAX_TREE_ROWS) -> DraftCandidate:
        self._tree: DraftTree | None = tree
        return DraftCandidate(
            _tree_probs(tree), propose=tree.propose, required=bool(self._tree_rows), left=left
        )


class AdaptivePlanner(Planner):
    """Drafts the number of rows that brings the most tokens per second, or none if none pays off.

    Args:
        policy: the costs and estimates that all requests of a pair share.
        temperature: the request's temperature, which selects the acceptance estimates.
    """

    def __init__(self, policy: DraftPolicy, temperature: float = 0.0) -> None:
        super().__init__()
        self._estimates = policy.estimates_at(temperature)
        self._request_estimates = AcceptanceEstimates(policy.block_size - 1)
        self._policy = policy
        self._costs = policy.costs
        self._trees = policy.trees
        # A drafter that drafts token by token takes longer for every token, used or not.
        self._by_slot = policy.slot_cost is not None
        self._budget = Budget()
        # Plain steps that are already decided, the current one included. `_learn` counts them down.
        self._plain_left = 0
        # Consecutive decisions that found nothing to draft.
        self._plain_decisions = 0
        # The current step: what it drafts, its tree if it has one, and how many features the
        # network reads first.
        self._kind = "chain"
        self._tree = None
        self._unread = 0

    def propose(self, session: DraftSession, anchor: int, width: int) -> Proposal:
        """Propose the chain, tree or lookup draft that promises the most tokens per second."""
        self._kind = "chain"
        self._tree = None
        self._unread = 0
        if self._costs.needs_plain_step():
            return Proposal([anchor])
        width = min(width, self._policy.block_size)
        network = session.network
        length = 1  # of the best chain: while plain steps are left, the anchor alone
        if self._plain_left == 0:  # `_learn` counts them down
            if network is not None:
                length = self._length(width)
            self._plain_decisions = 0 if length > 1 else self._plain_decisions + 1
            self._plain_left = plain_steps_after(self._plain_decisions)
        rates = session.lookup_rates(anchor, width)[: width - 1]
        if rates:
            probs = path_probabilities(rates)
            speed = max(MIN_SPEEDUP, self._speed(length))
            lengths = range(2, len(probs) + 2)  # the anchor and one drafted token or more
            rows = self._best("lookup", probs=probs, rows=lengths, speed=speed)
            if rows > 1:
                self._kind = "lookup"
                return checked(session.propose_lookup(anchor, rows), rows)
        if network is None or length == 1:
            return Proposal([anchor])
        self._unread = network.pending_features
        if isinstance(network, SupportsTrees) and self._trees is not None:
            if self._trees.should_draft_tree(self._speed(length)):
                # If every level takes a forward of the drafter, a tree gets no more than the chain.
                tree_width = length if self._by_slot else width
                return self._propose_tree(network, anchor, tree_width)
        return checked(network.propose(anchor, length), length)

    def next_is_plain(self, session: DraftSession, anchor: int, width: int) -> bool:
        """Whether more plain steps are decided and lookup finds no draft."""
        return self._plain_left > 1 and self.finds_no_draft(session, anchor, width)

    def finds_no_draft(self, session: DraftSession, anchor: int, width: int) -> bool:
        """Whether lookup finds no draft."""
        return not session.lookup_rates(anchor, width)

    def candidate(
        self, session: DraftSession, anchor: int, width: int
    ) -> DraftCandidate | TreeCandidate:
        """Return the lookup draft or the network's draft, whichever promises more tokens."""
        self._kind = "chain"
        self._tree = None
        self._plain_left = 0
        width = min(width, self._policy.block_size)
        network = session.network
        probs = self._request_estimates.seen_by(self._estimates)[: width - 1]
        lookup_probs = path_probabilities(session.lookup_rates(anchor, width))
        if network is None or sum(lookup_probs) > sum(probs):
            self._kind = "lookup"
            propose = partial(session.propose_lookup, anchor)
            return DraftCandidate(lookup_probs, propose=propose, left=width)
        trees = self._trees is not None and width > 1 and not self._by_slot
        if trees and isinstance(network, SupportsTrees):
            self._kind = "tree"
            ready = partial(self._ready, left=width)
            return TreeCandidate(network, rows=MAX_TREE_ROWS, width=width, ready=ready)
        return DraftCandidate(probs, unread=network.pending_features, left=width)

    def observe(self, proposal: Proposal, tokens: Sequence[int], seconds: float | None) -> None:
        """Learn from the accepted drafts and the duration, and charge the cost to the budget."""
        rows = len(proposal)
        if rows == 1:
            self._estimates.fade()
        self._learn(proposal, tokens)
        cost = self._costs.cost(self._kind, rows)
        is_timed = self._unread <= MAX_TIMED_FEATURES
        self._costs.observe(self._kind, rows, seconds if is_timed else None)
        self._budget.record(cost, len(tokens))
        network_drafted = rows > 1 and self._kind != "lookup"
        self._policy.count(network_drafted, len(tokens), cost)
        if self._tree is not None and self._trees is not None:
            self._trees.observe(len(tokens), cost)

    def observe_shared(self, proposal: Proposal, tokens: Sequence[int]) -> None:
        """Learn from the accepted drafts. The batch times its own steps.

        Plain steps do not fade the estimates here: with many requests, they would fade too fast.
        """
        self._learn(proposal, tokens)

    def _learn(self, proposal: Proposal, tokens: Sequence[int]) -> None:
        """Learn from the accepted drafts of a step, and the token after them."""
        drafted = len(proposal) - 1
        accepted = len(tokens) - 1
        if not drafted:
            self._plain_left = max(0, self._plain_left - 1)
        elif self._kind == "chain":
            self._estimates.learn(drafted, accepted)
            self._request_estimates.learn(drafted, accepted)
        elif self._tree is not None:
            self._learn_from_tree(self._tree, tokens)

    def _length(self, width: int) -> int:
        """The number of rows in the best chain, or 1 for a plain step."""
        rows = [*CHAIN_LENGTHS[: bisect_left(CHAIN_LENGTHS, width)], width]
        best = self._best("chain", self._estimates.path_probs, rows)
        probe = min(PROBE_ROWS, self._policy.block_size)
        if best == 1 < probe <= width:
            cost = self._costs.cost("chain", probe)
            if cost <= self._budget.max_cost and self._policy.should_probe(cost):
                return probe
        return best

    def _best(
        self, kind: str, probs: Sequence[float], rows: Sequence[int], speed: float = MIN_SPEEDUP
    ) -> int:
        """The best number of rows, or 1 if none is within the budget and faster than `speed`.

        Args:
            kind: "chain", "lookup" or "tree".
            probs: the probability that each drafted row is accepted, in falling order.
            rows: the numbers of rows to compare.
            speed: the speed to beat, relative to plain decoding.
        """
        tokens = list(accumulate(probs, initial=1.0))
        best = 1
        for count, cost in zip(rows, self._costs.costs(kind, rows), strict=True):
            if tokens[count - 1] > speed * cost and self._can_afford(probs, cost):
                best = count
                speed = tokens[count - 1] / cost
        return best

    def _can_afford(self, probs: Sequence[float], cost: float) -> bool:
        """Whether the budget allows a step of this cost."""
        budget = self._budget
        if cost > budget.max_cost:
            return False
        return cost <= budget.free_cost or expected_loss(probs, cost) <= budget.max_expected_loss

    def _speed(self, length: int) -> float:
        """The expected speed of a chain, relative to plain decoding."""
        tokens = 1 + sum(self._estimates.path_probs[: length - 1])
        return tokens / self._costs.cost("chain", length)

    def _propose_tree(self, session: SupportsTrees, anchor: int, width: int) -> Proposal:
        """Draft a tree and propose the part of it that promises the most tokens per second."""
        self._tree = session.propose_tree(anchor, MAX_TREE_ROWS, width)
        self._kind = "tree"
        probs = _tree_probs(self._tree)
        sizes = range(2, len(probs) + 2)  # the anchor and one drafted row or more
        best = self._best("tree", probs, sizes, speed=0.0)
        return self._tree.propose(max(2, best))

    def _learn_from_tree(self, tree: DraftTree, text: Any) -> None:
        """Learn what the tree's chain of first choices would have taught if it had been drafted.

        `text` is the tokens of the step. Slots after them were not tried.
        """
        chain: Any = tree.propose_chain(tree.slots + 1).tokens  # the anchor first
        comparable = min(tree.slots, len(text))
        accepted = 0
        while accepted < comparable and chain[1 + accepted] == text[accepted]:
            accepted += 1
        self._estimates.learn(min(accepted + 1, comparable), accepted)


def plain_steps_after(decisions: int) -> int:
    """The number of plain steps to take after so many decisions that found nothing to draft."""
    if decisions == 0:
        return 0
    return min(MAX_PLAIN_STEPS, 2 ** (decisions // DECISIONS_TO_DOUBLE))


def _tree_probs(tree: DraftTree) -> list[float]:
    """The probability that each drafted row of a tree is accepted."""
    return [exp(log_prob) for log_prob in tree.log_probs[1:]]


def checked(proposal: Proposal, rows: int) -> Proposal:
    """Return a proposal of at most `rows` rows. Raises `ProposalError` if it has more."""
    if len(proposal) > rows:
        raise ProposalError(
            f"A proposal has {len(proposal)} rows, but at most {rows} were requested."
        )
    return proposal
