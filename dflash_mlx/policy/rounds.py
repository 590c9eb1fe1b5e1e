"""What a request's rounds propose, chains or trees, and what is learnt from how they went."""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING, Literal, Protocol

import numpy as np

from ..drafter.protocol import Drafter, DraftSession, drafts_trees
from ..errors import SettingsError
from ..hindsight import Hindsight
from ..proposal import Proposal
from ..sharpness import Sharpness
from .cuts import Cuts, Draft
from .fixed import FixedRounds, FixedWidth
from .offer import Offer, Planting, chain, offer_chain, paths
from .outcome import Outcome
from .rest import Looking
from .trees import Sizes, TreePolicy, matching, tree_policy
from .widths import Policy, Widths

if TYPE_CHECKING:
    from ..drafter.tree import DraftTree
    from ..targets import Target


class Rounds(Protocol):
    """What one request's rounds propose."""

    @property
    def sharpness(self) -> Sharpness:
        """What is known about the drafter's chains at the request's temperature."""

    @property
    def asks_certainty(self) -> bool:
        """Whether an outcome has to say how certain the target was."""

    @property
    def plain_next(self) -> bool:
        """Whether this round is plain, and the next one, too, before this one is read."""

    @property
    def looks_next(self) -> bool:
        """Whether the next round, if it is begun ahead, has to say how certain the target was."""

    @property
    def doubt(self) -> float:
        """How unsure the target was lately; 0 where nobody asks."""

    def begin(self, certainty: float | None) -> None:
        """The prefill has brought the first token; see `Outcome.certainty`."""

    def propose(self, session: DraftSession, anchor: int, context: int, limit: int) -> Proposal:
        """The proposal of a round with `context` tokens committed: paths of at most `limit` rows.

        Raises `ProposalError` when the drafter hands over more rows than were asked for.
        """

    def go_on(
        self, session: DraftSession, anchor: int, context: int, limit: int, shared: bool
    ) -> None:
        """A round begins that was `plain_next`: the target reads its anchor already.

        Many requests that share it rest together.
        """

    def offer(
        self, session: DraftSession, anchor: int, context: int, limit: int, rest: bool = False
    ) -> Offer | Planting:
        """What could be proposed in a round that other requests share; else as `propose`.

        In a round of `rest` (`policy.rest`) that is what costs nothing to draft.
        """

    def observe(self, outcome: Outcome) -> None:
        """Take in how the round went."""


AnyPolicy = FixedWidth | Policy | TreePolicy


class ChainRounds(Looking):
    """Chains, as wide as a policy says.

    A draft that costs nothing is taken where it promises more. Where the target reads trees it may
    also be a second branch of what the network drafts.
    """

    def __init__(self, widths: Widths, sharpness: Sharpness, cuts: Cuts, branches: bool) -> None:
        super().__init__()
        self._widths, self.sharpness, self._cuts = widths, sharpness, cuts
        self._branches = branches
        self._kind: Literal["drafted", "foreseen", "branches"] = "drafted"
        self._draft: Draft | None = None  # this round's, if its drafter says how sure it is,
        self._rows = 1  # and the rows of its drafted chain

    def propose(self, session: DraftSession, anchor: int, context: int, limit: int) -> Proposal:
        """The chain, or the two branches, that bring the most tokens per second."""
        widths, self._kind, self._draft = self._widths, "drafted", None
        width = self._begin_chain(partial(self._width, session, context, limit))
        self._rows = width
        self._reads = session.unread - 1 if width > 1 else 0
        rates = session.lookup_rates(anchor, limit)
        rows, speed = widths.free(rates, context, limit)
        self.plain_next = self.plain_next and rows == 1
        if session.network is None or (rows > 1 and speed > widths.speed(width)):
            self._kind = "foreseen"
            return session.propose_lookup(anchor, rows)
        return self._cut(chain(session.network, anchor, width), session)

    def go_on(
        self, session: DraftSession, anchor: int, context: int, limit: int, shared: bool
    ) -> None:
        """A draft that costs nothing is found here, and taken after the next token."""
        self._kind, self._draft, self._rows = "drafted", None, 1
        self._rests_on(shared, lambda: self._width(session, context, limit) > 1)
        rows, _ = self._widths.free(session.lookup_rates(anchor, limit), context, limit)
        self.plain_next = self.plain_next and rows == 1

    def _width(self, session: DraftSession, context: int, limit: int) -> int:
        """Of the next round's drafted chain; 1 where nothing but a lookup drafts."""
        hears = session.has_confidence
        width = self._widths.width(context, limit, self._certainty.mean, hears)
        return 1 if session.network is None else width

    def offer(
        self, session: DraftSession, anchor: int, context: int, limit: int, rest: bool = False
    ) -> Offer:
        """The chain of which more is expected, drafted or foreseen."""
        self._rest.now, chances = rest, list[float]()
        if not rest:
            self._widths.look(context, self._certainty.mean)
            chances = paths(self._widths.hopes()[: limit - 1])
        offer = offer_chain(session, anchor, limit, chances)
        self._kind, self._draft = "drafted" if offer.draft is None else "foreseen", None
        self.plain_next, self.looks_next = rest and not offer.chances, False
        if chances and offer.draft is None and session.has_confidence:
            return replace(offer, look=partial(self._look, session, shared=True))
        return offer

    def observe(self, outcome: Outcome) -> None:
        """Learn how wide chains are right, and book what the round cost."""
        self._take(outcome)
        outcome = self._without_reading(outcome, self._rows, self._widths.reading)
        widths, rows, accepted = self._widths, len(outcome.proposal), outcome.accepted
        self._cuts.observe(self._draft, outcome, widths)
        if self._draft is not None:
            return
        if outcome.shared:
            if self._kind == "drafted":
                widths.observe_shared(rows - 1, accepted)
        elif self._kind == "foreseen" and rows > 1:
            widths.observe_free(rows, accepted)
        elif self._kind == "branches":
            drafted = np.array(outcome.proposal.tokens)[1 : self._rows].tolist()
            right = matching(drafted, outcome.tokens)
            more = rows - self._rows
            widths.observe_branches(self._rows, more, right, accepted, outcome.seconds)
        else:
            # A round of rest that does not look is not timed: the others say what plain ones take.
            widths.observe(rows - 1, accepted, self._seconds(outcome, widths.ahead))

    def _cut(self, proposal: Proposal, session: DraftSession) -> Proposal:
        """The part of a drafted chain that its drafter trusts, if it says."""
        if len(proposal) == 1 or not session.has_confidence:
            return proposal
        draft = self._look(session, proposal, self._widths.chain_seconds(len(proposal)))
        if not draft.waits:
            return proposal
        return proposal.first(draft.cutting.rows(draft.rates(), draft.measured))

    def _look(
        self,
        session: DraftSession,
        proposal: Proposal,
        measured: np.ndarray,
        shared: bool = False,
    ) -> Draft:
        """The chain that a session has just drafted, and how sure it is; see `Draft`."""
        sure, widths = session.confidence(), self._widths
        assert sure is not None
        beliefs, at = widths.rates(), widths.level
        self._draft = self._cuts.look(proposal, sure, beliefs, at, measured, shared)
        return self._draft


class TreeRounds(Looking):
    """Trees, as large as a policy says, or the chain that pays better.

    Args:
        policy: what is known about the pair.
        temperature: the request's.
        ahead: whether its plain rounds can be begun ahead.
    """

    def __init__(self, policy: TreePolicy, temperature: float, ahead: bool = True) -> None:
        super().__init__()
        self._sizes: Sizes = policy.start(temperature, ahead)
        self._calibration = policy.calibration(temperature)
        self.sharpness = policy.sharpness(temperature)
        # Trees that the text has not passed yet, what of them was verified, and where they began.
        self._waiting: Hindsight[tuple[DraftTree, Proposal, int]] = Hindsight()
        self._is_tree, self._rows = False, 1  # what this round drafted, and a tree's rows
        self._foreseen = 1  # rows of a chain that cost nothing, if it was that

    def propose(self, session: DraftSession, anchor: int, context: int, limit: int) -> Proposal:
        """The part of a tree, or the chain, that brings the most tokens per second."""
        self._rows = 1
        width = self._begin_chain(partial(self._width, context, limit))
        self._is_tree = self._rows > 1
        self._foreseen = self._foresee(session, anchor, context, limit)
        self.plain_next = self.plain_next and self._foreseen == 1
        if self._foreseen > 1:
            return session.propose_lookup(anchor, self._foreseen)
        if not self._is_tree:
            self._reads = session.unread - 1 if width > 1 else 0
            return chain(session.network or session, anchor, width)
        tree = session.propose_tree(anchor, self._rows, limit, self._calibration)
        return self._of(tree, self._sizes.cut(tree))

    def _width(self, context: int, limit: int) -> int:
        """Rows of the next round's chain, or of its tree: then `_rows` are those, else 1."""
        width, self._rows = self._sizes.size(context, limit, self._certainty.mean)
        return max(width, self._rows)

    def _foresee(self, session: DraftSession, anchor: int, context: int, limit: int) -> int:
        """Rows of a chain that costs nothing, and pays; 1 for none."""
        return self._sizes.free(session.lookup_rates(anchor, limit), context, limit)

    def go_on(
        self, session: DraftSession, anchor: int, context: int, limit: int, shared: bool
    ) -> None:
        """A draft that costs nothing is found here, and taken after the next token."""
        self._is_tree = False
        self._rests_on(shared, lambda: self._sizes.pays(context, limit, self._certainty.mean))
        self._foreseen = 1
        found = self._foresee(session, anchor, context, limit)
        self.plain_next = self.plain_next and found == 1

    def offer(
        self, session: DraftSession, anchor: int, context: int, limit: int, rest: bool = False
    ) -> Offer | Planting:
        """A tree to be drafted, or a chain."""
        self._rest.now, rows = rest, 1
        if not rest:
            _, rows = self._sizes.size(context, limit, self._certainty.mean)
        self._is_tree, self._foreseen = rows > 1, 1
        self.plain_next = self.looks_next = False
        if self._is_tree:
            return Planting(rows, limit, self._calibration, self._grow, session.network)
        chances = [] if rest else paths(self._sizes.hopes()[: limit - 1])
        offer = offer_chain(session, anchor, limit, chances)
        self._foreseen = 1 if offer.draft is None else 1 + len(offer.chances)
        self.plain_next, self.looks_next = rest and not offer.chances, False
        return offer

    def _grow(self, tree: DraftTree) -> Offer:
        """What a tree offers."""
        chances = np.exp(tree.tree.log_probs[1:]).tolist()
        return Offer(chances, lambda rows: self._of(tree, tree.propose(rows)), self._sizes.pinned)

    def _of(self, tree: DraftTree, proposal: Proposal) -> Proposal:
        """The part of a tree that is verified; the text will say what all of it was worth."""
        self._waiting.add(tree.slots, (tree, proposal, self._sizes.level))
        return proposal

    def observe(self, outcome: Outcome) -> None:
        """Learn how large trees are right, and book what the round cost."""
        self._take(outcome)
        if outcome.shared:
            if not self._is_tree and self._foreseen == 1:
                self._sizes.observe_shared(len(outcome.proposal) - 1, outcome.accepted)
        elif self._foreseen > 1:
            self._sizes.observe_free(len(outcome.proposal), outcome.accepted)
        else:
            rows = len(outcome.proposal)
            outcome = self._without_reading(outcome, rows, self._sizes.reading)
            of_tree, seconds = self._is_tree, self._seconds(outcome, self._sizes.ahead)
            self._sizes.observe(outcome.proposal, outcome.accepted, of_tree, seconds)
        for (tree, verified, at), text in self._waiting.commit(outcome.tokens):
            self._sizes.learn(tree, verified, tree.learn(text), at)


def plan_rounds(
    target: Target,
    drafter: Drafter | None,
    policy: AnyPolicy | None,
    block_size: int | None,
    tree_budget: int | Literal["auto"] | None,
    temperature: float,
    kv_bits: int | None,
    ahead: bool = True,
) -> Rounds:
    """The rounds that the settings of `stream_generate` ask for.

    `ahead` says whether tokens can be chosen before those that they follow are known.

    Raises `SettingsError` when they ask for trees of a drafter that drafts none, and
    `UnsupportedTreeError` when the target cannot read them; "auto" is a chain then.
    """
    trees = drafter is not None and drafts_trees(drafter)
    if isinstance(tree_budget, str) and tree_budget == "auto":
        if drafter is not None and trees and target.supports_trees:
            policy = policy if isinstance(policy, TreePolicy) else None
            policy = policy or tree_policy(target, drafter, kv_bits)
    elif tree_budget is not None:
        policy = TreePolicy.fixed(tree_budget)
    elif block_size is not None and policy is not None and not _pinned(policy):
        policy = FixedWidth(policy.sharpness(temperature))
    if isinstance(policy, TreePolicy):
        if not trees:
            raise SettingsError("tree_budget needs a drafter that drafts trees: leave it at None.")
        target.check_trees()
        return TreeRounds(policy, temperature, ahead)
    if isinstance(policy, Policy):
        cuts = Cuts(policy.confidence(temperature))
        sharpness, branches = policy.sharpness(temperature), target.supports_trees
        return ChainRounds(policy.start(temperature, ahead), sharpness, cuts, branches)
    return FixedRounds((policy or FixedWidth()).sharpness(temperature))


def _pinned(policy: AnyPolicy) -> bool:
    """Whether every tree has so many rows; then a block size says how deep it may be."""
    return isinstance(policy, TreePolicy) and policy.pinned is not None
