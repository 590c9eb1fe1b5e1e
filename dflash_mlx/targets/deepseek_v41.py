"""DeepSeek-V4.1's compressed attention in a verify: rollback and trees.

A layer keeps a sliding window of rows. Some layers also pool every `ratio` rows into a compressed
entry, and an indexer picks entries for each row; rows of the group that is still open wait with
their gates.

Rollback: a rejected row may have closed a group or pushed an old row out of the window. So the
fields before the verify are held by reference, the verify's rows are recorded, and the commit puts
the kept ones behind the old ones. No layer runs again.

Trees: a row's window is the end of its own path. Each node that closes a group pools the rows of
its path into an entry, and a row picks among the older entries and those of its path.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import mlx.core as mx
import mlx.nn as nn

from .internals import (
    LayerCache,
    apply_rope,
    attention_of,
    compression,
    fake_quant_fp4,
    fields,
    watch_window,
)
from .overrides import Overrides
from .tree import Tree

# Fields of a layer's cache: compressed entries, one per `ratio` tokens, and the rest.
ENTRIES = ("compress_kv", "index_k")
OPEN_GROUP = ("window", "pending_kv", "pending_gate")
RATIO = "ratio"  # a field that a session adds


class CompressedRollback:
    """The rows that one verify put into a DeepSeek-V4.1 layer's cache, for one request.

    Args:
        cache: the layer's cache.
        layer: its `DecoderLayer`.

    Attributes:
        tree: the tree that the current verify reads; None for a chain.
    """

    def __init__(self, cache: LayerCache, layer: nn.Module) -> None:
        self._cache = cache
        self.tree: Tree | None = None
        self._pending: dict[str, mx.array] = {}
        self._rows: mx.array  # of the window, [1, S, D], in the last verify
        watch_window(cache, self._record_window)
        # With a ratio of 1 every row is its own group, and none is ever open.
        self._ratio = fields(cache)[RATIO] = compression(attention_of(layer))

    def begin(self, tree: Tree | None) -> None:
        """Hold on to the fields that the next verify replaces."""
        cache, self.tree = self._cache, tree
        self._window, self._offset = cache.window, cache.offset
        self._open_kv, self._open_gate = cache.pending_kv, cache.pending_gate

    def commit(self, kept: int, rejected: int) -> None:
        """Set the cache to its value after the first `kept` rows of the verify."""
        cache = self._cache
        cache.window = _append(self._window, self._rows[:, :kept])[:, -cache.window_size :]
        cache.offset = self._offset + kept
        if self._ratio == 1:
            self._trim_entries(cache.offset)
        elif self._ratio:
            kv = _append(self._open_kv, self._pending["kv"][:, :kept])
            gate = _append(self._open_gate, self._pending["gate"][:, :kept])
            closed = kv.shape[1] - kv.shape[1] % self._ratio
            cache.pending_kv, cache.pending_gate = kv[:, closed:], gate[:, closed:]
            self._trim_entries(cache.offset // self._ratio)

    def move(self, kept: Sequence[int]) -> None:
        """Put the recorded rows of a tree's path in front, as those of a chain.

        Its entries are written over those of other branches. That may copy the entries, as every
        forward of mlx-lm does that adds one.
        """
        path = mx.array(list(kept))
        self._rows = self._rows[:, path]
        self._pending = {name: rows[:, path] for name, rows in self._pending.items()}
        if self._ratio:
            assert self.tree is not None
            groups = ClosedGroups(self.tree, self._offset, self._ratio)
            line, start = groups.lines[kept[-1]], groups.before
            for entries in (self._cache.compress_kv, self._cache.index_k) if line else ():
                if entries is not None:
                    new = entries[:, start:][:, mx.array(line)]
                    entries[:, start : start + len(line)] = new

    def record(self, **projected: mx.array) -> None:
        """Record a compressor's kv or gate of a verify's rows, which wait for their group."""
        self._pending.update(projected)

    def _record_window(self, rows: mx.array) -> None:
        self._rows = rows

    def _trim_entries(self, groups: int) -> None:
        """Forget the compressed entries after the first `groups`."""
        cache = self._cache
        cache.compress_kv = _first(cache.compress_kv, groups)
        cache.index_k = _first(cache.index_k, groups)


def record_compression(
    layer: nn.Module,
    overrides: Overrides,
    rollbacks: Callable[[], Sequence[CompressedRollback]],
    kernels: object,
) -> None:
    """Have a layer's modules read one request's chain or tree, and record the rows of a chain.

    Args:
        layer: a `DecoderLayer`.
        overrides: the verify's, to which its modules are added.
        rollbacks: returns those of the requests in the running forward: one.
        kernels: none of ours runs here.
    """
    attention = attention_of(layer)
    own = type(attention).__call__

    def window(*args: Any, window_idx: Any, cache: Any, **named: Any) -> Any:
        tree, held = rollbacks()[0].tree, 0 if cache.window is None else cache.window.shape[1]
        if tree is not None:
            rows = tree.windows(min(cache.window_size, held + len(tree.levels)), held)
            window_idx = mx.maximum(rows, -1)[None]
        return own(*args, window_idx=window_idx, cache=cache, **named)

    def if_tree(module: nn.Module, for_tree: Callable[..., Any]) -> None:
        """Have `for_tree` run instead of a module while a tree is read."""
        own = type(module).__call__

        def call(*args: Any, **named: Any) -> Any:
            tree = rollbacks()[0].tree
            return own(*args, **named) if tree is None else for_tree(*args, tree=tree, **named)

        overrides.replace(module, call)

    overrides.replace(attention, window)
    if compression(attention) > 1:
        compressor = attention.compressor
        overrides.watch(compressor.kv_proj, lambda _, rows: rollbacks()[0].record(kv=rows))
        overrides.watch(compressor.gate_proj, lambda _, rows: rollbacks()[0].record(gate=rows))
    if attention.is_kv_source and attention.ratio:
        if_tree(attention.compressor, _compress)
    if attention.is_index_source and attention.ratio:
        if_tree(attention.indexer, _pick)


class ClosedGroups:
    """The groups that close inside a tree whose root is at position `start`.

    Attributes:
        before: older entries.
        rows: the rows that close a group, in order; their entries follow the older ones.
        lines: for every row, which of `rows` are on its path.
        seen: [N, 1] int32, entries that each row sees.
    """

    def __init__(self, tree: Tree, start: int, ratio: int) -> None:
        self.before = start // ratio
        self.seen = ((start + 1 + tree.depths) // ratio)[:, None]
        closing = range((-start - 1) % ratio, len(tree.levels), ratio)
        self.rows = sorted(row for depth in closing for row in tree.levels[depth])
        self.lines: list[list[int]] = []
        place = {row: at for at, row in enumerate(self.rows)}
        for row, parent in enumerate(tree.parents):
            above = self.lines[parent] if parent >= 0 else []
            self.lines.append([*above, place[row]] if row in place else above)
        longest = max(map(len, self.lines))
        lines = [[*line, *[0] * (longest - len(line))] for line in self.lines]
        self._map = mx.array(lines, mx.int32).reshape(len(tree), longest)

    def along_paths(self, scores: mx.array) -> mx.array:
        """Scores [1, N, entries] in the order of each row's path; -inf for entries not on it."""
        old, new = scores[..., : self.before], scores[..., self.before :]
        new = mx.take_along_axis(new, self._map[None], axis=-1)
        scores = mx.concatenate([old, new], axis=-1)
        return mx.where(mx.arange(scores.shape[-1]) < self.seen, scores, -mx.inf)

    def entries(self, chosen: mx.array) -> mx.array:
        """The entries [1, N, k] at places on each row's path; -1 for those it does not see."""
        if not self._map.shape[1]:
            return mx.where(chosen < self.seen, chosen, -1)
        inside = mx.maximum(chosen - self.before, 0)
        new = self.before + mx.take_along_axis(self._map[None], inside, axis=-1)
        entries = mx.where(chosen < self.before, chosen, new)
        return mx.where(chosen < self.seen, entries, -1)


def _compress(
    self: Any, x: mx.array, start_pos: int, cache: Any, tree: Tree
) -> tuple[mx.array | None, int | mx.array]:
    """A compressor's entries that a tree's rows x [1, N, D] close, and their positions.

    None for no entries. The rows of the open group stay in the cache.
    """
    if self.ratio == 1:
        return self.kv_norm(self.kv_proj(x)), start_pos
    kv, gate = self.kv_proj(x.astype(mx.float32)), self.gate_proj(x.astype(mx.float32))
    held = start_pos % self.ratio
    if held:
        kv = mx.concatenate([cache.pending_kv, kv], axis=1)
        gate = mx.concatenate([cache.pending_gate, gate], axis=1)
    groups = ClosedGroups(tree, start_pos, self.ratio)
    if not groups.rows:
        return None, groups.before
    closing = mx.array(groups.rows)
    rows = tree.windows(self.ratio, held)[closing]
    latent = (kv[0][rows] * mx.softmax(gate[0][rows], axis=1)).sum(axis=1)
    # One position per entry: siblings' entries share theirs.
    return self.kv_norm(latent[None].astype(x.dtype)), groups.seen[closing, 0] - 1


def _pick(
    self: Any,
    x: mx.array,
    q_residual: mx.array,
    *,
    index_k: mx.array | None,
    candidates: mx.array | None,
    rope: nn.Module,
    start_pos: int,
    tree: Tree,
) -> tuple[mx.array, mx.array | None]:
    """An indexer's entries [1, N, k] for each row of a tree, and candidates for later layers."""
    if index_k is None or not index_k.shape[1]:
        return mx.zeros((1, x.shape[1], 0), mx.int32), candidates
    groups = ClosedGroups(tree, start_pos, self.ratio)
    scores = groups.along_paths(_scores(self, x, q_residual, index_k, rope, start_pos))
    if self.is_candidate_source and self.candidate_topk_blocks > 0:
        candidates = _candidates(self, scores, groups.seen)
    elif candidates is not None:
        scores = mx.where(candidates, scores, -mx.inf)
    count = min(self.index_topk, scores.shape[-1])
    chosen = mx.argpartition(-scores, count - 1, axis=-1)[..., :count].astype(mx.int32)
    return groups.entries(chosen), candidates


def _scores(
    self: Any, x: mx.array, residual: mx.array, index_k: mx.array, rope: nn.Module, start: int
) -> mx.array:
    """The indexer's score [1, N, K] of every entry for every row, as mlx-lm computes it."""
    q = self.q_b_proj(residual).reshape(1, -1, self.num_heads, self.head_dim)
    q = apply_rope(q, rope, rope_dim=self.rope_dim, offset=start)
    q = fake_quant_fp4(q, block_size=32).astype(mx.float32)
    weights = self.weights_proj(x).astype(mx.float32) * self.num_heads**-0.5
    scores = q @ index_k.astype(mx.float32)[:, None].swapaxes(-1, -2)
    scores = mx.maximum(scores, 0.0) * self.head_dim**-0.5
    return (scores * weights[..., None]).sum(axis=2)


def _candidates(self: Any, scores: mx.array, seen: mx.array) -> mx.array:
    """Which entries [1, N, V] lie in the blocks of each row's best entries.

    The newest block always counts: it is partly full, so an older one may score higher.
    """
    size, entries = self.candidate_block_size, scores.shape[-1]
    padded = mx.pad(scores, [(0, 0), (0, 0), (0, -entries % size)], constant_values=-mx.inf)
    blocks = padded.reshape(1, scores.shape[1], -1, size).max(axis=-1)
    newest = mx.where(seen > 0, (seen - 1) // size, -1)
    blocks = mx.where(mx.arange(blocks.shape[-1]) == newest, mx.inf, blocks)
    count = min(self.candidate_topk_blocks, blocks.shape[-1])
    best = mx.argpartition(-blocks, count - 1, axis=-1)[..., :count]
    reachable = mx.take_along_axis(blocks, best, axis=-1) > -mx.inf
    chosen = mx.put_along_axis(mx.zeros(blocks.shape, mx.bool_), best, reachable, axis=-1)
    return mx.repeat(chosen, size, axis=-1)[..., :entries]


def _first(entries: mx.array | None, groups: int) -> mx.array | None:
    """The first entries [1, groups, D], if there are any."""
    return None if entries is None or not groups else entries[:, :groups]


def _append(held: mx.array | None, new: mx.array) -> mx.array:
    """Rows [1, S, D] appended to those held, if any."""
    return new if held is None else mx.concatenate([held, new], axis=1)


def rows_of_entries(cache: LayerCache, start: int, end: int) -> dict[str, mx.array]:
    """The compressed entries of the groups that close among tokens `start` to `end`."""
    ratio = fields(cache)[RATIO]
    if not ratio or start // ratio == end // ratio:
        return {}
    entries = {name: fields(cache)[name] for name in ENTRIES}
    return {n: x[:, start // ratio : end // ratio] for n, x in entries.items() if x is not None}


def state_of_entries(cache: LayerCache) -> dict[str, mx.array]:
    """The window and the open group."""
    held = {name: fields(cache)[name] for name in OPEN_GROUP}
    return {name: mx.array(x) for name, x in held.items() if x is not None and x.size}


def restore_entries(
    cache: LayerCache,
    position: int,
    rows: Sequence[Mapping[str, mx.array]],
    state: Mapping[str, mx.array],
    room: int,
) -> None:
    """Fill an empty cache: see `caches.restore_all`."""
    held = {name: state[name][...] for name in OPEN_GROUP if name in state}
    for name in ENTRIES:
        pieces = [piece[name] for piece in rows if name in piece]
        if pieces:
            held[name] = mx.concatenate(pieces, axis=1)
    fields(cache).update(held, offset=position)
