"""Keys and values of a chunk of the text, as Llama 4 has them."""

from __future__ import annotations

from collections.abc import Sequence

from ..internals import ChunkedKVCache
from .generic import GenericCache


class ChunkedCache(GenericCache, ChunkedKVCache):
    """Rejected rows leave at the end. Older rows leave in front, so only a checkpoint goes back."""

    rolls_back = True

    def commit(self, kept: Sequence[int], rows: int) -> None:
        """Keep these rows of the verification, and remove the others."""
        self.trim(rows - len(kept))
