"""One request's drafting state: the context cache, and features that have not entered it yet."""

from __future__ import annotations

from typing import TYPE_CHECKING

import mlx.core as mx

from ..proposal import Proposal

if TYPE_CHECKING:
    from ..sampling import Sampler
    from ..target import Target
    from .network import DFlash


class DraftSession:
    """Drafts chains for one request with a `DFlash` network over its target.

    The newest features wait until the next block, so that their keys and values are computed in
    the same products as the block's own.
    """

    def __init__(self, drafter: DFlash, target: Target, sampler: Sampler) -> None:
        self._drafter, self._target, self._sampler = drafter, target, sampler
        self._cache = drafter.make_cache()
        self._pending: mx.array | None = None

    def extend(self, taps: mx.array) -> None:
        """Take in the features [1, S, K*D] of S newly committed tokens, in order."""
        if self._pending is not None:
            # A further chunk of the prompt, or a round that drafted nothing. Evaluating now lets
            # the chunk's features go: a long prompt's never lie in memory together.
            self._drafter.extend(self._pending, self._cache)
            mx.async_eval([layer.state for layer in self._cache])
        self._pending = taps if taps.shape[1] else None

    def propose(self, anchor: int, width: int) -> Proposal:
        """Draft a chain of at most `width` rows, the anchor first; nothing waits for the device."""
        config = self._drafter.config
        rows = min(width, config.block_size)
        if rows == 1:
            return Proposal([anchor])
        block = mx.array([[anchor] + [config.mask_token_id] * (rows - 1)])
        taps = self._pending
        if taps is None:
            taps = mx.zeros((1, 0, len(config.target_layer_ids) * config.hidden_size))
        self._pending = None
        drafter, target = self._drafter, self._target
        hidden = drafter(drafter.embed(block, target), taps, self._cache)
        # The anchor's row predicts nothing, so neither the head nor the selector sees it.
        drafts = drafter.draft(hidden[:, 1:], block[0, 0], target, self._sampler)
        return Proposal(mx.concatenate([block[0, :1], drafts.astype(block.dtype)]))
