"""What a round costs beyond the leanest one (`leanest`): the same two forwards written by hand.

The rounds of a finished generation are run again by hand, from the same prompt and as wide. What is
left of the real rounds' time is the loop's own: policies, settings, text, and what it asks of the
device beyond what it has to.
"""

from __future__ import annotations

import time
from typing import Any

from ..events import Result
from ..targets import Target
from ..targets.target import PREFILL_STEP
from .leanest import Leanest, why_not


def overhead(
    target: Target, drafter: Any, prompt: list[int], result: Result, max_tokens: int
) -> float | None:
    """Seconds per round that the leanest rounds do not explain.

    None for a pair without a leanest round, a prompt longer than one forward, and no rounds.

    Args:
        target, drafter: the pair.
        prompt: the token ids that were answered.
        result: a drafted generation from them with `max_tokens`, in whole blocks.
    """
    stats = result.stats
    if not stats.rounds or len(prompt) > PREFILL_STEP or why_not(target, drafter) is not None:
        return None
    leanest = Leanest(target, drafter)
    leanest.prefill(prompt)
    tokens, seconds, rounds = 1, 0.0, 0
    while rounds < stats.rounds and tokens < max_tokens:
        rows = min(stats.block_size, max_tokens - tokens)
        clock = time.perf_counter()
        tokens += len(leanest.round(rows))
        seconds += time.perf_counter() - clock
        rounds += 1
    return stats.decode_seconds / stats.rounds - seconds / rounds
