"""How many rows each step drafts and verifies: as many as bring the most tokens per second.

A step of w rows commits 1 + a_1 + a_1 a_2 + ... tokens, where a_j is the acceptance rate of slot j.
The policy divides by what such a step costs, and takes the best, which may be a plain step. A
budget bounds what a request can lose while the estimates are wrong.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal

from ..drafter.protocol import Drafter, block_size, check_pair, drafts_trees
from ..errors import SettingsError
from ..validation import brief, check_integer, is_integer
from .estimates import expected_tokens
from .pair import PairRecord
from .planner import AdaptivePlanner, Planner

if TYPE_CHECKING:
    from ..targets import Target

MOST_ROWS = 1024  # of a step, beyond what any machine could want
LARGEST_TREE = 1024  # rows; a verify's mask has a place for every pair of them
SHOWN = (2, 4, 8, 12, 16)  # rows in a description


class DraftPolicy(PairRecord):
    """Chooses draft lengths. Keep it: the next request starts with what this one learnt.

    Args:
        longest: the most rows of a chain.
        trees: whether it drafts trees, too, where they are better.
    """

    @classmethod
    def of(
        cls, target: Target, drafter: Drafter | None, longest: int = 16, trees: bool = False
    ) -> DraftPolicy:
        """The policy of a pair. It is ready at once: costs are learnt from real steps.

        Args:
            target, drafter: the pair, as `load` returns it.
            longest: the most rows of a step; the drafter's block size limits it too.
            trees: whether to draft trees where they are better, if the pair can.

        Raises `SettingsError`, also without a drafter: plain decoding drafts nothing.
        """
        check_pair(target, None)
        if not isinstance(drafter, Drafter) or isinstance(drafter, type):
            raise SettingsError(f"A policy is for a target and its drafter, not {brief(drafter)}.")
        longest = check_integer("longest", longest, most=MOST_ROWS)
        longest = min(longest, block_size(drafter) or MOST_ROWS)
        return cls(longest, trees and target.supports_trees and drafts_trees(drafter))

    def start(self, temperature: float = 0.0) -> AdaptivePlanner:
        """A planner for one request."""
        return AdaptivePlanner(self, temperature)

    @property
    def plain_seconds(self) -> float | None:
        """Seconds of a plain step of late; None before one was timed."""
        return self.costs.plain_seconds

    def describe(self) -> list[str]:
        """The costs and estimates that draft lengths follow from, a line each."""
        costs, tokens = self.costs.table("chain"), expected_tokens(self.estimates(0.0).paths)
        plain = self.plain_seconds
        lines = ["a plain step was not timed yet"]
        if plain is not None:
            lines = [f"a plain step takes {1e3 * plain:.2f} ms"]
        return lines + [
            f"{rows} rows: {costs[rows - 1]:.2f} x plain, {tokens[rows - 1]:.2f} tokens: "
            f"{tokens[rows - 1] / costs[rows - 1]:.2f} x the speed"
            for rows in SHOWN
            if rows <= self.longest
        ]


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

    def start(self, temperature: float = 0.0) -> Planner:
        """A planner for one request."""
        return Planner(self.tree_rows)


Policy = DraftPolicy  # its former name
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
