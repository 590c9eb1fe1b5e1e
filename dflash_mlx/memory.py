"""The device's memory: an error that says when it runs out, and buffers that MLX gives back.

On Metal, MLX keeps every freed buffer, and reuses it only for a request at most 32 KB smaller.
Caches that grow by concatenation fit none of them, so the process would grow without bound. As
mlx-lm does, a target's session calls `mx.clear_cache` after each piece of a prompt and once per
`SPAN` tokens.
"""

from __future__ import annotations

from typing import Any

import mlx.core as mx

from .errors import NotEnoughMemoryError
from .validation import error_text

SPAN = 256  # tokens, by which mlx-lm's caches grow
# In MLX's messages, of Metal's command buffers, of allocators and of CUDA.
_NO_MEMORY = ("Insufficient Memory", "[malloc", "[metal::malloc]", "out of memory")


def compute(*arrays: Any, wait: bool = True) -> None:
    """Compute trees of arrays, or start to. Raises `NotEnoughMemoryError` if memory runs out."""
    try:
        mx.eval(*arrays) if wait else mx.async_eval(*arrays)
    except RuntimeError as error:
        if not any(mark in str(error) for mark in _NO_MEMORY):
            raise
        raise NotEnoughMemoryError(
            f"The device has no memory left ({error_text(error)}): shorten the prompt, lower "
            "max_tokens, the number of requests or the prefix cache's memory, set kv_bits, or "
            "close other programs."
        ) from error
