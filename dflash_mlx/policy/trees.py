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
`TreePolicy` is what is known about a pair, `Sizes` one request's choices.
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from ..drafter.calibration import Calibration
from ..drafter.protocol import Drafter, drafts_trees
from ..drafter.tree import DraftTree, Tree
from ..errors import SettingsError
from ..proposal import Proposal
from ..sharpness import Sharpness
from ..validation import brief, is_integer
from .costs import Costs, Meanwhile, curve, pair_costs
from .tree_costs import MOST_ROWS, measure_trees
from .widths import Policy

if TYPE_CHECKING:
    from ..targets import Target

MEMORY = 0.98  # a tree's weight against the next one's: the last 50 or so count
DOUBT = 20.0  # tokens for which expectations count as right before anything is known
SHOWN = (8, 16, 32, 64)  # sizes in an explanation
LARGEST_TREE = 1024  # rows
TRIALS = 6  # trees before chains may win
FIRST_PAUSE, LONGEST_PAUSE = 16, 256  # rounds of chains before another tree


@dataclass(frozen=True)
class Table:
    """Seconds of rounds of 1, 2, ... rows that draft chains, chains cut from trees, and trees."""

    rounds: np.ndarray
    chains: np.ndarray
    trees: np.ndarray

    def seconds(self, proposal: Proposal) -> float:
        """Of a round that drafts a tree and verifies this part of it."""
        rows = len(proposal)
        known = proposal.is_chain and rows <= len(self.chains)
        return float((self.chains if known else self.trees)[rows - 1])


class TreePolicy:
    """What is known about a pair's trees; kept, it serves the next request, too.

    Args:
        chains: decides whether to draft at all, and how wide chains are.
        costs: of trees, on this machine.
        pinned: rows of every tree, whatever they cost; None for as many as pay.
    """

    def __init__(self, chains: Policy, costs: Costs, pinned: int | None = None) -> None:
        self.chains, self.costs, self.pinned = chains, costs, pinned
        self.rows = pinned or MOST_ROWS
        self.trees, self.narrow = Ledger(self.rows), Ledger(chains.widest)
        self.tokens, self.spent = 0.0, 0.0  # what the trees so far brought, and their seconds
        self.scored, self.pause = 0, FIRST_PAUSE
        self._calibrations: dict[float, Calibration] = {}
        self._tables: dict[int, Table] = {}  # by depth

    @classmethod
    def fixed(cls, rows: int) -> TreePolicy:
        """Every tree of so many rows, the anchor included.

        Raises `SettingsError` unless there are 2 or more, and no more than any machine could want:
        the mask of a verify has a place for every pair of rows.
        """
        if not is_integer(rows, 2, LARGEST_TREE):
            raise SettingsError(
                f'tree_budget must be from 2 to {LARGEST_TREE}, or "auto", not {brief(rows)}.'
            )
        nothing = Costs({1: {1: 1.0}}, {1: {1: 1.0}})
        return cls(Policy(nothing, widest=1), nothing, rows)

    def start(self, temperature: float = 0.0, ahead: bool = True) -> Sizes:
        """A request begins; see `Policy.start`."""
        return Sizes(self, temperature, ahead)

    def sharpness(self, temperature: float) -> Sharpness:
        """What was learnt about the drafter's chains at this temperature."""
        return self.chains.sharpness(temperature)

    def calibration(self, temperature: float) -> Calibration:
        """What was learnt about the drafter's probabilities at this temperature."""
        return self._calibrations.setdefault(temperature, Calibration())

    def table(self, context: int) -> Table:
        """What rounds take at this depth; looked up once for every doubling."""
        depth = 1 << max(context, 1).bit_length() - 1
        if depth not in self._tables:  # each request passes the same depths
            costs, widest = self.chains.costs, self.chains.widest
            rounds, verify = costs.rounds(depth, widest), costs.forwards(depth, widest)
            # A chain cut from a tree pays for the tree, however short it is.
            whole = max(curve(self.costs.draft, depth, 1)[0], rounds[-1])
            chains = np.array(verify) + (whole - verify[-1])
            trees = np.array(curve(self.costs.verify, depth, self.rows))
            self._tables[depth] = Table(np.array(rounds), chains, trees)
        return self._tables[depth]

    def speeds(self, table: Table) -> tuple[float, float]:
        """Tokens per second of trees, and what chains of the best width would have had instead."""
        if not self.scored:
            return 0.0, 0.0
        return self.tokens / self.spent, float((self.narrow.mean() / table.rounds).max())

    def learn(
        self, tree: DraftTree, proposal: Proposal, picks: Sequence[int], table: Table
    ) -> None:
        """Take in the candidates that the text went on with, and what of the tree was verified."""
        right, rows = matching(tree.chain.picks[1:], picks), tree.tree.path(picks)
        self.narrow.book(expected_tokens(tree.chain), range(1, right + 1))
        self.trees.book(expected_tokens(tree.tree), rows)
        path = range(1, right + 1) if proposal.is_chain else rows
        self.tokens = MEMORY * self.tokens + 1 + sum(row < len(proposal) for row in path)
        self.spent = MEMORY * self.spent + table.seconds(proposal)
        self.scored += 1

    def describe(self, context: int) -> list[str]:
        """The costs and the beliefs that the sizes follow from, a line each."""
        if self.pinned:
            known = self._calibrations.items()
            return [f"temperature {t:g}: log q counts {c.weights[0]:.2f}-fold" for t, c in known]
        lines, table = self.chains.describe(context), self.table(context)
        if self.scored:
            plain = float(table.rounds[0])
            trees, chains = (speed * plain for speed in self.speeds(table))
            lines.append(f"trees: {trees:.2f} x the speed, chains in their place: {chains:.2f} x")
            for rows in SHOWN:
                cost, tokens = table.trees[rows - 1] / plain, self.trees.mean()[rows - 1]
                lines.append(f"a tree of {rows}: {cost:.2f} x plain, {tokens:.2f} tokens")
        return lines


class Sizes:
    """The sizes of one request's trees."""

    def __init__(self, policy: TreePolicy, temperature: float, ahead: bool) -> None:
        self._policy, self._chains = policy, policy.chains.start(temperature, ahead)
        self._paused = policy.pause if policy.scored >= TRIALS else 0  # rounds of chains to come
        self._table = policy.table(1)

    def size(self, context: int, limit: int, certainty: float | None) -> tuple[int, int]:
        """The rows of the next round's chain, and of its tree: 1 if it is not to draft one."""
        policy = self._policy
        if policy.pinned:
            return 1, policy.pinned if limit > 1 else 1
        width = self._chains.width(context, limit, certainty)
        self._table = policy.table(context)
        wanted = width > 1 and not self._paused
        # A tree that the account cannot pay for would be drafted for nothing.
        if wanted and self._table.chains[width - 1] <= self._chains.affordable:
            return width, policy.rows
        self._paused = max(0, self._paused - (width > 1))
        return width, 1

    def pays(self, context: int, limit: int, certainty: float | None) -> bool:
        """Whether `size` would have a round draft; unlike that, it may be asked and not be done."""
        pinned = self.pinned and limit > 1
        return pinned or self._chains.width(context, limit, certainty) > 1

    @property
    def ahead(self) -> float:
        """What a plain round that is begun ahead takes, over one on its own."""
        return self._chains.ahead

    def free(self, rates: Sequence[float], context: int, limit: int) -> int:
        """Rows of a chain that costs nothing to draft; 1 where others pay better.

        rates are of its slots; the others as of `size`, which need not have been asked.
        """
        if self._policy.pinned:
            return 1
        rows, speed = self._chains.free(rates, context, limit)
        self._table = self._policy.table(context)
        return rows if speed > max(self._policy.speeds(self._table)) else 1

    def hopes(self) -> list[float]:
        """How often the slots of a chain may be right now, when those before them are."""
        return self._chains.hopes()

    @property
    def pinned(self) -> bool:
        """Whether all trees have the rows that were asked for, whatever they cost."""
        return self._policy.pinned is not None

    def observe_shared(self, drafted: int, accepted: int) -> None:
        """Take in a chain in a round of many requests; see `Widths.observe_shared`."""
        self._chains.observe_shared(drafted, accepted)

    def reading(self, rows: int, tokens: int) -> float:
        """Of a drafted chain; see `Widths.reading`."""
        return self._chains.reading(rows, tokens)

    def observe_free(self, rows: int, accepted: int) -> None:
        """Take in a round that cost nothing to draft."""
        self._chains.observe_free(rows, accepted)

    def cut(self, tree: DraftTree) -> Proposal:
        """The part of a tree, or the chain instead of it, that is worth most beyond its cost."""
        policy, table = self._policy, self._table
        if policy.pinned:
            return tree.propose(policy.pinned)
        trees = policy.trees.corrected(expected_tokens(tree.tree))
        chains = policy.narrow.corrected(expected_tokens(tree.chain)[: policy.chains.widest])
        of_trees, of_chains = table.trees[: len(trees)], table.chains[: len(chains)]
        speed = max(policy.speeds(table))
        if not policy.scored:
            speed = max((trees / of_trees).max(), (chains / of_chains).max())
        affordable = self._chains.affordable
        trees = np.where(of_trees <= affordable, trees - speed * of_trees, -np.inf)
        chains = np.where(of_chains <= affordable, chains - speed * of_chains, -np.inf)
        if chains.max() >= trees.max():
            return tree.propose_chain(int(chains.argmax()) + 1)
        return tree.propose(int(trees.argmax()) + 1)

    @property
    def level(self) -> int:
        """The target's certainty where the round that was asked for last begins."""
        return self._chains.level

    def observe(
        self, proposal: Proposal, accepted: int, from_tree: bool, seconds: float | None
    ) -> None:
        """Take in how many nodes of a round's proposal the target kept, and what it took."""
        if self._policy.pinned:
            return
        if from_tree:
            self._chains.book(self._table.seconds(proposal), accepted)
        else:
            self._chains.observe(len(proposal) - 1, accepted, seconds)

    def learn(self, tree: DraftTree, proposal: Proposal, picks: Sequence[int], at: int) -> None:
        """Take in the candidates that the text went on with, and what of the tree was verified.

        `at` is the level of certainty where the tree began.
        """
        policy = self._policy
        if policy.pinned:
            return
        right = matching(tree.chain.picks[1:], picks)
        self._chains.learn(at, min(tree.slots, policy.chains.widest - 1), right)
        policy.learn(tree, proposal, picks, self._table)
        trees, chains = policy.speeds(self._table)
        if trees >= chains:
            policy.pause = FIRST_PAUSE
        elif policy.scored >= TRIALS:
            self._paused, policy.pause = policy.pause, min(2 * policy.pause, LONGEST_PAUSE)


def tree_policy(
    target: Target,
    drafter: Drafter,
    kv_bits: int | None = None,
    again: bool = False,
    meanwhile: Meanwhile = nullcontext,
) -> TreePolicy | Policy:
    """The policy of a pair, with trees where both of them can have them; see `Policy.of`."""
    chains = Policy.of(target, drafter, kv_bits=kv_bits, again=again, meanwhile=meanwhile)
    if not (drafts_trees(drafter) and target.supports_trees):
        return chains
    widest, what = chains.widest, "a round with a draft tree"
    costs, _ = pair_costs(target, drafter, widest, kv_bits, again, measure_trees, what, meanwhile)
    return TreePolicy(chains, costs)


class Ledger:
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
