"""The target's choices for a draft and the accept walk, on the device.

The walk of `dflash_mlx/accept.py` reads the target's choice at every node, so the host has to wait
for the verify before it can queue anything else. Here the device walks, and what follows a round
(the commit's gathers, `DeltaReplay`) can take the kept rows from an array that is still to come;
the host reads a few integers when it wants the tokens. `metal/accept.metal` says how.
"""

from __future__ import annotations

import mlx.core as mx
import numpy as np

from ..errors import KernelError
from .source import KernelFactory, dtype_name, in_device_memory, metal_source
from .weights import FLOATS

MOST_NODES = 64
_PIECE = 8192  # logits a threadgroup
_THREADS = 256

_BEST = f"""
  threadgroup float logit_of[{_THREADS // 32}];
  threadgroup uint token_of[{_THREADS // 32}];
  dflash::best_of_piece(logits, vocabulary, {_PIECE}, best, token, logit_of, token_of,
      threadgroup_position_in_grid.xy, threadgroups_per_grid.x, thread_index_in_threadgroup,
      {_THREADS}, simdgroup_index_in_threadgroup, simdgroups_per_threadgroup,
      thread_index_in_simdgroup);
"""
_WALK = f"""
  threadgroup int choices[{MOST_NODES}];
  dflash::accept_walk(best, token, tokens, parents, nodes, pieces, walk, choices,
      thread_index_in_threadgroup, simdgroup_index_in_threadgroup, simdgroups_per_threadgroup,
      thread_index_in_simdgroup);
"""


class AcceptWalk:
    """The kernel.

    Args:
        metal_kernel: the factory of its kernels.
    """

    def __init__(self, metal_kernel: KernelFactory = mx.fast.metal_kernel) -> None:
        header = metal_source("accept.metal")
        self._best = metal_kernel(
            name="accept_best",
            input_names=["logits", "vocabulary"],
            output_names=["best", "token"],
            source=_BEST,
            header=header,
        )
        self._walk = metal_kernel(
            name="accept_walk",
            input_names=["best", "token", "tokens", "parents", "nodes", "pieces"],
            output_names=["walk"],
            source=_WALK,
            header=header,
        )

    def __call__(self, logits: mx.array, tokens: mx.array, parents: mx.array) -> mx.array:
        """Where the target's choices lead through the draft.

        Args:
            logits: [N, V] of the verified rows, N <= 64, noise and penalties already in them.
            tokens: [N] the draft's token ids, the anchor first.
            parents: [N] the row of each node's parent, -1 for the root, parents before children.

        Returns:
            [2 + N] int32: how many rows are kept, the target's token after the last of them (the
            first of equal logits), the kept rows from the root down, and -1 in the places that are
            left. `read_walk` reads it.

        Raises:
            KernelError: shapes that do not fit together, or a dtype the kernel does not take.
        """
        check(logits, tokens, parents)
        nodes, vocabulary = logits.shape
        pieces = -(-vocabulary // _PIECE)
        best = self._best(
            inputs=[in_device_memory(logits), mx.array(vocabulary, mx.int32)],
            grid=(pieces * _THREADS, nodes, 1),
            threadgroup=(_THREADS, 1, 1),
            output_shapes=[(nodes, pieces), (nodes, pieces)],
            output_dtypes=[mx.float32, mx.uint32],
        )
        draft = [x.astype(mx.int32) for x in (tokens, parents)]
        (walk,) = self._walk(
            inputs=[
                *(in_device_memory(x) for x in (*best, *draft)),
                mx.array(nodes, mx.int32),
                mx.array(pieces, mx.int32),
            ],
            grid=(_THREADS, 1, 1),
            threadgroup=(_THREADS, 1, 1),
            output_shapes=[(2 + nodes,)],
            output_dtypes=[mx.int32],
        )
        return walk


def accept_walk_reference(logits: mx.array, tokens: mx.array, parents: mx.array) -> mx.array:
    """What `AcceptWalk` computes, in plain MLX."""
    check(logits, tokens, parents)
    choices = mx.argmax(logits, axis=-1).astype(mx.int32)
    last, kept = mx.array(0, mx.int32), [mx.array(0, mx.int32)]
    for row in range(1, logits.shape[0]):
        follows = (parents[row] == last) & (tokens[row] == choices[last])
        kept.append(mx.where(follows, row, -1).astype(mx.int32))
        last = mx.where(follows, row, last)
    rows = mx.stack(kept)
    count = (rows >= 0).sum().astype(mx.int32)
    order = mx.argsort(mx.where(rows >= 0, rows, logits.shape[0]))
    return mx.concatenate([mx.stack([count, choices[last]]), rows[order]])


def read_walk(walk: mx.array) -> tuple[list[int], int]:
    """The kept rows and the next token: the one read-back of a round, and where the host waits."""
    numbers = list(map(int, np.array(walk)))
    return numbers[2 : 2 + numbers[0]], numbers[1]


def check(logits: mx.array, tokens: mx.array, parents: mx.array) -> None:
    """Raise `KernelError` for arguments that break the rules of `AcceptWalk`."""
    if logits.ndim != 2 or not 1 <= logits.shape[0] <= MOST_NODES or not logits.shape[1]:
        raise KernelError(f"accept: logits are {logits.shape}; [1..{MOST_NODES}, V] is needed.")
    if logits.dtype not in FLOATS:
        raise KernelError(
            f"accept: logits are {dtype_name(logits)}; float16, bfloat16 or float32 is needed."
        )
    if tokens.shape != (logits.shape[0],) or parents.shape != tokens.shape:
        raise KernelError(
            f"accept: {logits.shape[0]} rows need as many tokens and parents, not {tokens.shape} "
            f"and {parents.shape}."
        )
