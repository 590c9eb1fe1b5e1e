"""How large the draft tree of a round is: as large as asked for, or as large as pays.

Its nodes come in best-first order, so one drafted tree holds the best tree of every size n, and the
running sum of its nodes' path probabilities is the tokens expected of each. `TreePolicy` takes the
size with the largest

    tokens(n) - speed * seconds(n)

where `speed` is what drafting brings in the long run, so that a round gets the seconds that would
bring less elsewhere. The chain of favourites is one more thing that a tree can be cut down to.
Where chains are as fast on the whole, rounds draft just those: they wait for the device once less.

What was really right corrects all this. The text does not depend on what is drafted, so once it has
gone on past a tree, every size of it is scored by the tokens that it *would* have brought.
Decisions depend on measured costs and on tokens, never on the clock.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from ..drafter.calibration import Calibration
from ..drafter.tree import DraftTree, Tree
from ..errors import SettingsError
from ..proposal import Proposal
from ..sharpness import Sharpness
from .costs import Costs, curve, pair_costs
from .tree_costs import MOST_ROWS, measure_trees
from .widths import Policy

if TYPE_CHECKING:
    from ..target import Target

MEMORY = 0.98  # a tree's weight against the next one's: the last 50 or so count
DOUBT = 20.0  # tokens for which expectations count as right before anything is known
SHOWN = (8, 16, 32, 64)  # sizes in an explanation
TRIALS = 6  # trees before chains may win
FIRST_PAUSE, LONGEST_PAUSE = 16, 256  # rounds of chains before another tree


class FixedBudget:
    """Every tree as large as asked for.

    Args:
        rows: of a tree, the anchor included. Raises `SettingsError` unless there are 2 or more.
    """

    def __init__(self, rows: int) -> None:
        if not isinstance(rows, int) or rows < 2:
            raise SettingsError(f'tree_budget must be 2 or more, or "auto", not {rows!r}.')
        self.rows = rows
        self._calibrations: dict[float, Calibration] = {}

    def begin(self) -> None:
        """A request begins."""

    def sharpness(self, temperature: float) -> Sharpness:
        """Of chains, which are not drafted."""
        return Sharpness()

    def calibration(self, temperature: float) -> Calibration:
        """What was learnt about the drafter's probabilities at this temperature."""
        return self._calibrations.setdefault(temperature, Calibration())

    def size(self, context: int, limit: int) -> tuple[int, int]:
        """The rows of the next round's chain, and of its tree: 1 if it is not to draft one."""
        return 1, self.rows if limit > 1 else 1

    def cut(self, tree: DraftTree) -> Proposal:
        """What of a tree to verify: all of it."""
        return tree.propose(self.rows)

    def observe(self, proposal: Proposal, accepted: int, from_tree: bool) -> None:
        """Take in how many nodes of a round's proposal the target kept."""

    def learn(self, tree: DraftTree, proposal: Proposal, picks: Sequence[int]) -> None:
        """Take in the candidates that the text went on with, and what of the tree was verified."""

    def describe(self) -> list[str]:
        """What was learnt, a line each."""
        return [
            f"temperature {temperature:g}: log q counts {known.weights[0]:.2f}-fold"
            for temperature, known in self._calibrations.items()
        ]


class TreePolicy:
    """The budget that pays best; kept, it knows for the next request what this one learnt.

    Args:
        chains: decides whether to draft at all, and how wide chains are.
        costs: of trees, on this machine.
    """

    def __init__(self, chains: Policy, costs: Costs) -> None:
        self.chains, self.costs, self.rows = chains, costs, MOST_ROWS
        self._calibrations: dict[float, Calibration] = {}
        self._trees, self._narrow = _Ledger(self.rows), _Ledger(chains.widest)
        self._tokens, self._spent = 0.0, 0.0  # what the trees so far brought, and their seconds
        self._scored, self._paused, self._pause = 0, 0, FIRST_PAUSE
        self._depth = 0
        self._tables: dict[int, tuple[np.ndarray, np.ndarray, np.ndarray]] = {}  # by depth

    def begin(self) -> None:
        """A request begins, see `Policy.begin`."""
        self.chains.begin()

    def sharpness(self, temperature: float) -> Sharpness:
        """What was learnt about the drafter's chains at this temperature."""
        return self.chains.sharpness(temperature)

    def calibration(self, temperature: float) -> Calibration:
        """What was learnt about the drafter's probabilities at this temperature."""
        return self._calibrations.setdefault(temperature, Calibration())

    def size(self, context: int, limit: int) -> tuple[int, int]:
        """The rows of the next round's chain, and of its tree: 1 if it is not to draft one."""
        width = self.chains.width(context, limit)
        self._look_up(context)
        if width > 1 and not self._paused:
            return width, self.rows
        self._paused = max(0, self._paused - (width > 1))
        return width, 1

    def cut(self, tree: DraftTree) -> Proposal:
        """The part of a tree, or the chain instead of it, that is worth most beyond its cost."""
        trees = self._trees.corrected(expected_tokens(tree.tree))
        chains = self._narrow.corrected(expected_tokens(tree.chain)[: self.chains.widest])
        of_trees, of_chains = self._of_trees[: len(trees)], self._of_chains[: len(chains)]
        speed = max(self._speeds())
        if not self._scored:
            speed = max((trees / of_trees).max(), (chains / of_chains).max())
        affordable = self.chains.affordable
        trees = np.where(of_trees <= affordable, trees - speed * of_trees, -np.inf)
        chains = np.where(of_chains <= affordable, chains - speed * of_chains, -np.inf)
        if chains.max() >= trees.max():
            return tree.propose_chain(int(chains.argmax()) + 1)
        return tree.propose(int(trees.argmax()) + 1)

    def observe(self, proposal: Proposal, accepted: int, from_tree: bool) -> None:
        """Take in how many nodes of a round's proposal the target kept."""
        if from_tree:
            self.chains.book(self._seconds(proposal), accepted)
        else:
            self.chains.observe(len(proposal) - 1, accepted)

    def learn(self, tree: DraftTree, proposal: Proposal, picks: Sequence[int]) -> None:
        """Take in the candidates that the text went on with, and what of the tree was verified."""
        right = matching(tree.chain.picks[1:], picks)
        rows = tree.tree.path(picks)
        self.chains.learn(min(tree.slots, self.chains.widest - 1), right)
        self._narrow.book(expected_tokens(tree.chain), range(1, right + 1))
        self._trees.book(expected_tokens(tree.tree), rows)
        path = range(1, right + 1) if proposal.is_chain else rows
        self._tokens = MEMORY * self._tokens + 1 + sum(row < len(proposal) for row in path)
        self._spent = MEMORY * self._spent + self._seconds(proposal)
        self._scored += 1
        trees, chains = self._speeds()
        if trees >= chains:
            self._pause = FIRST_PAUSE
        elif self._scored >= TRIALS:
            self._paused, self._pause = self._pause, min(2 * self._pause, LONGEST_PAUSE)

    def describe(self) -> list[str]:
        """The costs and the beliefs that the sizes follow from, a line each."""
        lines = self.chains.describe()
        if self._scored:
            plain = float(self._of_rounds[0])
            trees, chains = (speed * plain for speed in self._speeds())
            lines.append(f"trees: {trees:.2f} x the speed, chains in their place: {chains:.2f} x")
            for rows in SHOWN:
                cost, tokens = self._of_trees[rows - 1] / plain, self._trees.mean()[rows - 1]
                lines.append(f"a tree of {rows}: {cost:.2f} x plain, {tokens:.2f} tokens")
        return lines

    def _look_up(self, context: int) -> None:
        """The costs at this depth; they hold until the context has doubled."""
        if self._depth <= context < 2 * self._depth:
            return
        self._depth = 1 << max(context, 1).bit_length() - 1
        if self._depth not in self._tables:  # each request passes the same depths
            self._tables[self._depth] = self._costs_at(self._depth)
        self._of_rounds, self._of_chains, self._of_trees = self._tables[self._depth]

    def _costs_at(self, depth: int) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        """Seconds of rounds of 1, 2, ... rows that draft chains, cut chains, and cut trees."""
        costs, widest = self.chains.costs, self.chains.widest
        rounds, verify = costs.rounds(depth, widest), curve(costs.verify, depth, widest)
        # A chain cut from a tree pays for the tree, however short it is.
        whole = max(curve(self.costs.draft, depth, 1)[0], rounds[-1])
        chains = np.array(verify) + (whole - verify[-1])
        return np.array(rounds), chains, np.array(curve(self.costs.verify, depth, self.rows))

    def _seconds(self, proposal: Proposal) -> float:
        """Of a round that drafts a tree and verifies this part of it."""
        rows = len(proposal)
        known = proposal.is_chain and rows <= len(self._of_chains)
        return float((self._of_chains if known else self._of_trees)[rows - 1])

    def _speeds(self) -> tuple[float, float]:
        """Tokens per second of trees, and what chains of the best width would have had instead."""
        if not self._scored:
            return 0.0, 0.0
        return self._tokens / self._spent, float((self._narrow.mean() / self._of_rounds).max())


def drafts_trees(drafter: Any) -> bool:
    """Whether a drafter's sessions have `propose_tree`."""
    return getattr(drafter, "drafts_trees", False)


def tree_policy(
    target: Target, drafter: Any, kv_bits: int | None = None, again: bool = False
) -> TreePolicy | Policy:
    """The policy of a pair, with trees where both of them can have them; see `Policy.of`."""
    chains = Policy.of(target, drafter, kv_bits=kv_bits, again=again)
    if not (drafts_trees(drafter) and target.supports_trees):
        return chains
    costs = pair_costs(target, drafter, chains.widest, kv_bits, again, measure_trees)
    return TreePolicy(chains, costs)


class _Ledger:
    """What the first 1, 2, ... rows of drafts were expected to bring, and what they brought.

    Old drafts count less. The token that every round brings is left out.
    """

    def __init__(self, rows: int) -> None:
        self._expected, self._brought, self._drafts = np.zeros(rows), np.zeros(rows), 0.0

    def corrected(self, tokens: np.ndarray) -> np.ndarray:
        """Expected tokens [n] of a draft's first rows, by how it went so far."""
        factors = (self._brought + DOUBT) / (self._expected + DOUBT)
        return 1 + (tokens - 1) * factors[: len(tokens)]

    def book(self, tokens: np.ndarray, right: Sequence[int]) -> None:
        """Take in a draft: the tokens [n] expected of it, and the rows that were right."""
        rows = len(self._expected)
        brought = np.bincount(right, minlength=rows)[:rows].cumsum()
        expected = np.pad(tokens[:rows] - 1, (0, max(0, rows - len(tokens))), mode="edge")
        self._brought = MEMORY * self._brought + brought
        self._expected = MEMORY * self._expected + expected
        self._drafts = MEMORY * self._drafts + 1

    def mean(self) -> np.ndarray:
        """Tokens that a round of 1, 2, ... rows brought on average."""
        return 1 + self._brought / max(1.0, self._drafts)


def expected_tokens(tree: Tree) -> np.ndarray:
    """Of rounds that verify the first 1, 2, ... rows: the sum of their paths' probabilities."""
    return np.exp(tree.log_probs).cumsum()


def matching(favourites: Sequence[int], picks: Sequence[int]) -> int:
    """How many of the favourites were right before the first wrong one."""
    pairs = zip(favourites, picks, strict=False)
    return next((at for at, (a, b) in enumerate(pairs) if a != b), min(len(favourites), len(picks)))
