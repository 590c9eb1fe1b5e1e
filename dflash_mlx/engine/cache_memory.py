"""The memory budget: which requests may have caches at the same time.

A request is admitted if its text so far and the next `RESERVE` tokens fit beside the others. It is
refused at once if even alone it could outgrow the budget. Texts may still grow beyond the reserve
and fill the budget; then the scheduler preempts the youngest.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

from ..drafter.protocol import Drafter, cache_bytes
from ..errors import NotEnoughMemoryError
from ..prefix.store import PrefixStore
from ..request import Request
from ..targets import Target
from ..targets.kv_slots import SPARE, capacity_for

RESERVE = 1024  # tokens
BLOCK = 256  # tokens; mlx-lm's caches grow by as many
MEASURED = 32  # blocks up to which cache shapes are looked up, and beyond which they are linear


class MemoryBudget:
    """Bounds the caches of an engine's requests.

    Args:
        target, drafter: the pair whose caches they are.
        size: bytes for all of them together; None is without limit.
        prefix: a prefix cache in the same memory, which frees entries for the requests.
        reserve: tokens of an answer that must fit when a request is admitted.
        slot_layers: the target's caches that are in slots while requests share steps, by number.
    """

    def __init__(
        self,
        target: Target,
        drafter: Drafter | None,
        size: int | None,
        prefix: PrefixStore | None = None,
        reserve: int = RESERVE,
        slot_layers: Sequence[int] = (),
    ) -> None:
        self._target, self._drafter, self._prefix = target, drafter, prefix
        self._size, self._reserve = size, reserve
        self._block_bytes: dict[tuple[int, int | None], int] = {}
        self._slot_bytes = target.cache_bytes(BLOCK, None, slot_layers)  # of a block's rows

    def check(self, request: Request) -> None:
        """Raise `NotEnoughMemoryError` for a request that could outgrow the budget alone."""
        if self._size is None:
            return
        most = self.bytes(request, request.remaining)
        if most > self._size:
            raise NotEnoughMemoryError(
                f"The caches of {request.tokens + request.remaining} tokens take {most:,} bytes, "
                f"and the engine has {self._size:,} for all: shorten the prompt or max_tokens."
            )

    def admits(self, request: Request, running: Sequence[Request]) -> bool:
        """Whether a request fits beside the running ones."""
        if self._size is None:
            return True
        return self._shared_bytes([request, *running], lambda _: self._reserve) <= self._size

    def overflows(self, running: Sequence[Request]) -> bool:
        """Whether the next step of these requests could exceed the budget."""
        if self._size is None and self._prefix is None:
            return False
        needed = self._shared_bytes(running, lambda one: one.stats.block_size)
        reserved = self._prefix is None or self._prefix.reserve(needed)
        return not reserved or (self._size is not None and needed > self._size)

    def bytes(self, request: Request, further: int) -> int:
        """Bytes of a request's caches after `further` more tokens."""
        return self._bytes_of(
            request.tokens + min(further, request.remaining), request.caches.kv_bits
        )

    def _shared_bytes(self, requests: Sequence[Request], further: Callable[[Request], int]) -> int:
        """Bytes of requests that share steps, and of spare slots."""
        total, blocks, count = 0, 0, len(requests)
        for one in requests:
            tokens = one.tokens + min(further(one), one.remaining)
            total += self._bytes_of(tokens, one.caches.kv_bits)
            if count > 1 and one.caches.kv_bits is None:
                total -= -(-tokens // BLOCK) * self._slot_bytes
                blocks += capacity_for(tokens) // BLOCK
        return total + blocks * self._slot_bytes * (count + count // SPARE) // max(1, count)

    def _bytes_of(self, tokens: int, kv_bits: int | None) -> int:
        """Bytes of the caches of so many tokens."""
        blocks = -(-tokens // BLOCK)
        if blocks <= MEASURED:
            return self._measured(blocks, kv_bits)
        # Sliding windows are full by then, so growth is linear.
        full, half = self._measured(MEASURED, kv_bits), self._measured(MEASURED // 2, kv_bits)
        return full + (blocks - MEASURED) * (full - half) // (MEASURED - MEASURED // 2)

    def _measured(self, blocks: int, kv_bits: int | None) -> int:
        """Bytes of so many blocks, from the shapes of empty caches."""
        key = blocks, kv_bits
        if key not in self._block_bytes:
            target_bytes = self._target.cache_bytes(blocks * BLOCK, kv_bits)
            self._block_bytes[key] = target_bytes + cache_bytes(
                self._drafter, self._target, blocks * BLOCK
            )
        return self._block_bytes[key]
