"""What a round proposes, a chain or a tree, and what is learnt from how it went."""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from typing import Any, Literal

from ..drafter.tree import DraftTree
from ..errors import ProposalError, SettingsError
from ..proposal import Proposal
from ..target import Target
from .trees import FixedBudget, TreePolicy, drafts_trees, tree_policy
from .widths import FixedWidth, Policy

AnyPolicy = FixedWidth | Policy | FixedBudget | TreePolicy


class ChainRounds:
    """Chains, as wide as a policy says.

    Attributes:
        sharpness: what is known about the drafter's chains at the request's temperature.
    """

    def __init__(self, policy: Policy | FixedWidth, temperature: float) -> None:
        self._policy, self.sharpness = policy, policy.sharpness(temperature)
        policy.begin()

    def propose(self, session: Any, anchor: int, context: int, limit: int) -> Proposal:
        """The drafter's proposal of at most `limit` rows, with `context` tokens committed.

        Raises `ProposalError` when it has more rows than were asked for.
        """
        return chain(session, anchor, self._policy.width(context, limit))

    def observe(self, proposal: Proposal, accepted: int, tokens: Sequence[int]) -> None:
        """Take in how many nodes the target kept, and the tokens that the text went on by."""
        self._policy.observe(len(proposal) - 1, accepted)


class TreeRounds:
    """Trees, for one request.

    Args:
        budget: how large trees are; it may be kept for further requests.
        temperature: the request's.

    Attributes:
        sharpness: as of `ChainRounds`.
    """

    def __init__(self, budget: FixedBudget | TreePolicy, temperature: float) -> None:
        self._budget, self._calibration = budget, budget.calibration(temperature)
        self.sharpness = budget.sharpness(temperature)
        budget.begin()
        self._text: list[int] = []  # generated so far
        # Trees that the text has not passed yet: where they start, and what of them was verified.
        self._waiting: deque[tuple[int, DraftTree, Proposal]] = deque()
        self._is_tree = False  # what this round drafted

    def propose(self, session: Any, anchor: int, context: int, limit: int) -> Proposal:
        """A chain or a tree whose paths have at most `limit` rows, with `context` tokens committed.

        Raises `ProposalError` when a chain has more rows than were asked for.
        """
        width, rows = self._budget.size(context, limit)
        self._is_tree = rows > 1
        if not self._is_tree:
            return chain(session, anchor, width)
        tree = session.propose_tree(anchor, rows, limit, self._calibration)
        proposal = self._budget.cut(tree)
        self._waiting.append((len(self._text), tree, proposal))
        return proposal

    def observe(self, proposal: Proposal, accepted: int, tokens: Sequence[int]) -> None:
        """Take in how many nodes the target kept, and the tokens that the text went on by."""
        self._budget.observe(proposal, accepted, self._is_tree)
        self._text += tokens
        while self._waiting:
            start, tree, verified = self._waiting[0]
            passed = self._text[start : start + tree.slots]
            if len(passed) < tree.slots:
                return
            self._budget.learn(tree, verified, tree.learn(passed))
            self._waiting.popleft()


def plan_rounds(
    target: Target,
    drafter: Any,
    policy: AnyPolicy | None,
    block_size: int | None,
    tree_budget: int | Literal["auto"] | None,
    temperature: float,
    kv_bits: int | None,
) -> ChainRounds | TreeRounds:
    """The rounds that the settings of `stream_generate` ask for.

    Raises `SettingsError` when they ask for trees of a drafter that drafts none, and
    `UnsupportedTreeError` when the target cannot read them; "auto" is a chain then.
    """
    if tree_budget == "auto":
        possible = drafts_trees(drafter) and target.supports_trees
        if possible and not isinstance(policy, TreePolicy):
            policy = tree_policy(target, drafter, kv_bits)
    elif tree_budget is not None:
        policy = FixedBudget(tree_budget)
    elif block_size is not None and isinstance(policy, Policy | TreePolicy):
        policy = FixedWidth(policy.sharpness(temperature))
    if isinstance(policy, TreePolicy | FixedBudget):
        if not drafts_trees(drafter):
            raise SettingsError("tree_budget needs a drafter that drafts trees: leave it at None.")
        target.check_trees()
        return TreeRounds(policy, temperature)
    return ChainRounds(policy or FixedWidth(), temperature)


def chain(session: Any, anchor: int, width: int) -> Proposal:
    """A session's proposal of at most `width` rows. Raises `ProposalError` when it has more."""
    proposal: Proposal = session.propose(anchor, width)
    if len(proposal) > width:
        raise ProposalError(f"A proposal has {len(proposal)} rows, at most {width} were asked.")
    return proposal
