"""How many rows each step drafts and verifies: as many as bring the most tokens per second.

A step of w rows commits 1 + a_1 + a_1 a_2 + ... tokens, where a_j is the acceptance rate of slot j.
The policy divides by what such a step costs, and takes the best, which may be a plain step. A
budget bounds what a request can lose while the estimates are wrong.
"""

from __future__ import annotations

from itertools import accumulate
from typing import TYPE_CHECKING

from ..drafter.protocol import Drafter, check_pair, drafts_trees, is_drafter, slot_cost
from ..drafter.protocol import block_size as drafter_block_size
from ..errors import SettingsError
from ..validation import brief, check_integer
from .estimates import AcceptanceEstimates
from .step_costs import StepCosts

if TYPE_CHECKING:
    from ..targets import Target

MOST_ROWS = 1024  # of a step, beyond what any machine could want
SHOWN = (2, 4, 8, 12, 16)  # rows in a description
PROBE_LOSS = 1.0  # plain steps that a probe may lose after the shortest pause
# plain tokens before a probe, which doubles them if it fails
FIRST_PAUSE = 32
LONGEST_PAUSE = 512
QUICKLY = 16  # plain tokens after which a failed draft says nothing new
TREE_MEMORY = 0.95  # weight of a tree relative to the next one
TREE_TRIALS = 4  # trees before chains may replace them
TREE_PAUSE = 64  # drafts after which one is a tree anyway


class DraftPolicy:
    """Chooses draft lengths. Keep it: the next request starts with what this one learnt.

    Args:
        block_size: the most rows of a chain.
        trees: whether it drafts trees, too, where they are better.
        slot_cost: what each drafted token is likely to cost; see `drafter.protocol.slot_cost`.

    Attributes:
        block_size, slot_cost: as given.
        costs: of steps.
        trees: how trees did, compared with chains; None if there are none.
    """

    def __init__(
        self, block_size: int, trees: bool = False, slot_cost: float | None = None
    ) -> None:
        self.block_size = block_size
        self.slot_cost = slot_cost
        self.costs = StepCosts(slot_cost)
        self.trees = TreeRecord() if trees else None
        self._learnt: dict[float, AcceptanceEstimates] = {}
        self._plain_tokens = 0.0
        self._pause = FIRST_PAUSE

    @classmethod
    def of(
        cls, target: Target, drafter: Drafter | None, block_size: int = 16, trees: bool = False
    ) -> DraftPolicy:
        """The policy of a pair. It is ready at once: costs are learnt from real steps.

        Args:
            target, drafter: the pair, as `load` returns it.
            block_size: the most rows of a step; the drafter's own limits it too.
            trees: whether to draft trees where they are better, if the pair can.

        Raises `SettingsError`, also without a drafter: plain decoding drafts nothing.
        """
        check_pair(target, None)
        if not is_drafter(drafter):
            raise SettingsError(f"A policy is for a target and its drafter, not {brief(drafter)}.")
        asked = check_integer("block_size", block_size, most=MOST_ROWS)
        most = min(asked, drafter_block_size(drafter) or MOST_ROWS)
        reads_trees = trees and target.supports_trees and drafts_trees(drafter)
        return cls(most, reads_trees, slot_cost(drafter, target))

    def learnt(self, temperature: float) -> AcceptanceEstimates:
        """What earlier requests at about this temperature have taught."""
        rounded = min(2.0, round(2 * temperature) / 2)
        if rounded not in self._learnt:
            self._learnt[rounded] = AcceptanceEstimates(self.block_size - 1)
        return self._learnt[rounded]

    def should_probe(self, cost: float) -> bool:
        """Whether it is time to draft although it does not seem to pay.

        A dear probe waits longer, as it may lose more; but it comes, for costs may be wrong.
        """
        pause = self._pause * max(1.0, (cost - 1) / PROBE_LOSS)
        return self._plain_tokens >= min(pause, LONGEST_PAUSE)

    def count(self, drafted: bool, tokens: float, cost: float) -> None:
        """Take in a step, for the time of the next probe."""
        if not drafted:
            self._plain_tokens += tokens
            return
        if tokens > cost:
            self._pause = FIRST_PAUSE
        elif self._plain_tokens > QUICKLY:
            self._pause = min(LONGEST_PAUSE, 2 * self._pause)
        self._plain_tokens = 0.0

    def describe(self, temperature: float = 0.0) -> list[str]:
        """The costs and estimates that draft lengths follow from, a line each.

        Without estimates where none were learned at about this temperature: lookup keeps its own.
        """
        estimates = self.learnt(temperature)
        tokens = [*accumulate(estimates.path_probs, initial=1.0)]
        plain = self.costs.plain_seconds
        timed = "was not timed yet" if plain is None else f"takes {1e3 * plain:.2f} ms"
        shown = f"a plain step {timed}"
        if estimates.path_probs == AcceptanceEstimates(self.block_size - 1).path_probs:
            return [f"{shown}; no acceptance rates were learned here (lookup keeps its own)"]
        pairs = [(rows, self.costs.cost("chain", rows)) for rows in SHOWN if rows <= len(tokens)]
        return [shown] + [
            f"{rows} rows: {cost:.2f} x plain, {tokens[rows - 1]:.2f} tokens: "
            f"{tokens[rows - 1] / cost:.2f} x the speed"
            for rows, cost in pairs
        ]


class TreeRecord:
    """Whether trees bring more tokens per second than chains."""

    def __init__(self) -> None:
        self._tokens = 0.0
        self._cost = 0.0
        self._trees = 0
        self._wait = 0

    def should_draft_tree(self, chain_speed: float) -> bool:
        """Whether the next draft should be a tree, where a chain promises such a speed."""
        self._wait += 1
        better = self._tokens >= chain_speed * self._cost
        return self._trees < TREE_TRIALS or better or self._wait % TREE_PAUSE == 0

    def observe(self, tokens: int, cost: float) -> None:
        """Take in a step that verified a tree."""
        self._trees += 1
        self._tokens = TREE_MEMORY * self._tokens + tokens
        self._cost = TREE_MEMORY * self._cost + cost
