"""What the caches of requests take, and who may have some.

A request enters when its text so far and a good part of what it may go on by find room beside the
others; it is refused at once when even alone it could come to more than there is. Texts that grow
beyond what was set aside for them may fill the room all the same: then the youngest gives way.
"""

from __future__ import annotations

from collections.abc import Sequence

from ..drafter.protocol import Drafter, cache_bytes
from ..errors import NotEnoughMemoryError
from ..prefix.cache import PrefixCache
from ..request import Request
from ..targets import Target

AHEAD = 1024  # tokens
STEP = 256  # tokens by which mlx-lm's caches grow
TRIED = 32  # such steps for which their shapes are looked at


class Memory:
    """Room for the caches of requests.

    Args:
        target, drafter: whose caches they are.
        size: bytes for all of them together; None is without limit.
        store: of what is kept beside them, in room of its own that they may take from it.
        ahead: tokens of an answer for which there is room when a request enters.
    """

    def __init__(
        self,
        target: Target,
        drafter: Drafter | None,
        size: int | None,
        store: PrefixCache | None = None,
        ahead: int = AHEAD,
    ) -> None:
        self._target, self._drafter, self._store = target, drafter, store
        self._size, self._ahead = size, ahead
        self._known: dict[tuple[int, int | None], int] = {}

    def check(self, request: Request) -> None:
        """Raise `NotEnoughMemoryError` for a request that could outgrow the room even alone."""
        if self._size is None:
            return
        most = self.bytes(request, request.remaining)
        if most > self._size:
            raise NotEnoughMemoryError(
                f"The caches of {request.tokens + request.remaining} tokens take {most:,} bytes, "
                f"and the engine has {self._size:,} for all: shorten the prompt or max_tokens."
            )

    def enters(self, request: Request, beside: Sequence[Request]) -> bool:
        """Whether there is room for a request beside others."""
        if self._size is None:
            return True
        set_aside = sum(self.bytes(each, self._ahead) for each in [request, *beside])
        return set_aside <= self._size

    def overflows(self, requests: Sequence[Request]) -> bool:
        """Whether the next round of these would need more than there is."""
        if self._size is None and self._store is None:
            return False
        needed = sum(self.bytes(each, each.stats.block_size) for each in requests)
        stored = self._store is None or self._store.reserve(needed)
        return not stored or (self._size is not None and needed > self._size)

    def bytes(self, request: Request, further: int) -> int:
        """What a request's caches take once its text has gone on by so many tokens."""
        tokens = request.tokens + min(further, request.remaining)
        blocks, kv_bits = -(-tokens // STEP), request.kv_bits
        if blocks <= TRIED:
            return self._tried(blocks, kv_bits)
        # From there on they grow as they did before: windows have long been full.
        whole, half = self._tried(TRIED, kv_bits), self._tried(TRIED // 2, kv_bits)
        return whole + (blocks - TRIED) * (whole - half) // (TRIED - TRIED // 2)

    def _tried(self, blocks: int, kv_bits: int | None) -> int:
        """The bytes of so many blocks, from the shapes that they would have."""
        of = blocks, kv_bits
        if of not in self._known:
            tokens = blocks * STEP
            of_target = self._target.cache_bytes(tokens, kv_bits)
            self._known[of] = of_target + cache_bytes(self._drafter, tokens)
        return self._known[of]
