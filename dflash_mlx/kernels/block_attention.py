"""Attention of a draft's rows over a long context, split over the keys.

Stock attention splits the context for up to eight queries only. The kernel reads keys and values
once for all rows and all query heads that share them. `metal/block_attention.metal` explains it,
and why a row's bits do not depend on the chain or tree around it.
"""

from __future__ import annotations

from functools import partial
from typing import Any, NamedTuple

import mlx.core as mx

from ..errors import KernelError
from .selfcheck import KernelCheck, Noise, Proofs
from .source import FEWEST, KernelFactory, Launch, dtype_name, in_device_memory, metal_source
from .weights import FLOATS, AffineWeights, dequantized, kind

HEAD_DIMS = (64, 80, 96, 128, 192, 256)
MOST_NODES = 64
# Keys of a threadgroup, at multiples of the absolute position: it defines the order of a row's sum,
# so it cannot depend on the length. More keys mean less parallel work in a short context and fewer
# partial sums in a long one.
CHUNK = 512
_UNLIMITED = 2**30  # a window that no context fills
MOST_STEPS = 32  # kinds of layers and lengths that are remembered, in this step and before

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
      keys + head * keys_strides[1], key_scales + head * key_scales_strides[1],
      key_biases + head * key_biases_strides[1], keys_strides[2], key_scales_strides[2]);
  const auto value_rows = dflash::quantized_rows<T, BITS, GROUP>(
      values + head * values_strides[1], value_scales + head * value_scales_strides[1],
      value_biases + head * value_biases_strides[1], values_strides[2], value_scales_strides[2]);
"""
_ATTEND = """
  const int nodes = queries_shape[2], group = queries_shape[1] / key_heads;
  const dflash::Problem problem{nodes, group, keys_shape[2], first, window, scale};
  dflash::attend_chunk<T, D, CHUNK, BLOCKS, TREE>(queries, key_rows, value_rows, positions,
      ancestors, problem, partial, stats, key_tile, value_tile, rows, threadgroup_position_in_grid,
      key_heads, thread_index_in_threadgroup, simdgroup_index_in_threadgroup,
      simdgroups_per_threadgroup, thread_index_in_simdgroup);
"""
_NUMBERS = ["first", "window", "scale"]
_MERGE = """
  dflash::merge_chunks<T, SINKS>(partial, stats, sinks, chunks, threads_per_grid.y, nodes, out,
      thread_position_in_grid.y, thread_position_in_grid.x, threads_per_grid.x);
"""


class TreeMask(NamedTuple):
    """The shape of a draft tree.

    Attributes:
        positions: [N] integers, the absolute position (depth) of each node, the root's first.
        ancestors: [N, N] booleans: whether node j lies on the path from the root to i, i included.
    """

    positions: mx.array
    ancestors: mx.array


# What the layers of one kind share in a step: both launches with their numbers. The tree is kept,
# so that its id stays its own.
Launches = tuple[Launch, list[mx.array], Launch, list[mx.array], TreeMask | None]


class BlockAttention:
    """Attention of the last N rows of a cache over all of it.

    A row sees the past and its own path in the draft, fewer than `window` positions back. Its bits
    depend only on the row and on what it sees.

    Args:
        metal_kernel: the factory of its kernels.
        proofs: the launches that are known to be right here.
    """

    def __init__(
        self,
        metal_kernel: KernelFactory = mx.fast.metal_kernel,
        proofs: Proofs | None = None,
    ) -> None:
        self._proofs = proofs or Proofs()
        header = metal_source("block_attention.metal")
        stored = ["keys", "values"]
        quantized = ["keys", "key_scales", "key_biases", "values", "value_scales", "value_biases"]
        self._attend, self._attend_quantized = (
            metal_kernel(
                name=name,
                input_names=["queries", *names, "positions", "ancestors", *_NUMBERS],
                output_names=["partial", "stats"],
                source=_MEMORY + rows + _ATTEND,
                header=header,
                ensure_row_contiguous=False,  # a cache's keys are a slice: never copy them
            )
            for name, names, rows in (
                ("block_attention", stored, _PLAIN),
                ("block_attention_quantized", quantized, _QUANTIZED),
            )
        )
        self._merge = metal_kernel(
            name="block_attention_merge",
            input_names=["partial", "stats", "sinks", "chunks", "nodes"],
            output_names=["out"],
            source=_MERGE,
            header=header,
        )
        self._launches: dict[Any, Launches] = {}
        self._no_sinks = mx.array([0.0] * FEWEST)
        self._sinks: dict[int, tuple[mx.array, mx.array]] = {}  # by id, which stays its own

    def __call__(
        self,
        queries: mx.array,
        keys: mx.array | AffineWeights,
        values: mx.array | AffineWeights,
        *,
        scale: float,
        first: int = 0,
        window: int | None = None,
        sinks: mx.array | None = None,
        tree: TreeMask | None = None,
    ) -> mx.array:
        """Attend with queries [1, H, N, D] -> [1, H, N, D], of the same dtype.

        Args:
            queries: already rotated; N <= 64.
            keys, values: [1, KV, L, D], plain in the queries' dtype or quantized with scales of
                it, as mlx-lm's caches hold them. H is a multiple of KV. The draft's own rows are
                the last N; those before it lie in the order of their positions.
            scale: of the scores, commonly D ** -0.5.
            first: the absolute position of row 0; a sliding cache has dropped rows before it.
            window: positions a row looks back, its own included; None for all.
            sinks: [H] scores without a value (gpt-oss).
            tree: the tree; None for a chain.

        Sums are float32. Raises `KernelError`.
        """
        of = queries.shape, queries.dtype, kind(keys), kind(values), sinks is None
        key = *of, scale, first, window, None if tree is None else id(tree)
        prepared = self._launches.get(key)
        if prepared is None:
            if len(self._launches) >= MOST_STEPS:
                self._launches.clear()
            given = queries, keys, values, scale, first, window, sinks, tree
            prepared = self._prepare(*given)
            self._proofs.require(self._check(queries, keys, window, sinks, tree))
            self._launches[key] = prepared
        return self._launch(prepared, queries, keys, values, sinks)

    def _launch(
        self,
        prepared: Launches,
        queries: mx.array,
        keys: mx.array | AffineWeights,
        values: mx.array | AffineWeights,
        sinks: mx.array | None,
    ) -> mx.array:
        attend, numbers, merge, counts, _ = prepared
        inputs = [mx.contiguous(queries), *_arrays(keys), *_arrays(values), *numbers]
        partial, stats = attend(inputs=inputs)
        weights = self._no_sinks if sinks is None else self._in_float32(sinks)
        sums = in_device_memory(partial), in_device_memory(stats)
        return merge(inputs=[*sums, weights, *counts])[0]

    def _check(
        self,
        queries: mx.array,
        keys: mx.array | AffineWeights,
        window: int | None,
        sinks: mx.array | None,
        tree: TreeMask | None,
    ) -> KernelCheck:
        """The check of calls of this form: so many rows across the end of a chunk of keys."""
        (_, heads, rows, dim), key_heads = queries.shape, keys.shape[1]
        length, shape = rows + 30, "a chain" if tree is None else "a tree"
        key = f"attention {heads}/{key_heads} heads of {dim} in {dtype_name(queries)}, {shape} of "
        key += f"{rows}" + " in a window" * bool(window) + " with sinks" * (sinks is not None)
        noise, first = Noise(queries.dtype), CHUNK - length // 2
        stored: list[Any] = [noise(1, key_heads, length, dim) for _ in range(2)]
        if isinstance(keys, AffineWeights):
            key += f" over {keys.bits}-bit keys g{keys.group_size}"
            form = keys.bits, keys.group_size
            parts = [mx.quantize(x, group_size=form[1], bits=form[0]) for x in stored]
            stored = [AffineWeights(*of, *form) for of in parts]
        given = noise(*queries.shape), stored[0], stored[1]
        named: dict[str, Any] = {"scale": dim**-0.5, "first": first, "window": window}
        named["sinks"] = None if sinks is None else noise(heads)
        named["tree"] = None if tree is None else _binary_tree(rows, first + length - rows)

        def ours() -> list[mx.array]:
            return [self._launch(self._prepare(*given, **named), *given, named["sinks"])]

        def reference() -> list[mx.array]:
            exact = [dequantized(x) for x in given]
            return [block_attention_reference(*exact, **named)]

        return KernelCheck(key, f"{key},", ours, reference)

    def _in_float32(self, sinks: mx.array) -> mx.array:
        """A layer's sinks as the kernel takes them, computed once."""
        if id(sinks) not in self._sinks:
            converted = in_device_memory(sinks.astype(mx.float32))
            mx.eval(converted)  # other threads' forwards use it
            self._sinks[id(sinks)] = sinks, converted
        return self._sinks[id(sinks)][1]

    def _prepare(
        self,
        queries: mx.array,
        keys: mx.array | AffineWeights,
        values: mx.array | AffineWeights,
        scale: float,
        first: int,
        window: int | None,
        sinks: mx.array | None,
        tree: TreeMask | None,
    ) -> Launches:
        check(queries, keys, values, sinks, tree)
        _, heads, nodes, head_dim = queries.shape
        key_heads, length = keys.shape[1:3]
        chunks = (first + length - 1) // CHUNK - first // CHUNK + 1
        group = heads // key_heads
        blocks, simdgroups = _tiling(group * nodes, queries)
        rows = 8 * blocks * simdgroups  # of a threadgroup
        tiles = -(-group * nodes // rows)
        shares = chunks * tiles
        if tree:  # the chunks that it reaches have a threadgroup for each node
            whole = (first + length - nodes) // CHUNK - first // CHUNK
            shares = whole * tiles + (chunks - whole) * nodes * -(-group // rows)
        template = [("T", queries.dtype), ("D", head_dim), ("CHUNK", CHUNK), ("BLOCKS", blocks)]
        template.append(("TREE", bool(tree)))
        kernel = self._attend
        if isinstance(keys, AffineWeights):
            kernel = self._attend_quantized
            template += [("BITS", keys.bits), ("GROUP", keys.group_size)]
        attend = partial(
            kernel,
            template=template,
            grid=(key_heads * 32 * simdgroups, shares, 1),
            threadgroup=(32 * simdgroups, 1, 1),
            output_shapes=[(chunks, heads * nodes, head_dim), (chunks, heads * nodes, 2)],
            output_dtypes=[mx.float32, mx.float32],
        )
        merge = partial(
            self._merge,
            template=[("T", queries.dtype), ("SINKS", sinks is not None)],
            grid=(head_dim, heads * nodes, 1),
            threadgroup=(head_dim, 1, 1),
            output_shapes=[queries.shape],
            output_dtypes=[queries.dtype],
        )
        numbers = [
            *_tree_inputs(tree, first + length - nodes, nodes),
            *(mx.array(first), mx.array(window or _UNLIMITED), mx.array(scale, mx.float32)),
        ]
        return attend, numbers, merge, [mx.array(chunks), mx.array(nodes)], tree


def block_attention_reference(
    queries: mx.array,
    keys: mx.array | AffineWeights,
    values: mx.array | AffineWeights,
    *,
    scale: float,
    first: int = 0,
    window: int | None = None,
    sinks: mx.array | None = None,
    tree: TreeMask | None = None,
) -> mx.array:
    """What `BlockAttention` computes, in plain MLX."""
    check(queries, keys, values, sinks, tree)
    nodes, length = queries.shape[2], keys.shape[2]
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


def check(
    queries: mx.array,
    keys: mx.array | AffineWeights,
    values: mx.array | AffineWeights,
    sinks: mx.array | None,
    tree: TreeMask | None,
) -> None:
    """Raise `KernelError` for arguments that `BlockAttention` does not take."""
    fits = queries.ndim == len(keys.shape) == 4 and keys.shape == values.shape
    if fits:
        (batch, heads, nodes, head_dim), (other, key_heads, length, dim) = queries.shape, keys.shape
        stored = [x.scales if isinstance(x, AffineWeights) else x for x in (keys, values)]
        fits = (
            (batch, other, dim) == (1, 1, head_dim)
            and 1 <= nodes <= min(MOST_NODES, length)
            and heads % key_heads == 0
            and head_dim in HEAD_DIMS
            and queries.dtype in FLOATS
            and {x.dtype for x in stored} == {queries.dtype}
            and kind(keys) == kind(values)
            and (sinks is None or sinks.shape == (heads,))
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


def _tiling(rows: int, queries: mx.array) -> tuple[int, int]:
    """The eights of rows per SIMD-group, and the SIMD-groups per threadgroup.

    For the query rows of one head of keys, as many as registers allow. Sixteen rows use each loaded
    key twice; fewer than 32 rows want more SIMD-groups.
    """
    head_dim = queries.shape[-1]
    blocks = 2 if head_dim * queries.itemsize <= 256 and rows >= 32 else 1
    most = 16 if head_dim <= 128 and blocks == 1 else 8
    return blocks, min(-(-rows // (8 * blocks)), most)


def _tree_inputs(tree: TreeMask | None, past: int, nodes: int) -> list[mx.array]:
    """Positions and ancestors; for a chain from position `past`, ancestors that are not read."""
    if tree is None:  # numbers of the host: a launch would cost more than it computes
        rows = range(past, past + max(nodes, FEWEST))
        return [mx.array(list(rows), mx.int32), mx.array([True] * FEWEST)]
    pair = (tree.positions.astype(mx.int32), tree.ancestors.astype(mx.bool_))
    return [in_device_memory(mx.contiguous(x)) for x in pair]


def _arrays(stored: mx.array | AffineWeights) -> list[mx.array]:
    """The arrays of keys or values, as they lie in the cache."""
    if isinstance(stored, AffineWeights):
        return [stored.words, stored.scales, stored.biases]
    return [stored]
