"""What a round is worth, where one that fails costs an answer more than one that succeeds brings.

Most answers are short. What one loses at once it hardly earns back, and whoever waits for it
notices that it is slower than plain decoding sooner than that another one is quicker still. So of
what a dear round is expected to bring, the expected square of what it may lose is taken off: it has
to wait until drafts are surer, or a narrower block is drafted. What an answer can stake
(`Account.stake`) is for learning, and there hope counts instead.
"""

from __future__ import annotations

from collections.abc import Sequence

from .beliefs import expected_tokens

CAUTION = 1.0  # tokens that a round has to promise for each one that it may lose, squared


def worth(
    rows: Sequence[int],
    costs: Sequence[float],
    rates: Sequence[float],
    hopes: Sequence[float],
    stake: float,
) -> list[float]:
    """Tokens that rounds of so many rows are worth.

    Args:
        rows: rising, the first one of a plain round.
        costs: of these rounds, in units of a plain token's.
        rates: how often slots 1, 2, ... are right when those before them are.
        hopes: the same, as far as nothing is known to the contrary.
        stake: what a round may lose in hope; of dearer ones only what is believed counts.
    """
    sober, hoped = expected_tokens(rates), expected_tokens(hopes)
    found = [1.0]
    for width, cost in zip(rows[1:], costs[1:], strict=True):
        if cost <= 1 + stake:
            found.append(hoped[width - 1])
        else:  # a round that brings as much as it costs loses nothing
            loses = shortfall(rates[: min(width - 1, int(cost))], cost)
            found.append(sober[width - 1] - CAUTION * loses)
    return found


def shortfall(rates: Sequence[float], cost: float) -> float:
    """What is expected of the square of the plain tokens that a round may lose.

    Args:
        rates: of all its drafted slots.
        cost: of the round, in units of a plain token's.
    """
    square, path, tokens = 0.0, 1.0, 1
    for rate in rates:
        if tokens >= cost:
            return square
        square += path * (1 - rate) * (cost - tokens) ** 2
        path, tokens = path * rate, tokens + 1
    return square + path * max(0.0, cost - tokens) ** 2


def fastest(
    tokens: Sequence[float], seconds: Sequence[float], affordable: float, bar: float
) -> tuple[int, float]:
    """Which of these rounds brings the most tokens per second, and those.

    It is the first one, a plain one, where no other has more than `bar` times its speed.
    """
    found = speeds(tokens, seconds, affordable)
    best = max(range(len(found)), key=found.__getitem__)
    return (best, found[best]) if found[best] > bar * found[0] else (0, found[0])


def speeds(tokens: Sequence[float], seconds: Sequence[float], affordable: float) -> list[float]:
    """Tokens per second of 1 row and of others; 0 where drafts cost more than is affordable."""
    found = [brought / took for brought, took in zip(tokens, seconds, strict=False)]
    drafted = zip(found[1:], seconds[1:], strict=False)
    return [found[0], *(speed if took <= affordable else 0.0 for speed, took in drafted)]
