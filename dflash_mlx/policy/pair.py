"""What is known about a pair from all of its requests: costs, acceptance, and when to probe."""

from __future__ import annotations

from ..sampling import DraftSharpness
from .estimates import AcceptanceEstimates
from .step_costs import StepCosts

FIRST_PAUSE, LONGEST_PAUSE = 32, 512  # plain tokens before a probe, which doubles them if it fails
QUICKLY = 16  # plain tokens after which a failed draft says nothing new
TREE_MEMORY = 0.95  # weight of a tree relative to the next one
TREE_TRIALS = 4  # trees before chains may replace them
TREE_PAUSE = 64  # drafts after which one is a tree anyway


class PairRecord:
    """What requests of a pair share.

    Args:
        longest: the most rows of a chain.
        trees: whether trees are drafted, too, where they are better.

    Attributes:
        longest: as given.
        costs: of steps.
        trees: how trees did, compared with chains; None if there are none.
    """

    def __init__(self, longest: int, trees: bool = False) -> None:
        self.longest, self.costs = longest, StepCosts(longest)
        self.trees = TreeRecord() if trees else None
        self._estimates: dict[float, AcceptanceEstimates] = {}
        self._sharpness: dict[float, DraftSharpness] = {}
        self._plain_tokens, self._pause = 0, FIRST_PAUSE

    def estimates(self, temperature: float) -> AcceptanceEstimates:
        """Acceptance estimates at about this temperature."""
        new = AcceptanceEstimates(self.longest - 1)
        return self._estimates.setdefault(_rounded(temperature), new)

    def sharpness(self, temperature: float) -> DraftSharpness:
        """How much the drafter's scores count at about this temperature."""
        return self._sharpness.setdefault(_rounded(temperature), DraftSharpness())

    def probes(self, cost: float, cheap: float, most: float) -> bool:
        """Whether it is time to draft although it does not seem to pay.

        A dear probe waits for the longest pause: even costs may have been wrong, or have changed.
        """
        allowed = most if self._plain_tokens >= LONGEST_PAUSE else cheap
        return self._plain_tokens >= self._pause and cost <= allowed

    def count(self, drafted: bool, tokens: int, cost: float) -> None:
        """Take in a step, for the time of the next probe."""
        if not drafted:
            self._plain_tokens += tokens
            return
        if tokens > cost:
            self._pause = FIRST_PAUSE
        elif self._plain_tokens > QUICKLY:
            self._pause = min(LONGEST_PAUSE, 2 * self._pause)
        self._plain_tokens = 0


class TreeRecord:
    """Whether trees bring more tokens per second than chains."""

    def __init__(self) -> None:
        self._tokens, self._cost, self._trees, self._wait = 0.0, 0.0, 0, 0

    def are_wanted(self, chain_speed: float) -> bool:
        """Whether the next draft should be a tree, where a chain promises such a speed."""
        self._wait += 1
        better = self._tokens >= chain_speed * self._cost
        return self._trees < TREE_TRIALS or better or self._wait % TREE_PAUSE == 0

    def observe(self, tokens: int, cost: float) -> None:
        """Take in a step that verified a tree."""
        self._trees += 1
        self._tokens = TREE_MEMORY * self._tokens + tokens
        self._cost = TREE_MEMORY * self._cost + cost


def _rounded(temperature: float) -> float:
    return min(2.0, round(2 * temperature) / 2)
