"""What a round costs beyond the two forwards it is made of.

The rounds of a finished generation are run again as bare forwards: the drafter's and the verify
forward, each built and evaluated alone, at the very same shapes and cache lengths. What is left of
the real round's time is the loop's own: proposing, choosing, accepting, committing, text.
"""

from __future__ import annotations

import time
from dataclasses import dataclass

import mlx.core as mx

from ..drafter.network import DFlash
from ..events import Result
from ..proposal import Proposal
from ..target import Target


@dataclass(frozen=True)
class RawForwards:
    """Seconds of all the rounds of one generation, spent in bare forwards."""

    rounds: int
    draft_seconds: float
    verify_seconds: float

    def overhead(self, decode_seconds: float) -> float:
        """Seconds per round of a real decoding of the same rounds that no forward explains."""
        return (decode_seconds - self.draft_seconds - self.verify_seconds) / self.rounds


def raw_forwards(
    target: Target, drafter: DFlash, prompt: list[int], result: Result, max_tokens: int
) -> RawForwards:
    """Time the bare forwards of the rounds that made `result`.

    Args:
        target, drafter: a target and its `DFlash` network.
        prompt: the token ids that were answered.
        result: a drafted generation from them with `max_tokens`.
    """
    session, cache = target.start(drafter.tap_layers), drafter.make_cache()
    taps = mx.zeros((1, 0, 0))
    for _, chunk in session.prefill(prompt):
        if taps.shape[1]:
            drafter.extend(taps, cache)
        taps = chunk
    text = result.tokens
    start, draft_seconds, verify_seconds = 0, 0.0, 0.0
    for accepted in result.stats.accepted_per_round:
        rows = min(result.stats.block_size, max_tokens - 1 - start)
        masks = [drafter.config.mask_token_id] * rows
        if rows > 1:
            clock = time.perf_counter()
            block = target.embed(mx.array([text[start], *masks[1:]])[None])
            mx.eval(target.head(drafter(block, taps, cache)[:, 1:]))
            draft_seconds += time.perf_counter() - clock
        clock = time.perf_counter()
        logits, taps = session.verify(Proposal((text[start : start + rows] + masks)[:rows]))
        mx.eval(logits, taps)
        verify_seconds += time.perf_counter() - clock
        session.commit(range(accepted + 1))
        taps = taps[:, : accepted + 1]
        start += accepted + 1
    return RawForwards(result.stats.rounds, draft_seconds, verify_seconds)
