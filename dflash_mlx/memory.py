"""The device's memory: an error when it runs out, and how often MLX returns freed buffers.

On Metal, MLX keeps every freed buffer, and reuses it only for an allocation that is at most 32 KB
smaller. Caches that grow by concatenation never fit, so the process would grow without bound. Like
mlx-lm, a target's session calls `mx.clear_cache` after each chunk of a prompt and once per `SPAN`
tokens.
"""

from __future__ import annotations

from typing import Any

import mlx.core as mx

from .errors import NotEnoughMemoryError
from .validation import error_text

SPAN = 256  # tokens between two calls of `mx.clear_cache`; mlx-lm's caches grow by as many
# What MLX's messages contain when Metal's command buffers, an allocator or CUDA have no memory.
_NO_MEMORY = ("Insufficient Memory", "[malloc", "[metal::malloc]", "out of memory")


def compute(*arrays: Any, wait: bool = True) -> None:
    """Compute trees of arrays; only start to, unless `wait`.

    Raises `NotEnoughMemoryError` if memory runs out.
    """
    try:
        if wait:
            mx.eval(*arrays)
        else:
            mx.async_eval(*arrays)
    except RuntimeError as error:
        if not any(text in str(error) for text in _NO_MEMORY):
            raise
        raise NotEnoughMemoryError(
            f"The device has run out of memory ({error_text(error)}): shorten the prompt, lower "
            "max_tokens, the number of requests or the prefix cache's memory, set kv_bits, or "
            "close other programs."
        ) from error
