"""Which planner a request gets, by its settings."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal

from ..drafter.protocol import Drafter, drafts_trees
from ..errors import SettingsError
from ..validation import brief, is_integer
from .draft_policy import DraftPolicy
from .planner import FixedPlanner, Planner

if TYPE_CHECKING:
    from ..targets import Target

LARGEST_TREE = 1024  # rows; a verify's mask has a place for every pair of them


@dataclass(frozen=True)
class FixedPolicy:
    """In a policy's place: every draft as long as allowed.

    Raises `SettingsError` for a number of rows that no tree should have.

    Attributes:
        tree_rows: of every tree, its root included; None drafts chains.
    """

    tree_rows: int | None = None

    def __post_init__(self) -> None:
        if self.tree_rows is not None and not is_integer(self.tree_rows, 2, LARGEST_TREE):
            rows = brief(self.tree_rows)
            raise SettingsError(
                f'tree_budget must be from 2 to {LARGEST_TREE}, or "auto", not {rows}.'
            )

    plain_seconds = None

    def describe(self) -> list[str]:
        """Nothing: no costs are known."""
        return []

    def start(self, temperature: float = 0.0) -> FixedPlanner:
        """A planner for one request."""
        return FixedPlanner(self.tree_rows)


AnyPolicy = DraftPolicy | FixedPolicy


def make_planner(
    target: Target,
    drafter: Drafter | None,
    policy: AnyPolicy | None,
    block_size: int | None,
    tree_budget: int | Literal["auto"] | None,
    temperature: float,
) -> Planner:
    """The planner that the settings of `stream_generate` ask for.

    Raises `SettingsError` when they ask for trees of a drafter that drafts none, and
    `UnsupportedTreeError` when the target cannot read them; "auto" is a chain then.
    """
    if isinstance(tree_budget, str) and tree_budget == "auto":
        if drafter is not None and drafts_trees(drafter) and target.supports_trees:
            if not isinstance(policy, DraftPolicy) or policy.trees is None:
                policy = DraftPolicy.of(target, drafter, trees=True)
    elif tree_budget is not None:
        policy = FixedPolicy(tree_budget)
    elif block_size is not None and isinstance(policy, DraftPolicy):
        policy = None
    if isinstance(policy, FixedPolicy) and policy.tree_rows is not None:
        if not drafts_trees(drafter):
            raise SettingsError("tree_budget needs a drafter that drafts trees: leave it at None.")
        target.check_trees()
    if policy is None or drafter is None:
        policy = FixedPolicy()
    return policy.start(temperature)
