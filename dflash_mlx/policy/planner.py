"""One request's draft lengths: what each step proposes, and what is learnt from it."""

from __future__ import annotations

from functools import partial
from itertools import accumulate
from math import exp
from typing import TYPE_CHECKING, Any, Protocol

from ..drafter.protocol import DraftSession
from ..proposal import Proposal
from ..sampling import DraftSharpness
from .budget import Budget, expected_loss
from .estimates import path_probabilities
from .pair import PairRecord
from .step import Candidate, StepOutcome, TreeCandidate, checked
from .step_costs import LENGTHS, MOST_ROWS

if TYPE_CHECKING:
    from ..drafter.tree import DraftTree

GAIN = 1.02  # what drafting has to promise over plain decoding
MOST_PLAIN = 8  # plain steps in a row that are decided at once,
PATIENCE = 2  # which double after so many decisions for a plain step
PROBE_ROWS, PROBE_LOSS = 4, 1.0  # of a step that finds out whether drafting pays by now
MOST_UNREAD = 24  # features that a draft may read first, and its time still counts


class Planner(Protocol):
    """Plans one request's steps.

    Attributes:
        sharpness: of the drafter, for the request's sampler.
    """

    sharpness: DraftSharpness

    def propose(self, session: DraftSession, anchor: int, limit: int) -> Proposal:
        """The rows of the next step, paths of at most `limit` rows, the anchor first.

        Raises `ProposalError` when the drafter returns more rows than it was asked for.
        """

    def can_pipeline(self, session: DraftSession, anchor: int, limit: int) -> bool:
        """Whether this step is plain, and the next one, too, whatever this one brings."""

    def candidate(
        self, session: DraftSession, anchor: int, limit: int
    ) -> Candidate | TreeCandidate:
        """What could be verified in a step that other requests share; else as `propose`."""

    def observe(self, step: StepOutcome) -> None:
        """Take in how a step went."""


class FixedPlanner:
    """Every draft as long as allowed: a chain, or a tree of `tree_rows` rows."""

    def __init__(self, tree_rows: int | None = None) -> None:
        self.sharpness, self._tree_rows = DraftSharpness(), tree_rows

    def propose(self, session: DraftSession, anchor: int, limit: int) -> Proposal:
        """The session's own draft."""
        if self._tree_rows is None or limit == 1:
            return checked(session.propose(anchor, limit), limit)
        return session.propose_tree(anchor, self._tree_rows, limit).propose(self._tree_rows)

    def can_pipeline(self, session: DraftSession, anchor: int, limit: int) -> bool:
        """Whether nothing is ever drafted."""
        return limit == 1

    def candidate(
        self, session: DraftSession, anchor: int, limit: int
    ) -> Candidate | TreeCandidate:
        """All rows, whatever they cost."""
        network = session.network
        if self._tree_rows is not None and network is not None and limit > 1:
            return TreeCandidate(network, self._tree_rows, limit, self._ready)
        paths, found = [1.0] * (limit - 1), session.lookup_rates(anchor, limit)
        if network is None or sum(path_probabilities(found)) > len(paths) / 2:
            return Candidate(paths, partial(session.propose_lookup, anchor), required=True)
        return Candidate(paths, required=True)

    def _ready(self, tree: DraftTree) -> Candidate:
        return Candidate(_tree_paths(tree), tree.propose, required=True)

    def observe(self, step: StepOutcome) -> None:
        """Nothing is learnt."""


class Backoff:
    """Decides several plain steps at once after decisions that found nothing to draft.

    Attributes:
        left: plain steps that are decided, the current one included.
    """

    def __init__(self) -> None:
        self.left, self._in_vain = 0, 0

    def decided(self, drafts: bool) -> None:
        """Take in a decision."""
        self._in_vain = 0 if drafts else self._in_vain + 1
        self.left = 0 if drafts else min(MOST_PLAIN, 2 ** (self._in_vain // PATIENCE))

    def step(self) -> None:
        """A plain step is over."""
        self.left = max(0, self.left - 1)


class AdaptivePlanner:
    """Drafts as many rows as bring the most tokens per second, and none where none pay."""

    def __init__(self, policy: PairRecord, temperature: float) -> None:
        self._policy, self._costs, self._budget = policy, policy.costs, Budget()
        self._estimates = policy.estimates(temperature)
        self.sharpness = policy.sharpness(temperature)
        self._trees = policy.trees
        self._backoff = Backoff()
        self._kind, self._unread = "chain", 0
        self._tree: DraftTree | None = None

    def propose(self, session: DraftSession, anchor: int, limit: int) -> Proposal:
        """The chain, tree or lookup draft that promises the most tokens per second."""
        self._kind, self._tree, self._unread = "chain", None, 0
        if self._costs.needs_plain_step:
            return Proposal([anchor])
        limit = min(limit, self._policy.longest)
        network, length = session.network, 1
        if self._backoff.left == 0:
            if network is not None:
                length = self._length(limit)
            self._backoff.decided(length > 1)
        if (rows := self._lookup_rows(session, anchor, limit, length)) > 1:
            self._kind = "lookup"
            return checked(session.propose_lookup(anchor, rows), rows)
        if network is None or length == 1:
            return Proposal([anchor])
        self._unread = network.unread
        if self._trees is not None and self._trees.are_wanted(self._speed(length)):
            return self._propose_tree(network, anchor, limit)
        return checked(network.propose(anchor, length), length)

    def can_pipeline(self, session: DraftSession, anchor: int, limit: int) -> bool:
        """Whether more plain steps are decided, and the text does not repeat itself here."""
        return self._backoff.left > 1 and not session.lookup_rates(anchor, limit)

    def candidate(
        self, session: DraftSession, anchor: int, limit: int
    ) -> Candidate | TreeCandidate:
        """The draft of which more is expected."""
        self._kind, self._tree = "chain", None
        self._backoff.left = 2  # whether steps are plain is for the batch to decide
        limit = min(limit, self._policy.longest)
        network, paths = session.network, self._estimates.paths[: limit - 1]
        found = path_probabilities(session.lookup_rates(anchor, limit))
        if network is None or sum(found) > sum(paths):
            self._kind = "lookup"
            return Candidate(found, partial(session.propose_lookup, anchor))
        if self._trees is not None and limit > 1:
            return TreeCandidate(network, MOST_ROWS, limit, self._ready)
        return Candidate(paths)

    def observe(self, step: StepOutcome) -> None:
        """Learn how often drafts are right and what steps take, and book what it cost."""
        rows, accepted = len(step.proposal), step.accepted
        if rows == 1:
            self._estimates.fade()
            self._backoff.step()
        elif self._kind == "chain":
            self._estimates.learn(rows - 1, accepted)
        elif self._tree is not None:
            self._learn_from_tree(self._tree, step.tokens)
        if step.shared:
            return
        cost = self._costs.table(self._kind)[rows - 1]
        seconds = step.seconds if self._unread <= MOST_UNREAD else None
        self._costs.observe(self._kind, rows, seconds)
        self._budget.book(cost, accepted + 1)
        self._policy.count(rows > 1, accepted + 1, cost)
        if self._tree is not None and self._trees is not None:
            self._trees.observe(accepted + 1, cost)

    def _length(self, limit: int) -> int:
        """Rows of the best chain; 1 for a plain step."""
        costs, tokens = self._costs.table("chain"), self._estimates.tokens
        budget, paths = self._budget, self._estimates.paths
        most, cheap, tolerance = budget.limit, budget.cheap, budget.tolerance
        best, best_speed = 1, GAIN
        for rows in (*(rows for rows in LENGTHS if rows < limit), limit):
            cost = costs[rows - 1]
            if tokens[rows - 1] <= best_speed * cost or cost > most:
                continue
            if cost <= cheap or expected_loss(paths, cost) <= tolerance:
                best, best_speed = rows, tokens[rows - 1] / cost
        if best == 1 and limit == self._policy.longest and limit > 1:
            rows = min(PROBE_ROWS, limit)
            if self._policy.probes(costs[rows - 1], cheap - 1 + PROBE_LOSS, most):
                return rows
        return best

    def _speed(self, length: int) -> float:
        """Tokens per plain step's time that are expected of a chain."""
        return self._estimates.tokens[length - 1] / self._costs.table("chain")[length - 1]

    def _lookup_rows(self, session: DraftSession, anchor: int, limit: int, length: int) -> int:
        """Rows of the lookup draft, if it promises more than a drafted chain; else 1."""
        rates, budget = session.lookup_rates(anchor, limit), self._budget
        if not rates:
            return 1
        paths, costs = path_probabilities(rates[: limit - 1]), self._costs.table("lookup")
        best, best_speed = 1, max(GAIN, self._speed(length))
        for rows, tokens in enumerate(accumulate(paths, initial=1.0), 1):
            cost = costs[rows - 1]
            if tokens > best_speed * cost and cost <= budget.limit:
                if cost <= budget.cheap or expected_loss(paths, cost) <= budget.tolerance:
                    best, best_speed = rows, tokens / cost
        return best

    def _propose_tree(self, session: DraftSession, anchor: int, limit: int) -> Proposal:
        """The part of a tree that promises the most tokens per second."""
        tree = session.propose_tree(anchor, MOST_ROWS, limit)
        costs, most = self._costs.table("tree"), self._budget.limit
        best, best_speed = 2, 0.0
        for rows, tokens in enumerate(accumulate(_tree_paths(tree), initial=1.0), 1):
            cost = costs[rows - 1]
            if rows > 1 and tokens > best_speed * cost and cost <= most:
                best, best_speed = rows, tokens / cost
        self._kind, self._tree = "tree", tree
        return tree.propose(best)

    def _ready(self, tree: DraftTree) -> Candidate:
        self._kind, self._tree = "tree", tree
        return Candidate(_tree_paths(tree), tree.propose)

    def _learn_from_tree(self, tree: DraftTree, text: Any) -> None:
        """Learn from a tree what a chain in its place would have taught."""
        chain: Any = tree.propose_chain(tree.slots + 1).tokens
        pairs = zip(chain[1:], text, strict=False)
        right = next((at for at, (a, b) in enumerate(pairs) if a != b), min(tree.slots, len(text)))
        looked_at = min(right + 1, tree.slots, len(text))
        self._estimates.learn(looked_at, right)


def _tree_paths(tree: DraftTree) -> list[float]:
    """How likely each drafted row of a tree is accepted."""
    return [exp(log_prob) for log_prob in tree.log_probs[1:]]
