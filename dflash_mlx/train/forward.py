"""The drafter's training forward: many masked blocks of one sequence at once.

A block [anchor, mask, ...] at positions a..a+B-1 attends to the context features before a and to
its own rows, never to another block (arXiv 2602.06036). The A blocks of a sequence share the
context, so instead of an (A*B) x (S + A*B) mask there are two batched products, one against the
context and one inside the blocks, and one softmax over both. Each row equals the row of the
inference network with the same context in its cache.
"""

from __future__ import annotations

from functools import partial

import mlx.core as mx

from ..drafter.dflash import DFlash
from ..drafter.layers import Attention

Masks = tuple[mx.array, mx.array]


def visible(attention: Attention, anchors: mx.array, context: int, block: int) -> Masks:
    """The attention masks of this layer for all blocks.

    Args:
        anchors: positions [N, A].
        context: S, the number of positions with features.
        block: B, the rows of a block.

    Returns:
        Booleans over the context [N, A, B, S] and over the rows of the same block [B, B].
    """
    rows = mx.arange(block)
    queries = anchors[..., None, None] + rows[:, None]
    keys = mx.arange(context)
    outer = mx.broadcast_to(keys < anchors[..., None, None], (*anchors.shape, block, context))
    inner = mx.ones((block, block), mx.bool_)
    if attention.causal:
        inner = rows[:, None] >= rows
    if attention.window is not None:
        outer = outer & (queries - keys < attention.window)
        inner = inner & ((rows[:, None] - rows < attention.window) | (not attention.causal))
    return outer, inner


def attend(attention: Attention, x: mx.array, context: mx.array, anchors: mx.array) -> mx.array:
    """Attention outputs [N*A, H, B, hd] of normed rows x [N*A, B, D] over context [N, S, D]."""
    sequences, blocks = anchors.shape
    block = x.shape[1]
    length = context.shape[1]
    starts = anchors.reshape(-1)
    groups = attention.heads // attention.kv_heads
    queries = attention.queries(x, starts) * attention.scale
    block_keys, block_values = attention.keys_values(x, starts)
    keys, values = attention.keys_values(context, 0)
    outer, inner = visible(attention, anchors=anchors, context=length, block=block)

    # [N*A, KV, G*B, hd] against the block; [N, KV, A*G*B, hd] against the context.
    queries = queries.reshape(sequences * blocks, attention.kv_heads, groups * block, -1)
    near = queries @ block_keys.swapaxes(-1, -2)
    near = near.reshape(sequences, blocks, -1, groups, block, block)
    wide = queries.reshape(sequences, blocks, attention.kv_heads, groups * block, -1).swapaxes(1, 2)
    far = wide.flatten(2, 3) @ keys.swapaxes(-1, -2)
    far = far.reshape(sequences, -1, blocks, groups, block, length)
    far = far.swapaxes(1, 2)  # [N, A, KV, G, B, S]

    hidden = mx.finfo(far.dtype).min
    far = mx.where(outer[:, :, None, None], far, hidden)
    near = mx.where(inner, near, hidden)
    weights = mx.softmax(mx.concatenate([far, near], axis=-1), axis=-1)
    far = weights[..., :length]
    near = weights[..., length:]

    far = far.swapaxes(1, 2)
    far = far.reshape(sequences, attention.kv_heads, blocks * groups * block, length) @ values
    far = far.reshape(sequences, attention.kv_heads, blocks, groups * block, -1).swapaxes(1, 2)
    near = near.reshape(sequences * blocks, attention.kv_heads, groups * block, block)
    near = near @ block_values
    return (far.flatten(0, 1) + near).reshape(sequences * blocks, attention.heads, block, -1)


def draft_hidden(
    drafter: DFlash, embeddings: mx.array, taps: mx.array, anchors: mx.array
) -> mx.array:
    """Hidden states of all blocks after the final norm.

    Args:
        embeddings: [N*A, B, D], the target's embeddings of [anchor token, mask, ...].
        taps: [N, S, K*D], target features of whole sequences.
        anchors: positions [N, A] of the anchor tokens.

    Returns:
        [N*A, B, D]; row k of a block predicts the token at its anchor + k.
    """
    context = drafter.fuse(taps)
    x = embeddings
    for layer in drafter.layers:
        x = layer(x, partial(attend, layer.self_attn, context=context, anchors=anchors))
    return drafter.norm(x)
