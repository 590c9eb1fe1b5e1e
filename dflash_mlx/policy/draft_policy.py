"""Chooses how many rows each step drafts and verifies, to get the most tokens per second.

A step of w rows commits 1 + a_1 + a_1 a_2 + ... tokens, where a_j is the acceptance rate of slot j.
The policy divides this by the cost of the step and takes the best length, which may be a plain
step. A budget limits how much a request can lose while the estimates are wrong.
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

# The largest block size that may be set, far above what pays off on any machine.
MAX_BLOCK_SIZE = 1024
# Numbers of rows that `DraftPolicy.describe` lists.
DESCRIBED_ROWS = (2, 4, 8, 12, 16)
# A probe that can lose this many plain steps runs after the shortest pause.
PROBE_LOSS = 1.0
# Plain tokens before the next probe: at first, and at most. A failed probe doubles them.
FIRST_PAUSE = 32
LONGEST_PAUSE = 512
# A draft that fails within this many plain tokens of the last one does not double the pause.
RETRY_TOKENS = 16
# The weight of a tree relative to the next one.
TREE_DECAY = 0.95
# Trees to draft before chains may replace them.
TREE_TRIALS = 4
# One draft in this many is a tree even if chains have done better.
TREE_PAUSE = 64


class DraftPolicy:
    """Chooses draft lengths. Reuse it, so that the next request starts with what this one learned.

    Args:
        block_size: the maximum number of rows in a chain.
        trees: whether to draft trees where they do better than chains.
        slot_cost: the typical cost of drafting one token, in plain steps, for drafters that draft
            token by token (`drafter.protocol.slot_cost`); else None.

    Attributes:
        block_size, slot_cost: as given.
        costs: the costs of steps.
        trees: how trees did, compared with chains; None if the policy drafts no trees.
    """

    def __init__(
        self, block_size: int, trees: bool = False, slot_cost: float | None = None
    ) -> None:
        self.block_size = block_size
        self.slot_cost = slot_cost
        self.costs = StepCosts(slot_cost)
        self.trees = TreeRecord() if trees else None
        self._estimates: dict[float, AcceptanceEstimates] = {}  # by rounded temperature
        self._plain_tokens = 0.0
        self._pause = FIRST_PAUSE

    @classmethod
    def of(
        cls, target: Target, drafter: Drafter | None, block_size: int = 16, trees: bool = False
    ) -> DraftPolicy:
        """Create the policy of a pair. It measures nothing first: real steps teach it their costs.

        Args:
            target, drafter: the pair that `load` returned.
            block_size: the maximum number of rows in a step. The drafter's block size limits it.
            trees: whether to draft trees where they do better, if the pair supports them.

        Raises:
            SettingsError: a setting is invalid, or there is no drafter.
        """
        check_pair(target, None)
        if not is_drafter(drafter):
            raise SettingsError(f"A policy needs a drafter, not {brief(drafter)}.")
        block_size = check_integer("block_size", block_size, most=MAX_BLOCK_SIZE)
        limit = min(block_size, drafter_block_size(drafter) or MAX_BLOCK_SIZE)
        uses_trees = trees and target.supports_trees and drafts_trees(drafter)
        return cls(limit, trees=uses_trees, slot_cost=slot_cost(drafter, target))

    def estimates_at(self, temperature: float) -> AcceptanceEstimates:
        """The estimates that requests at about this temperature share."""
        rounded = min(2.0, round(2 * temperature) / 2)  # 0, 0.5, 1, 1.5 or 2
        if rounded not in self._estimates:
            self._estimates[rounded] = AcceptanceEstimates(self.block_size - 1)
        return self._estimates[rounded]

    def should_probe(self, cost: float) -> bool:
        """Whether it is time to draft although it does not seem to pay off.

        Expensive probes are rarer because they can lose more. They still happen because the cost
        estimate may be wrong.
        """
        pause = self._pause * max(1.0, (cost - 1) / PROBE_LOSS)
        return self._plain_tokens >= min(pause, LONGEST_PAUSE)

    def count(self, drafted: bool, tokens: float, cost: float) -> None:
        """Count a step's tokens towards the next probe."""
        if not drafted:
            self._plain_tokens += tokens
            return
        if tokens > cost:
            self._pause = FIRST_PAUSE
        elif self._plain_tokens > RETRY_TOKENS:
            self._pause = min(LONGEST_PAUSE, 2 * self._pause)
        self._plain_tokens = 0.0

    def describe(self, temperature: float = 0.0) -> list[str]:
        """The costs and estimates that draft lengths depend on, one line each.

        Estimates are left out if none were learned at about this temperature.
        """
        estimates = self.estimates_at(temperature)
        tokens = list(accumulate(estimates.path_probs, initial=1.0))
        plain = self.costs.plain_seconds
        timed = "was not timed yet" if plain is None else f"takes {1e3 * plain:.2f} ms"
        plain_step = f"a plain step {timed}"
        if estimates.path_probs == AcceptanceEstimates(self.block_size - 1).path_probs:
            return [
                f"{plain_step}; no acceptance rates were learned at this temperature "
                "(a lookup drafter keeps separate ones)"
            ]
        lines = [plain_step]
        for rows in DESCRIBED_ROWS:
            if rows > len(tokens):
                break
            cost = self.costs.cost("chain", rows)
            expected = tokens[rows - 1]
            lines.append(
                f"{rows} rows: {cost:.2f} x plain, {expected:.2f} tokens: "
                f"{expected / cost:.2f} x the speed"
            )
        return lines


class TreeRecord:
    """Records whether trees bring more tokens per second than chains."""

    def __init__(self) -> None:
        self._tokens = 0.0
        self._cost = 0.0
        self._trees = 0
        self._wait = 0

    def should_draft_tree(self, chain_speed: float) -> bool:
        """Whether the next draft should be a tree, given the expected speed of the best chain."""
        self._wait += 1
        better = self._tokens >= chain_speed * self._cost
        return self._trees < TREE_TRIALS or better or self._wait % TREE_PAUSE == 0

    def observe(self, tokens: int, cost: float) -> None:
        """Record a step that verified a tree."""
        self._trees += 1
        self._tokens = TREE_DECAY * self._tokens + tokens
        self._cost = TREE_DECAY * self._cost + cost
