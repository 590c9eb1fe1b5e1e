"""The memory budget decides which requests may have caches at the same time.

A request is admitted if its text so far and `RESERVE_TOKENS` more fit together with the other
requests. It is refused at once if it could outgrow the budget even alone. Texts may still grow
beyond the reserve and fill the budget; then the scheduler preempts the youngest request.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

from ..drafter.protocol import Drafter, cache_bytes
from ..errors import NotEnoughMemoryError
from ..prefix.store import PrefixStore
from ..request import Request
from ..targets import Target
from ..targets.kv_slots import SPARE, capacity_for

# Tokens of an answer that must fit into memory when its request is admitted.
RESERVE_TOKENS = 1024
# mlx-lm's caches grow in blocks of this many tokens.
BLOCK_TOKENS = 256
# Up to this many blocks, sizes come from the shapes of caches. Beyond it, they grow linearly.
MEASURED_BLOCKS = 32


class MemoryBudget:
    """Bounds the caches of an engine's requests.

    Args:
        target, drafter: the pair that the caches belong to.
        size: the limit for all caches together, in bytes; None for no limit.
        prefix: a prefix cache in the same memory, which frees entries for the requests.
        reserve: tokens of an answer that must fit when a request is admitted.
        slot_layers: the numbers of the target's caches that are in slots in shared steps.
    """

    def __init__(
        self,
        target: Target,
        drafter: Drafter | None,
        size: int | None,
        prefix: PrefixStore | None = None,
        reserve: int = RESERVE_TOKENS,
        slot_layers: Sequence[int] = (),
    ) -> None:
        self._target = target
        self._drafter = drafter
        self._prefix = prefix
        self._size = size
        self._reserve = reserve
        self._block_bytes: dict[tuple[int, int | None], int] = {}
        self._slot_bytes = target.cache_bytes(BLOCK_TOKENS, None, slot_layers)

    def check(self, request: Request) -> None:
        """Raise `NotEnoughMemoryError` for a request that could outgrow the budget alone."""
        if self._size is None:
            return
        max_bytes = self.bytes(request, request.remaining)
        if max_bytes > self._size:
            raise NotEnoughMemoryError(
                f"The caches of {request.tokens + request.remaining} tokens take {max_bytes:,} "
                f"bytes, and the engine has {self._size:,} for all: shorten the prompt or "
                "max_tokens."
            )

    def admits(self, request: Request, running: Sequence[Request]) -> bool:
        """Whether a request fits together with the running ones."""
        if self._size is None:
            return True
        return self._shared_bytes([request, *running], lambda _: self._reserve) <= self._size

    def overflows(self, running: Sequence[Request]) -> bool:
        """Whether the next step of these requests could exceed the budget."""
        if self._size is None and self._prefix is None:
            return False
        needed = self._shared_bytes(running, lambda request: request.stats.block_size)
        reserved = self._prefix is None or self._prefix.reserve(needed)
        return not reserved or (self._size is not None and needed > self._size)

    def bytes(self, request: Request, further: int) -> int:
        """Bytes of a request's caches after `further` more tokens."""
        return self._request_bytes(
            request.tokens + min(further, request.remaining), request.caches.kv_bits
        )

    def _shared_bytes(self, requests: Sequence[Request], further: Callable[[Request], int]) -> int:
        """Bytes of the caches of requests that share steps, spare slots included."""
        total = 0
        blocks = 0
        count = len(requests)
        for request in requests:
            tokens = request.tokens + min(further(request), request.remaining)
            total += self._request_bytes(tokens, request.caches.kv_bits)
            if count > 1 and request.caches.kv_bits is None:
                # Layers in slots take a whole slot, instead of a cache of their own.
                total -= -(-tokens // BLOCK_TOKENS) * self._slot_bytes
                blocks += capacity_for(tokens) // BLOCK_TOKENS
        slots = count + count // SPARE  # spare ones included
        return total + blocks * self._slot_bytes * slots // max(1, count)

    def _request_bytes(self, tokens: int, kv_bits: int | None) -> int:
        """Bytes of the caches of one request with so many tokens."""
        blocks = -(-tokens // BLOCK_TOKENS)
        if blocks <= MEASURED_BLOCKS:
            return self._measured(blocks, kv_bits)
        # Sliding windows are full by then, so growth is linear.
        full = self._measured(MEASURED_BLOCKS, kv_bits)
        half = self._measured(MEASURED_BLOCKS // 2, kv_bits)
        blocks_between = MEASURED_BLOCKS - MEASURED_BLOCKS // 2
        return full + (blocks - MEASURED_BLOCKS) * (full - half) // blocks_between

    def _measured(self, blocks: int, kv_bits: int | None) -> int:
        """Bytes of the caches of so many blocks, from the shapes of caches without data."""
        key = (blocks, kv_bits)
        if key not in self._block_bytes:
            target_bytes = self._target.cache_bytes(blocks * BLOCK_TOKENS, kv_bits)
            self._block_bytes[key] = target_bytes + cache_bytes(
                self._drafter, self._target, blocks * BLOCK_TOKENS
            )
        return self._block_bytes[key]
