"""Reading a draft tree through DeepSeek-V4.1's attention.

A layer sees a sliding window of rows and, further back, entries that each pool `ratio` rows of a
group; an indexer picks entries for every row. In a tree a row's window is the end of its own path,
each node that closes a group pools the group's rows on its path into an entry of its own, and a
row picks among the older entries and those of its path. The model's attention runs as it is;
only its window indices, its compressor and its indexer are told about paths.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import mlx.core as mx
import mlx.nn as nn

from .internals import apply_rope, fake_quant_fp4
from .overrides import Overrides
from .tree import Tree


class Groups:
    """The groups that close inside a tree whose root stands at position `start`.

    Attributes:
        before: entries that were there already.
        rows: the rows that close a group, in order; their entries follow the older ones.
        lines: for every row, which of them are on its path.
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
        """Scores [1, N, entries] in the order of each row's own path, -inf for what it lacks."""
        old, new = scores[..., : self.before], scores[..., self.before :]
        new = mx.take_along_axis(new, self._map[None], axis=-1)
        scores = mx.concatenate([old, new], axis=-1)
        return mx.where(mx.arange(scores.shape[-1]) < self.seen, scores, -mx.inf)

    def entries(self, chosen: mx.array) -> mx.array:
        """The entries [1, N, k] of places on each row's path; -1 for those it does not see."""
        if not self._map.shape[1]:
            return mx.where(chosen < self.seen, chosen, -1)
        inside = mx.maximum(chosen - self.before, 0)
        new = self.before + mx.take_along_axis(self._map[None], inside, axis=-1)
        entries = mx.where(chosen < self.before, chosen, new)
        return mx.where(chosen < self.seen, entries, -1)


def branch(attention: Any, overrides: Overrides, tree: Callable[[], Tree]) -> None:
    """Have an attention layer read the tree that `tree` gives while `overrides` is installed."""
    own = type(attention).__call__

    def attend(self: Any, x: mx.array, *, window_idx: Any, cache: Any, **rest: Any) -> mx.array:
        held = 0 if cache.window is None else cache.window.shape[1]
        rows = tree().windows(min(cache.window_size, held + len(tree().levels)), held)
        return own(self, x, window_idx=mx.maximum(rows, -1)[None], cache=cache, **rest)

    overrides.replace(attention, attend)
    if attention.is_kv_source and attention.ratio:
        overrides.replace(attention.compressor, _compress(tree))
    if attention.is_index_source and attention.ratio:
        overrides.replace(attention.indexer, _index(tree))


def _compress(tree: Callable[[], Tree]) -> Callable[..., Any]:
    """What stands in for a compressor; the rows of the open group stay in the cache."""

    def compress(
        self: Any, x: mx.array, start_pos: int, cache: Any
    ) -> tuple[mx.array | None, int | mx.array]:
        """The entries that close in rows x [1, N, D], None if none does, and their positions."""
        if self.ratio == 1:
            return self.kv_norm(self.kv_proj(x)), start_pos
        kv, gate = self.kv_proj(x.astype(mx.float32)), self.gate_proj(x.astype(mx.float32))
        held = start_pos % self.ratio
        if held:
            kv = mx.concatenate([cache.pending_kv, kv], axis=1)
            gate = mx.concatenate([cache.pending_gate, gate], axis=1)
        groups = Groups(tree(), start_pos, self.ratio)
        if not groups.rows:
            return None, groups.before
        closing = mx.array(groups.rows)
        rows = tree().windows(self.ratio, held)[closing]
        latent = (kv[0][rows] * mx.softmax(gate[0][rows], axis=1)).sum(axis=1)
        # An array of positions, one for each entry: siblings' entries stand at the same one.
        return self.kv_norm(latent[None].astype(x.dtype)), groups.seen[closing, 0] - 1

    return compress


def _index(tree: Callable[[], Tree]) -> Callable[..., Any]:
    """What stands in for an indexer."""

    def pick(
        self: Any,
        x: mx.array,
        q_residual: mx.array,
        *,
        index_k: mx.array | None,
        candidates: mx.array | None,
        rope: nn.Module,
        start_pos: int,
    ) -> tuple[mx.array, mx.array | None]:
        """The entries [1, N, k] that each row reads, and candidate blocks for later layers."""
        if index_k is None or not index_k.shape[1]:
            return mx.zeros((1, x.shape[1], 0), mx.int32), candidates
        groups = Groups(tree(), start_pos, self.ratio)
        scores = groups.along_paths(_scores(self, x, q_residual, index_k, rope, start_pos))
        if self.is_candidate_source and self.candidate_topk_blocks > 0:
            candidates = _candidates(self, scores, groups.seen)
        elif candidates is not None:
            scores = mx.where(candidates, scores, -mx.inf)
        count = min(self.index_topk, scores.shape[-1])
        chosen = mx.argpartition(-scores, count - 1, axis=-1)[..., :count].astype(mx.int32)
        return groups.entries(chosen), candidates

    return pick


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
    """Which entries [1, N, V] lie in the blocks that each row's best entries are in.

    The newest block is always among them: it is partly full, so an older one may score higher.
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
