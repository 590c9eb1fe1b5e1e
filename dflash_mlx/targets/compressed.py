"""Taking rejected rows out of DeepSeek-V4.1's cache.

Its layers keep a sliding window of keys, and some of them also pool every `ratio` rows into one
compressed entry; rows of the group that is still open wait with their gates. A rejected row may
have closed a group or pushed an old row out of the window, so the fields before the verify are
held by reference (each update makes new arrays), what entered them is recorded, and the commit
puts the kept rows behind the old ones: no layer runs again.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import mlx.core as mx
import mlx.nn as nn

from .compressed_tree import Groups, branch
from .internals import LayerCache, attention_of, compression, watch_window
from .overrides import Overrides
from .tree import Tree


class CompressedTape:
    """What one verify put into a DeepSeek-V4.1 layer's cache, for one request.

    Args:
        cache: the layer's cache.
        layer: its `DecoderLayer`.
        overrides: where the recorders are added.
    """

    def __init__(self, cache: LayerCache, layer: nn.Module, overrides: Overrides) -> None:
        self._cache, self._attention = cache, attention_of(layer)
        self._tree: Callable[[], Tree]
        self._rows: mx.array  # of the window, [1, S, D], as the last verify made them
        watch_window(cache, self._record_window)
        # With a ratio of 1 every row is its own group, and none is ever open.
        self._ratio = compression(self._attention)
        self._pending: dict[str, mx.array] = {}
        if self._ratio > 1:
            compressor = self._attention.compressor
            overrides.watch(compressor.kv_proj, lambda _, rows: self._pending.update(kv=rows))
            overrides.watch(compressor.gate_proj, lambda _, rows: self._pending.update(gate=rows))

    def begin(self) -> None:
        """Hold on to the fields that a verify is about to replace."""
        cache = self._cache
        self._window, self._offset = cache.window, cache.offset
        self._open_kv, self._open_gate = cache.pending_kv, cache.pending_gate

    def keep(self, kept: int, rejected: int) -> None:
        """Set the cache to what it is after the first `kept` rows of the verify."""
        if not rejected:
            return
        cache = self._cache
        cache.window = _behind(self._window, self._rows[:, :kept])[:, -cache.window_size :]
        cache.offset = self._offset + kept
        if self._ratio == 1:
            self._keep_groups(cache.offset)
        elif self._ratio:
            kv = _behind(self._open_kv, self._pending["kv"][:, :kept])
            gate = _behind(self._open_gate, self._pending["gate"][:, :kept])
            closed = kv.shape[1] - kv.shape[1] % self._ratio
            cache.pending_kv, cache.pending_gate = kv[:, closed:], gate[:, closed:]
            self._keep_groups(cache.offset // self._ratio)

    def branch(self, overrides: Overrides, tree: Callable[[], Tree]) -> None:
        """Have the layer read the tree that `tree` gives while `overrides` is installed."""
        self._tree = tree
        branch(self._attention, overrides, tree)

    def move(self, kept: Sequence[int]) -> None:
        """Put what was recorded of a path in a tree where a chain's would be.

        Entries are written over those of other branches. That may copy the entries, as mlx-lm does
        in every forward that adds one; their number is a `ratio`-th of the context's.
        """
        path = mx.array(list(kept))
        self._rows = self._rows[:, path]
        self._pending = {name: rows[:, path] for name, rows in self._pending.items()}
        if self._ratio:
            groups = Groups(self._tree(), self._offset, self._ratio)
            line, start = groups.lines[kept[-1]], groups.before
            for entries in (self._cache.compress_kv, self._cache.index_k) if line else ():
                if entries is not None:
                    new = entries[:, start:][:, mx.array(line)]
                    entries[:, start : start + len(line)] = new

    def _record_window(self, rows: mx.array) -> None:
        self._rows = rows

    def _keep_groups(self, groups: int) -> None:
        """Forget the compressed entries after the first `groups`."""
        cache = self._cache
        cache.compress_kv = _first(cache.compress_kv, groups)
        cache.index_k = _first(cache.index_k, groups)


def _first(entries: mx.array | None, groups: int) -> mx.array | None:
    """The first entries [1, groups, D], if there are any."""
    return None if entries is None or not groups else entries[:, :groups]


def _behind(held: mx.array | None, new: mx.array) -> mx.array:
    """Rows [1, S, D] appended to those held, if any."""
    return new if held is None else mx.concatenate([held, new], axis=1)
