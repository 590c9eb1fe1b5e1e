"""Attention of a draft's rows over a long context, split over the keys.

Stock attention splits the context for up to eight queries only. The kernel reads keys and values
once for all rows and all query heads that share them. `metal/block_attention.metal` explains it,
and why a row's bits do not depend on the chain or tree around it.
"""

from __future__ import annotations

from functools import partial
from itertools import product
from typing import Any, NamedTuple

import mlx.core as mx
import numpy as np

from ..errors import KernelError
from .launcher import (
    FEWEST_ELEMENTS,
    Calls,
    Constant,
    Kernel,
    Launch,
    Launcher,
    dtype_name,
    in_device_memory,
    kernel_name,
)
from .selfcheck import KernelCheck, Noise
from .weights import FLOATS, AffineWeights, dequantized, every_form, input_names, kind

HEAD_DIMS = (64, 80, 96, 128, 192, 256)
MOST_NODES = 64
# Keys of a threadgroup, at multiples of the absolute position: it defines the order of a row's sum,
# so it cannot depend on the length. More keys mean less parallel work in a short context and fewer
# partial sums in a long one.
CHUNK = 512
_UNLIMITED = 2**30  # a window that no context fills
MOST_STEPS = 32  # remembered launches: one per kind of layers and length

_MEMORY = """
  constexpr int KEYS = dflash::keys_per_tile(D * sizeof(T));
  threadgroup T key_tile[KEYS * (D + dflash::kPad)];
  threadgroup T value_tile[KEYS * (D + dflash::kPad)];
  threadgroup int rows[CHUNK];
  const int head = threadgroup_position_in_grid.x, key_heads = threadgroups_per_grid.x;
"""
_PLAIN = """
  const dflash::PlainRows<T> key_rows{
      keys + head * keys_strides[1], keys_strides[2], keys_strides[3]};
  const dflash::PlainRows<T> value_rows{
      values + head * values_strides[1], values_strides[2], values_strides[3]};
"""
_QUANTIZED = """
  const auto key_rows = dflash::quantized_rows<T, BITS, GROUP>(
      keys + head * keys_strides[1], keys_scales + head * keys_scales_strides[1],
      keys_biases + head * keys_biases_strides[1], keys_strides[2], keys_scales_strides[2]);
  const auto value_rows = dflash::quantized_rows<T, BITS, GROUP>(
      values + head * values_strides[1], values_scales + head * values_scales_strides[1],
      values_biases + head * values_biases_strides[1], values_strides[2], values_scales_strides[2]);
"""
_ATTEND = """
  const int nodes = queries_shape[2], group = queries_shape[1] / key_heads;
  const dflash::Problem problem{
      nodes, group, place[1], place[0], numbers[0], as_type<float>(numbers[1])};
  dflash::attend_chunk<T, D, CHUNK, BLOCKS, TREE>(queries, queries_strides[1], queries_strides[2],
      queries_strides[3], key_rows, value_rows, {tree}, problem, partial, stats,
      key_tile, value_tile, rows, threadgroup_position_in_grid, key_heads,
      thread_index_in_threadgroup, simdgroup_index_in_threadgroup, simdgroups_per_threadgroup,
      thread_index_in_simdgroup);
"""
_MERGE = """
  dflash::merge_chunks<T, SINKS>(partial, stats, {sinks}, counts[0], threads_per_grid.y, counts[1],
      out, thread_position_in_grid.y, thread_position_in_grid.x, threads_per_grid.x);
"""


def _attends(quantized: bool, tree: bool) -> Kernel:
    """The kernel of the first pass; a chain's positions need no array."""
    form = "affine" if quantized else "plain"
    stored = [*input_names("keys", form), *input_names("values", form)]
    positions = ["positions", "ancestors"] if tree else []
    call = _ATTEND.replace("{tree}", ", ".join(positions or ["nullptr", "nullptr"]))
    return Kernel(
        kernel_name("block_attention", "quantized" if quantized else "", "tree" if tree else ""),
        file="block_attention.metal",
        inputs=["queries", *stored, *positions, "numbers", "place"],
        outputs=["partial", "stats"],
        body=_MEMORY + (_QUANTIZED if quantized else _PLAIN) + call,
        copies=False,  # a cache's keys are a slice: never copy them
    )


def _merges(sinks: bool) -> Kernel:
    """The kernel of the second pass."""
    return Kernel(
        kernel_name("block_attention_merge", "sinks" if sinks else ""),
        file="block_attention.metal",
        inputs=["partial", "stats", "sinks", "counts"] if sinks else ["partial", "stats", "counts"],
        outputs=["out"],
        body=_MERGE.replace("{sinks}", "sinks" if sinks else "stats"),
    )


class TreeMask(NamedTuple):
    """The shape of a draft tree.

    Attributes:
        positions: [N] integers, the absolute position (depth) of each node, the root's first.
        ancestors: [N, N] booleans: whether node j lies on the path from the root to i, i included.
    """

    positions: mx.array
    ancestors: mx.array


class AttentionCall(NamedTuple):
    """One call of attention.

    Attributes:
        queries: [1, H, N, D], already rotated; N <= 64.
        keys, values: [1, KV, L, D], plain in the queries' dtype or quantized with scales of it, as
            mlx-lm's caches hold them. H is a multiple of KV. The draft's own rows are the last N;
            those before it lie in the order of their positions.
        scale: of the scores, commonly D ** -0.5.
        first: the absolute position of row 0; a sliding cache has dropped rows before it.
        window: positions a row looks back, its own included; None for all.
        sinks: [H] scores without a value (gpt-oss).
        tree: the tree; None for a chain.
        place: [2] int32, for a trace that fits all positions: the position of row 0 (0 without a
            window), in place of `first`, and how many rows to read. None reads all rows. Not for
            trees.
    """

    queries: mx.array
    keys: mx.array | AffineWeights
    values: mx.array | AffineWeights
    scale: float
    first: int = 0
    window: int | None = None
    sinks: mx.array | None = None
    tree: TreeMask | None = None
    place: mx.array | None = None


class Launches(NamedTuple):
    """What the layers of one kind share in a step.

    Attributes:
        attend, merge: the launches.
        numbers: the inputs of `attend` other than queries, keys, values and place.
        place: the place for calls that have none.
        counts: the number of chunks, and of nodes.
        tree: kept alive, so that no other tree gets its id, by which launches are remembered.
    """

    attend: Launch
    numbers: list[mx.array]
    place: mx.array
    merge: Launch
    counts: mx.array
    tree: TreeMask | None


class BlockAttention(Launcher):
    """Attention of the last N rows of a cache over all of it.

    A row sees the past and its own path in the draft, fewer than `window` positions back. Its bits
    depend only on the row and on what it sees.
    """

    def __call__(self, call: AttentionCall) -> mx.array:
        """The result [1, H, N, D] in the queries' dtype; sums are float32. Raises `KernelError`."""
        queries, keys, values, scale, first, window, sinks, tree, place = call
        key = (
            queries.shape,
            queries.dtype,
            kind(keys),
            kind(values),
            sinks is None,
            scale,
            first if place is None else None,
            window,
            None if tree is None else id(tree),
        )
        prepared = self._known.get(key)
        if prepared is None:
            if len(self._known) >= MOST_STEPS:
                self._known.clear()
            prepare = partial(self._prepare, call)
            prepared = self._checked(key, prepare, lambda: self._check(call))
        numbers = [*prepared.numbers, prepared.place if place is None else place]
        sums = prepared.attend([queries, *_arrays(keys), *_arrays(values), *numbers])
        inputs = sums if sinks is None else [*sums, sinks]
        return prepared.merge([*inputs, prepared.counts])[0]

    def instances(self, dtype: mx.Dtype, stored: mx.Dtype, tensor_units: bool) -> Calls:
        """Calls with one tile of rows, with several, and for a first token."""
        sizes = ((3, 80), (40, 80), (1, 1)) if dtype == stored else ()
        for dim, (rows, length) in product(HEAD_DIMS, sizes):
            queries = mx.ones((1, 4, rows, dim), dtype)
            sinks = mx.ones(4, dtype)
            tree = _binary_tree(rows, length - rows)
            for keys in every_form(dtype, False, 1, 1, length, dim):
                call = AttentionCall(queries, keys=keys, values=keys, scale=0.1)
                yield partial(self, call)
                yield partial(self, call._replace(tree=tree))
            yield partial(self, call._replace(sinks=sinks))  # with plain keys, the last form

    def _check(self, like: AttentionCall) -> KernelCheck:
        """The check of such calls: as many rows, with keys on both sides of a chunk's end."""
        key_heads = like.keys.shape[1]
        (_, heads, rows, dim) = like.queries.shape
        length = rows + 30  # 30 keys before the draft's
        noise = Noise(like.queries.dtype)
        first = CHUNK - length // 2  # the chunk ends in the middle of the keys
        tree = None
        sinks = None
        key = f"attention {heads}/{key_heads} heads of {dim} in {dtype_name(like.queries)}, "
        if like.tree is None:
            key += f"a chain of {rows}"
        else:
            key += f"a tree of {rows}"
            tree = _binary_tree(rows, first + length - rows)
        if like.window is not None:
            key += " in a window"
        if like.sinks is not None:
            key = f"{key} with sinks"
            sinks = noise(heads)
        stored: list[Any] = [noise(1, key_heads, length, dim) for _ in range(2)]
        if isinstance(like.keys, AffineWeights):
            bits = like.keys.bits
            group = like.keys.group_size
            key += f" over {bits}-bit keys g{group}"
            stored = [AffineWeights(*mx.quantize(x, group, bits), bits, group) for x in stored]
        queries = noise(*like.queries.shape)
        keys, values = stored
        call = AttentionCall(queries, keys=keys, values=values, scale=dim**-0.5, first=first)
        call = call._replace(window=like.window, sinks=sinks, tree=tree)

        def ours() -> list[mx.array]:
            return [BlockAttention(self._metal_kernel)(call)]  # which checks nothing

        def reference() -> list[mx.array]:
            queries, keys, values = map(dequantized, call[:3])
            exact = call._replace(queries=queries, keys=keys, values=values)
            return [block_attention_reference(exact)]

        return KernelCheck(key, ours, reference)

    def _prepare(self, call: AttentionCall) -> Launches:
        """The launches for calls like this one. Raises `KernelError`."""
        check(call)
        queries, keys, _, scale, first, window, sinks, tree, place = call
        _, heads, nodes, head_dim = queries.shape
        key_heads, length = keys.shape[1:3]
        chunks = (first + length - 1) // CHUNK - first // CHUNK + 1
        if place is not None:
            # The most that `place` can allow: keys in a window may begin in the middle of a chunk,
            # and then end one chunk later. Without a window they begin at position 0.
            chunks = (length - 1) // CHUNK + (1 if window is None else 2)
        blocks, simdgroups = _tiling(heads // key_heads * nodes, queries)
        threadgroups_per_head = _threadgroup_count(call, chunks, 8 * blocks * simdgroups)
        constants: dict[str, Constant] = {"T": queries.dtype, "D": head_dim, "CHUNK": CHUNK}
        constants |= {"BLOCKS": blocks, "TREE": tree is not None}
        query_rows = heads * nodes
        if isinstance(keys, AffineWeights):
            constants |= {"BITS": keys.bits, "GROUP": keys.group_size}
        attend = self._launch(
            _attends(isinstance(keys, AffineWeights), tree is not None),
            constants=constants,
            grid=(key_heads * 32 * simdgroups, threadgroups_per_head, 1),
            threadgroup=(32 * simdgroups, 1, 1),
            # MLX passes arrays under 8 elements in constant memory, so `stats` is longer.
            outputs=[
                ((chunks * query_rows, head_dim), mx.float32),
                ((chunks * query_rows + FEWEST_ELEMENTS, 2), mx.float32),
            ],
        )
        merge = self._launch(
            _merges(sinks is not None),
            constants={"T": queries.dtype, "SINKS": sinks is not None},
            grid=(head_dim, query_rows, 1),
            threadgroup=(head_dim, 1, 1),
            outputs=[(queries.shape, queries.dtype)],
        )
        # One array of integers holds both; the kernel reads the scale's bits as a float again.
        window_and_scale_bits = np.array([window or _UNLIMITED, 0], np.int32)
        window_and_scale_bits[1:] = np.float32(scale).view(np.int32)
        return Launches(
            attend,
            numbers=[*_tree_inputs(tree), mx.array(window_and_scale_bits)],
            place=mx.array([first, length], mx.int32),
            merge=merge,
            counts=mx.array([chunks, nodes]),
            tree=tree,
        )


def block_attention_reference(call: AttentionCall) -> mx.array:
    """What `BlockAttention` computes, in plain MLX."""
    check(call)
    queries, keys, values, scale, first, window, sinks, tree, place = call
    nodes = queries.shape[2]
    length = keys.shape[2]
    if place is not None:
        first, length = map(int, np.array(place))
        keys, values = (dequantized(x)[..., :length, :] for x in (keys, values))
    past = length - nodes
    if tree is None:
        rows = mx.arange(nodes)
        tree = TreeMask(first + past + rows, rows[None] <= rows[:, None])
    positions = mx.concatenate([first + mx.arange(past), tree.positions])
    mask = mx.concatenate([mx.ones((nodes, past), mx.bool_), tree.ancestors], axis=1)
    if window is not None:
        mask &= tree.positions[:, None] - positions[None] < window
    plain = (dequantized(x).astype(queries.dtype) for x in (keys, values))
    return mx.fast.scaled_dot_product_attention(
        queries, *plain, scale=scale, mask=mask, sinks=sinks
    )


def check(call: AttentionCall) -> None:
    """Raise `KernelError` for arguments that `BlockAttention` does not take."""
    queries, keys, values, *_, sinks, tree, place = call
    fits = queries.ndim == len(keys.shape) == 4 and keys.shape == values.shape
    if fits:
        batch, heads, nodes, head_dim = queries.shape
        key_batch, key_heads, length, key_dim = keys.shape
        stored = [x.scales if isinstance(x, AffineWeights) else x for x in (keys, values)]
        fits = (
            (batch, key_batch, key_dim) == (1, 1, head_dim)
            and 1 <= nodes <= min(MOST_NODES, length)
            and heads % key_heads == 0
            and head_dim in HEAD_DIMS
            and queries.dtype in FLOATS
            and {x.dtype for x in stored} == {queries.dtype}
            and kind(keys) == kind(values)
            and (sinks is None or sinks.shape == (heads,))
            and (place is None or (tree is None and place.shape == (2,)))
            and (tree is None or tree.positions.shape == (nodes,))
            and (tree is None or tree.ancestors.shape == (nodes, nodes))
        )
    if not fits:
        raise KernelError(
            f"Block attention has no kernel for queries {queries.shape} in {dtype_name(queries)}, "
            f"keys {keys.shape}, values {values.shape} and their sinks or tree."
        )


def _binary_tree(nodes: int, position: int) -> TreeMask:
    """A binary tree, row by row from the root."""
    ancestors = mx.eye(nodes, dtype=mx.bool_)
    for node in range(1, nodes):
        ancestors[node] = ancestors[node] | ancestors[(node - 1) // 2]
    return TreeMask(position - 1 + ancestors.sum(axis=-1), ancestors)


def _threadgroup_count(call: AttentionCall, chunks: int, rows: int) -> int:
    """The threadgroups for one head of keys, each of up to `rows` query rows; see `share_of`."""
    nodes = call.queries.shape[2]
    group = call.queries.shape[1] // call.keys.shape[1]
    tiles = -(-group * nodes // rows)
    if call.tree is None:
        return chunks * tiles
    # In the chunks from the root's on, each node of a tree has threadgroups of its own.
    root_position = call.first + call.keys.shape[2] - nodes
    before = root_position // CHUNK - call.first // CHUNK
    return before * tiles + (chunks - before) * nodes * -(-group // rows)


def _tiling(rows: int, queries: mx.array) -> tuple[int, int]:
    """How many blocks of 8 rows a SIMD-group takes, and how many SIMD-groups a threadgroup has.

    `rows` is the number of query rows that share a head of keys. Two blocks use each loaded key
    twice, if registers can hold them; fewer than 32 rows want more SIMD-groups instead.
    """
    head_dim = queries.shape[-1]
    blocks = 2 if head_dim * queries.itemsize <= 256 and rows >= 32 else 1
    most_simdgroups = 16 if head_dim <= 128 and blocks == 1 else 8
    return blocks, min(-(-rows // (8 * blocks)), most_simdgroups)


def _tree_inputs(tree: TreeMask | None) -> list[mx.array]:
    """The positions and ancestors of a tree, as the kernel reads them; [] for a chain."""
    if tree is None:
        return []
    pair = (tree.positions.astype(mx.int32), tree.ancestors.astype(mx.bool_))
    return [in_device_memory(mx.contiguous(x)) for x in pair]


def _arrays(stored: mx.array | AffineWeights) -> list[mx.array]:
    """The arrays of keys or values, as they lie in the cache."""
    if isinstance(stored, AffineWeights):
        return [stored.words, stored.scales, stored.biases]
    return [stored]
