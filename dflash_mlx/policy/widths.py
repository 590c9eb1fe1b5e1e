"""How many rows to verify now: as many as bring the most tokens per second, and one if none do.

A round of w rows brings 1 + a_1 + a_1 a_2 + ... tokens, where a_j is how often slot j is right when
the slots before it are. The policy estimates these from the rounds so far, divides by what a round
of w rows costs on this machine, and takes the best w. When nothing beats plain decoding it *parks*:
plain decoding for a while, twice as long each time, and then another try.

An account keeps it honest. It books what each round brought against what plain decoding would have
taken for it, and what the account cannot pay for is not drafted; so however wrong an estimate is,
drafting never costs more than `CREDIT` plain tokens and `ALLOWANCE` of the rest.

Decisions depend on the measured costs and on the tokens, never on the clock. They change the speed
and not the text.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from ..sharpness import Sharpness
from .costs import Costs, pair_costs

if TYPE_CHECKING:
    from ..target import Target

HOPE = 0.9  # how often slot 1 is taken to be right before anything is known,
HOPE_WEIGHT = 1.5  # and how many rounds that belief counts for
NEIGHBOUR_WEIGHT = 4.0  # how many rounds the slot before counts for in the belief about a slot
MEMORY = 0.98  # a round's weight against the next one's: the last 50 or so count
GAIN = 1.02  # what drafting has to promise over plain decoding
CREDIT = 6.0  # plain tokens that may be lost before drafting has paid anything back,
ALLOWANCE = 0.01  # and the share of all tokens that may be lost in the long run
SAVINGS = 10.0  # plain tokens gained that the account remembers at most
FIRST_PARK, LONGEST_PARK = 64, 512  # rounds


class FixedWidth:
    """Every round as wide as allowed.

    Args:
        sharpness: how drafts are ranked at any temperature; None learns it anew in each request.
    """

    def __init__(self, sharpness: Sharpness | None = None) -> None:
        self._sharpness = sharpness

    def begin(self) -> None:
        pass

    def width(self, context: int, limit: int) -> int:
        return limit

    def observe(self, drafted: int, accepted: int) -> None:
        pass

    def sharpness(self, temperature: float) -> Sharpness:
        return self._sharpness or Sharpness()


class Policy:
    """The width of each round of a pair. Keep it, and the next request knows what this one learnt.

    Args:
        costs: of the pair, on this machine.
        widest: the most rows a round may have.
    """

    def __init__(self, costs: Costs, widest: int) -> None:
        self.costs, self.widest = costs, widest
        self._reached = [0.0] * (widest - 1)  # rounds in which slot j was looked at,
        self._right = [0.0] * (widest - 1)  # and was right; old rounds count less
        self._account = 0.0  # plain tokens by which drafting is ahead of plain decoding
        self._parked, self._park = 0, FIRST_PARK
        self._depth, self._seconds = 0, [0.0]
        self._sharpness: dict[float, Sharpness] = {}

    @classmethod
    def of(
        cls,
        target: Target,
        drafter: Any,
        widest: int = 16,
        kv_bits: int | None = None,
        again: bool = False,
    ) -> Policy:
        """The policy of a pair whose costs are measured now, unless they are in the cache.

        Args:
            target, drafter: the pair.
            widest: the most rows a round may have; the drafter's block size limits it too.
            kv_bits: of the target's keys and values, as in `stream_generate`.
            again: measure even if the cache knows: the machine may have been busy then.
        """
        config = getattr(drafter, "config", None)
        widest = min(widest, getattr(config, "block_size", widest))
        return cls(pair_costs(target, drafter, widest, kv_bits, again), widest)

    def begin(self) -> None:
        """A request begins. Its text may suit the drafter better, so a park ends as if none was.

        A drafter that is always wrong gains nothing from it: what it may lose is in the account.
        """
        if self._parked:
            self._parked, self._park = 0, FIRST_PARK
            self._scale(0.0)

    def sharpness(self, temperature: float) -> Sharpness:
        """What was learnt about the drafter at this temperature, to be gone on with."""
        return self._sharpness.setdefault(temperature, Sharpness())

    def width(self, context: int, limit: int) -> int:
        """Rows of the next round: 1 (plain) to `limit`, with so many tokens before it."""
        if not self._depth <= context < 2 * self._depth:
            self._depth = 1 << max(context, 1).bit_length() - 1
            self._seconds = self.costs.rounds(self._depth, self.widest)
        if self._parked:
            self._parked -= 1
            if not self._parked:
                self._forget()
            return 1
        expected, affordable = self.expected_tokens(), self.affordable
        speeds = [
            tokens / seconds if seconds <= affordable else 0.0
            for tokens, seconds in zip(expected, self._seconds, strict=True)
        ]
        best = max(range(min(limit, self.widest)), key=speeds.__getitem__)
        if best and speeds[best] > GAIN * speeds[0]:
            return best + 1
        if limit > 1 and not self._worth_waiting_for(expected):
            self._parked, self._park = self._park - 1, min(2 * self._park, LONGEST_PARK)
        return 1

    @property
    def affordable(self) -> float:
        """Seconds that the account has for a round."""
        return (CREDIT + self._account + 1) * self._seconds[0]

    def observe(self, drafted: int, accepted: int) -> None:
        """Take in a round that drafted so many rows, of which the target kept the first ones."""
        self.book(self._seconds[drafted], accepted)
        if drafted:
            self.learn(drafted, accepted)

    def book(self, seconds: float, accepted: int) -> None:
        """Take in what a round cost and how many drafted tokens it brought."""
        cost = seconds / self._seconds[0]
        gain = (1 + ALLOWANCE) * (accepted + 1) - cost
        self._account = min(SAVINGS, self._account + gain)
        if accepted and accepted + 1 > cost:
            self._park = FIRST_PARK

    def learn(self, drafted: int, accepted: int) -> None:
        """Take in how many slots of a chain were right before the first wrong one."""
        self._scale(MEMORY)
        for slot in range(min(accepted + 1, drafted)):
            self._reached[slot] += 1
            self._right[slot] += slot < accepted

    def expected_tokens(self) -> list[float]:
        """What rounds of 1, 2, ... rows are expected to bring."""
        tokens, path, belief, weight = [1.0], 1.0, HOPE, HOPE_WEIGHT
        for reached, right in zip(self._reached, self._right, strict=True):
            belief = (right + weight * belief) / (reached + weight)
            weight = NEIGHBOUR_WEIGHT
            path *= belief
            tokens.append(tokens[-1] + path)
        return tokens

    def describe(self) -> list[str]:
        """The costs and the beliefs that the widths follow from, a line each."""
        plain, seconds = self._seconds[0], self._seconds
        shown = [row for row in (1, 2, 4, 8, 12, 16) if row <= self.widest and row <= len(seconds)]
        expected = self.expected_tokens()
        lines = [f"a plain token: {1e3 * plain:.2f} ms at {self._depth} tokens of context"]
        for row in shown[1:]:
            cost, tokens = seconds[row - 1] / plain, expected[row - 1]
            lines.append(
                f"{row} rows: {cost:.2f} x plain, {tokens:.2f} tokens expected, "
                f"{tokens / cost:.2f} x the speed"
            )
        return lines

    def _worth_waiting_for(self, expected: list[float]) -> bool:
        """Whether a width that the account cannot pay for yet promises more than plain decoding."""
        plain = self._seconds[0]
        pairs = zip(expected, self._seconds, strict=True)
        return any(tokens * plain > GAIN * seconds for tokens, seconds in pairs)

    def _forget(self) -> None:
        """Leave one round's worth of what was learnt, so that hope brings another try."""
        if self._reached and self._reached[0] > 1:
            self._scale(1 / self._reached[0])

    def _scale(self, factor: float) -> None:
        self._reached = [factor * rounds for rounds in self._reached]
        self._right = [factor * rounds for rounds in self._right]
