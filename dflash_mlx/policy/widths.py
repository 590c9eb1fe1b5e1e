"""How many rows to verify now: as many as bring the most tokens per second, and one if none do.

A round of w rows brings 1 + a_1 + a_1 a_2 + ... tokens, where a_j is how often slot j is right when
the slots before it are (`beliefs`). The policy divides by what a round of w rows costs on this
machine and takes the best of the measured ones, which may be plain decoding. As a_1 depends on how
sure the target was lately, the way back to drafting is found within a few tokens of where it pays.

What is worth a try is asked with hope where it is cheap, as far as nothing is known to the
contrary: nobody learns from what he never tries. What it costs to be wrong is asked soberly: an
account (`account`) pays for tries, and what a request cannot pay for is not drafted, however much
it promises. Of two dear rounds that promise as much, the one that may lose less is drafted: what a
short answer loses at once it cannot earn back (`risk`).

`Policy` is what is known about a pair; `Widths` is one request's account and choices. They
change the speed and not the text.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from contextlib import nullcontext
from math import inf
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from ..drafter.protocol import Drafter, block_size, check_pair
from ..errors import SettingsError
from ..sharpness import Sharpness
from ..validation import brief, check_integer
from .account import Account
from .beliefs import SUREST, Beliefs, Mood, expected_tokens, first_drafts, level, warmth
from .confidence import Confidence
from .costs import Costs, Meanwhile, keep_costs, pair_costs, rows_up_to
from .kept import beliefs_file, keep_beliefs, read_beliefs
from .risk import fastest, worth
from .watch import Surcharge, Watch

if TYPE_CHECKING:
    from ..targets import Target

MOST_ROWS = 1024  # of a round, beyond what any machine could want
GAIN = 1.02  # what drafting has to promise over plain decoding
FIRST_BRANCHING = 1.15  # what a tree is taken to cost over a chain, until rounds have shown it
LEAST_RESCUE = 0.05  # tokens that a second branch has to promise beyond its cost
TRIAL_ROWS = 4  # of rounds that find out what drafting costs, where it was said not to pay
TRIAL_GAIN = 1.25  # tokens that a wider one has to promise over the best, to be tried for its cost


class Policy:
    """What is known about a pair. Keep it, and the next request knows what this one learnt.

    Args:
        costs: of the pair, on this machine.
        widest: the most rows a round may have.

    Attributes:
        costs, widest: as given.
        file: where costs are kept from one start of the program to the next, and beside it what is
            believed of drafts; None if nowhere.
        watch: whether rounds take the time that `costs` says.
        branching: what a tree of two branches costs more than a chain of as many rows.
    """

    def __init__(self, costs: Costs, widest: int, file: Path | None = None) -> None:
        self.costs, self.widest, self.file = costs, widest, file
        self.watch, self._beliefs = Watch(), dict[int, Beliefs]()
        self._kept = self._drafts = 0  # the watch's version and the drafts that are in the files
        self._sharpness: dict[float, Sharpness] = {}
        self._confidence: dict[float, Confidence] = {}
        self.branching = Surcharge(FIRST_BRANCHING)
        self._tables: dict[int, list[float]] = {}  # seconds of 1, 2, ... rows by depth
        self._forwards: dict[int, list[float]] = {}  # the target's part of them

    @classmethod
    def of(
        cls,
        target: Target,
        drafter: Drafter | None,
        widest: int = 16,
        kv_bits: int | None = None,
        again: bool = False,
        meanwhile: Meanwhile = nullcontext,
    ) -> Policy:
        """The policy of a pair whose costs are measured now, unless they are in the cache.

        Args:
            target, drafter: the pair, as `load` returns it.
            widest: the most rows a round may have; the drafter's block size limits it too.
            kv_bits: of the target's keys and values, as in `stream_generate`.
            again: measure even if the cache knows: the machine may have been busy then.
            meanwhile: given what is measured ("a round"), makes a context to be in while it is, to
                say so, for it takes seconds. For costs that are known it is not called.

        Raises `SettingsError`, also without a drafter: plain decoding has no widths.
        """
        check_pair(target, None)
        if not isinstance(drafter, Drafter) or isinstance(drafter, type):
            raise SettingsError(f"A policy is of a target and its drafter, not {brief(drafter)}.")
        widest = min(
            check_integer("widest", widest, most=MOST_ROWS), block_size(drafter) or MOST_ROWS
        )
        costs, file = pair_costs(target, drafter, widest, kv_bits, again, meanwhile=meanwhile)
        policy = cls(costs, widest, file)
        if file is not None:
            policy._beliefs = read_beliefs(beliefs_file(file), widest - 1)
        return policy

    def keep(self) -> None:
        """Have the next start of the program begin with what was learnt in this one.

        That is how often drafts are right, and the costs that the rounds have corrected. Where
        nothing was learnt, or nothing is kept for this pair, nothing is done.
        """
        if self.file is None:
            return
        if self.watch.disagrees and self.watch.version != self._kept:
            self._kept = self.watch.version
            keep_costs(self.file, self.costs.corrected(self.watch.factors(), self.widest))
        if (drafts := sum(of.drafts for of in self._beliefs.values())) > self._drafts:
            self._drafts = drafts
            keep_beliefs(beliefs_file(self.file), self._beliefs)

    def plain_seconds(self, context: int) -> float:
        """Of one plain token of many at this depth: as measured, at the rounds' pace so far."""
        return self.watch.pace * self.costs.ahead * self.seconds(context)[0]

    def start(self, temperature: float = 0.0, ahead: bool = True) -> Widths:
        """A request begins; `ahead`: its plain rounds can be begun before the last one is read."""
        return Widths(self, self.beliefs(temperature), self.costs.ahead if ahead else 1.0)

    def beliefs(self, temperature: float = 0.0) -> Beliefs:
        """How often drafts are right, of each class of temperatures; to be gone on with."""
        return self._beliefs.setdefault(warmth(temperature), Beliefs(self.widest - 1))

    def sharpness(self, temperature: float) -> Sharpness:
        """What was learnt about the drafter at this temperature, to be gone on with."""
        return self._sharpness.setdefault(temperature, Sharpness())

    def confidence(self, temperature: float) -> Confidence:
        """What was learnt about the drafter's own confidence at this temperature."""
        return self._confidence.setdefault(temperature, Confidence())

    def seconds(self, context: int) -> list[float]:
        """Of rounds of 1, 2, ... rows, as measured; looked up once for every doubling."""
        depth = 1 << max(context, 1).bit_length() - 1
        if depth not in self._tables:  # each request passes the same depths
            self._tables[depth] = self.costs.rounds(depth, self.widest)
        return self._tables[depth]

    def verify(self, context: int) -> list[float]:
        """Seconds of the target's forwards over 1, 2, ... rows, as measured."""
        depth = 1 << max(context, 1).bit_length() - 1
        if depth not in self._forwards:
            self._forwards[depth] = self.costs.forwards(depth, self.widest)
        return self._forwards[depth]

    def describe(self, context: int) -> list[str]:
        """The costs and the beliefs that widths follow from, a line each.

        Args:
            context: tokens before the round that is spoken of.

        Raises `SettingsError` for what is no number of tokens.
        """
        context = check_integer("context", context, least=0)
        seconds = self.watch.corrected(self.seconds(context))
        expected = expected_tokens(self.beliefs().rates(level(1.0)))
        plain = 1e3 * self.plain_seconds(context)
        lines = [f"a plain token: {plain:.2f} ms at {context} tokens of context"]
        for row in (2, 4, 8, 12, 16):
            if row <= self.widest:
                cost = seconds[row - 1] / (seconds[0] * self.costs.ahead)
                tokens = expected[row - 1]
                lines.append(
                    f"{row} rows: {cost:.2f} x plain, {tokens:.2f} tokens where the target is "
                    f"sure: {tokens / cost:.2f} x the speed"
                )
        lines += first_drafts(self._beliefs)
        if self.watch.disagrees:
            said = ", ".join(f"{row} rows {f:.2f}" for row, f in self.watch.factors().items())
            lines.append(
                f"the measured costs are wrong (rounds take these multiples of them: {said}); "
                f"widths follow the rounds{', the next start too' if self.file else ''}, and "
                "dflash-mlx tune --again measures anew"
            )
        return lines


class Widths:
    """The widths of one request's rounds.

    Attributes:
        ahead: what a plain round that is begun ahead takes, over one on its own.
    """

    def __init__(self, policy: Policy, beliefs: Beliefs, ahead: float = 1.0) -> None:
        self._policy, self._beliefs, self._account, self._mood = policy, beliefs, Account(), Mood()
        self.ahead, self._of = ahead, (-1, -1)  # the depth and the watch's version of its costs
        self.look(1, None)

    def width(
        self, context: int, limit: int, certainty: float | None = None, hears: bool = False
    ) -> int:
        """Rows of the next round: a measured width from 1 (plain) on, or `limit`.

        Args:
            context: tokens before it.
            limit: the most rows it may have.
            certainty: the target's, see `beliefs.Certainty`; None if that is not known.
            hears: whether the drafter says how sure it is, so that tries tell what that is worth.
        """
        self.look(context, certainty)
        # What a try teaches is for later rounds: near the end only what is believed counts.
        is_early = limit >= self._policy.widest
        limit = min(limit, self._policy.widest)
        affordable = self.affordable
        if affordable < min(self._seconds[1:limit], default=inf):
            return 1  # most looks end here where drafts are wrong; the device waits for them
        rates, plain = self.rates(), self._plain
        hopes, stake = self._hopeful(rates), self._account.stake if is_early else 0.0
        rows = rows_up_to(limit)
        seconds = [self._seconds[each - 1] for each in rows]
        tokens = worth(rows, [each / plain for each in seconds], rates, hopes, stake)
        best = rows[fastest(tokens, seconds, affordable, self._bar)[0]]
        if is_early and best < limit:
            return self._trial(best, limit, rates, affordable, hears) or best
        return best

    def look(self, context: int, certainty: float | None) -> None:
        """Where the next round begins; `width` says what the two are."""
        self._look_up(context)
        self._at = level(certainty)

    def free(self, rates: Sequence[float], context: int, limit: int) -> tuple[int, float]:
        """The best rows of a chain that costs nothing to draft; a round of rest asks no `width`.

        rates are of its slots; `context` and `limit` as of `width`. Returns the rows, 1 if nothing
        beats plain decoding, and their tokens per second.
        """
        self._look_up(context)
        if not rates:
            return 1, 1 / self._seconds[0]
        rates, verify = rates[: limit - 1], self._verify()
        affordable = self._affordable(rates)
        best, speed = fastest(expected_tokens(rates), verify, affordable, self._bar)
        return best + 1, speed

    def speed(self, rows: int) -> float:
        """Tokens per second that are expected of a drafted chain of so many rows."""
        return self.expected_tokens()[rows - 1] / self._seconds[rows - 1]

    def branch(self, rows: int, rates: Sequence[float], rescue: float) -> int:
        """How many rows of a second branch are worth adding to a drafted chain of so many.

        rates are of the branch's slots where it is the likeliest, `rescue` that of its first slot
        where the chain's first is wrong.
        """
        room, verify = self._policy.widest - rows, self._verify()
        if not rates or room < 1:
            return 0
        missed = 1 - self.rates()[0]
        brought = expected_tokens([rescue, *rates[1:]])  # the first token is the round's own
        factor, best, most = self._policy.branching.factor, 0, LEAST_RESCUE
        for more in range(1, min(room, len(rates)) + 1):
            seconds = factor * verify[rows + more - 1] - verify[rows - 1]
            gain = missed * (brought[more] - 1) - self.speed(rows) * seconds
            if gain > most:
                best, most = more, gain
        return best

    def reading(self, rows: int, tokens: int) -> float:
        """The part of a drafted round in which so many tokens' features are read first."""
        seconds = self._policy.costs.unread * tokens
        return seconds / (self._measured[rows - 1] + seconds)

    def chain_seconds(self, rows: int) -> np.ndarray:
        """Of rounds that draft a chain of so many rows and verify its first 1, 2, ..., measured."""
        policy = self._policy
        rounds, verify = policy.seconds(self._context), policy.verify(self._context)
        return np.array(verify[:rows]) + (rounds[rows - 1] - verify[rows - 1])

    def observe_free(self, rows: int, accepted: int) -> None:
        """Take in a round that cost nothing to draft."""
        self.book(self._verify()[rows - 1], accepted)

    def observe_branches(
        self, rows: int, more: int, right: int, accepted: int, seconds: float
    ) -> None:
        """Take in a round of two branches: `right` slots of the chain were, `accepted` of any."""
        drafted = self._seconds[rows - 1] - self._verify()[rows - 1]
        measured = self._verify()[rows + more - 1] + drafted
        self._policy.branching.saw(seconds, measured)
        self.book(self._policy.branching.factor * measured, accepted)
        self.learn(self._at, rows - 1, right)

    def _verify(self) -> list[float]:
        """Seconds of forwards over 1, 2, ... rows, as the watch corrects them."""
        of, measured, seconds = self._policy.verify(self._context), self._measured, self._seconds
        return [v * s / m for v, m, s in zip(of, measured, seconds, strict=True)]

    @property
    def affordable(self) -> float:
        """The seconds of the dearest round that the account can pay for."""
        return self._affordable(self._rates())

    @property
    def _bar(self) -> float:
        """What drafting has to promise over plain rounds, which are begun ahead."""
        return GAIN / self.ahead

    def _affordable(self, rates: Iterable[float]) -> float:
        return self._account.affordable(rates, self._at == SUREST) * self._plain

    def rates(self) -> list[float]:
        """How often slots 1, 2, ... are right now, when those before them are."""
        return [*self._rates()]

    def _rates(self) -> Iterator[float]:
        return self._mood.moved(self._beliefs.rates(self._at)[: self._policy.widest - 1])

    def hopes(self) -> list[float]:
        """The same, for the question of what is worth a try."""
        return self._hopeful(self.rates())

    def _hopeful(self, rates: list[float]) -> list[float]:
        return [*self._mood.moved([self._beliefs.hope(self._at)]), *rates[1:]][: len(rates)]

    def expected_tokens(self) -> list[float]:
        """What rounds of 1, 2, ... rows are expected to bring now."""
        return expected_tokens(self.rates())

    def observe(self, drafted: int, accepted: int, seconds: float | None = None) -> None:
        """Take in a round that drafted so many rows, of which the target kept the first ones.

        `seconds` are what it took, where that is known.
        """
        cost, watch = self._seconds[drafted], self._policy.watch
        if seconds is not None:
            watch.saw(drafted + 1, seconds, self._measured[drafted])
            # A plain round is the measure: one that was quicker than others has earned nothing.
            if drafted and (plain := watch.factor(1)):
                # As it came on a machine as busy as this; a round that stalled is not drafting's.
                cost = min(cost, seconds / (plain * self._measured[0]) * self._seconds[0])
        self.book(cost if drafted else self.ahead * cost, accepted)
        self.observe_shared(drafted, accepted)

    def observe_shared(self, drafted: int, accepted: int) -> None:
        """Take in a round of many requests, whose cost is on another account."""
        if drafted:
            self.learn(self._at, drafted, accepted)
        else:
            self._beliefs.pass_by(self._at)

    def book(self, seconds: float, accepted: int) -> None:
        """Take in what a round cost and how many drafted tokens it brought."""
        self._account.book(seconds / self._plain, accepted + 1)
        self._mood.pass_by(accepted + 1)

    def learn(self, at: int, drafted: int, accepted: int) -> None:
        """Take in how many slots of a chain, drafted at a level of certainty, were right."""
        self._mood.learn(self._beliefs.rates(at), drafted, accepted)
        self._beliefs.learn(at, drafted, accepted)

    @property
    def level(self) -> int:
        """The target's certainty where the round that was asked for last begins."""
        return self._at

    def _look_up(self, context: int) -> None:
        """The costs at this depth; they hold until it doubles, or the watch changes its mind."""
        policy, self._context = self._policy, context
        of = (max(context, 1).bit_length(), policy.watch.version)
        if of != self._of:
            self._of, self._measured = of, policy.seconds(context)
            self._seconds = policy.watch.corrected(self._measured)
            self._plain = self.ahead * self._seconds[0]  # of a plain token of many

    def _trial(
        self, best: int, limit: int, rates: list[float], affordable: float, hears: bool
    ) -> int | None:
        """A width to be tried for its cost alone, for what was measured may be wrong; mostly None.

        Only one that would bring clearly more tokens, that deserves a try, and that the account can
        pay for.
        """
        watch, expected = self._policy.watch, expected_tokens(rates)
        for rows in (TRIAL_ROWS, self._policy.widest):
            if (
                best < rows <= limit
                and expected[rows - 1] > TRIAL_GAIN * expected[best - 1]
                and self._seconds[rows - 1] <= affordable
                and watch.deserves_a_try(rows, best, hears)
            ):
                return rows
        return None
