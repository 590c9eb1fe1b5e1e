"""A target's caches: one class per kind, each mlx-lm's own class with what drafting needs.

A cache consists of *rows*, one per token, and *state*, which is valid at one position only: a
sliding window or a recurrent state. Rows can be sliced by token and concatenated. A cache with
state can only go back to a *checkpoint*, which holds the old arrays by reference.
"""

from .base import (
    Arrays,
    Checkpoint,
    DraftCache,
    arrays_of_all,
    checkpoint_all,
    restore_all,
    rewind_all,
    rows_of_all,
    state_of_all,
    strip_prefix,
)
from .cache_parts import CacheParts
from .chunked import ChunkedCache
from .kv import FullCache, QuantizedCache
from .make import check_kv_bits, make_cache, own_cache
from .recurrent import RecurrentCache
from .window import WindowCache

__all__ = [
    "Arrays",
    "CacheParts",
    "Checkpoint",
    "ChunkedCache",
    "DraftCache",
    "FullCache",
    "QuantizedCache",
    "RecurrentCache",
    "WindowCache",
    "arrays_of_all",
    "check_kv_bits",
    "checkpoint_all",
    "make_cache",
    "own_cache",
    "restore_all",
    "rewind_all",
    "rows_of_all",
    "state_of_all",
    "strip_prefix",
]
