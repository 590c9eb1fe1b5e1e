"""Batched drafting: one pass of a network over the blocks of many requests.

The blocks lie side by side in one sequence, as do the features that enter the contexts before them.
Projections, MLPs and the head take all rows at once, so the weights are read once. Attention runs
per request, over its own context, and so does the choice from the logits. Blocks may have any
widths, and drafts are those that each request would get alone.
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext
from functools import partial
from itertools import accumulate
from typing import Any, NamedTuple

import mlx.core as mx

from .candidates import Slots
from .layers import Attention, append_rows
from .network import DFlash
from .protocol import DraftSession, SupportsTrees
from .session import FeatureSession, plant_all, propose_all


class BlockDraft(NamedTuple):
    """A draft that is made together with others.

    Attributes:
        session: drafts it.
        anchor: the last committed token.
        width: the most rows of a path, the anchor included.
        tree_rows: the most rows of a tree; None drafts a chain.
        guard: entered around what runs for this session only, as its processors. If it suppresses
            an error, the result is None, and the others are not affected.
    """

    session: DraftSession
    anchor: int
    width: int
    tree_rows: int | None = None
    guard: AbstractContextManager[Any] = nullcontext()


def draft_batch(drafts: Sequence[BlockDraft]) -> list[Any]:
    """What each session's own `propose` or `propose_tree` returns, in one pass per network.

    Sessions without a network of ours, or alone with theirs, draft by themselves. Only trees and
    processors wait for the device: trees once per network.
    """
    results: list[Any] = [None] * len(drafts)
    groups: dict[tuple[int, ...], list[int]] = {}
    for at, draft in enumerate(drafts):
        key: tuple[int, ...] = (at,)
        if isinstance(draft.session, FeatureSession) and draft.width > 1:
            if isinstance(network := draft.session.drafter, DFlash) and not network.lag:
                key = id(network), id(draft.session.target), draft.tree_rows is None
        groups.setdefault(key, []).append(at)
    for group in groups.values():
        if len(group) == 1:
            session, anchor, width, tree_rows, guard = drafts[group[0]]
            with guard:
                if tree_rows is not None and isinstance(session, SupportsTrees):
                    results[group[0]] = session.propose_tree(anchor, tree_rows, width)
                else:
                    results[group[0]] = session.propose(anchor, width)
            continue
        network, slots = _draft_slots({at: drafts[at] for at in group})
        made: Sequence[Any] = []
        if slots and drafts[group[0]].tree_rows is None:
            made = propose_all(network, [*slots.values()])
        elif slots:
            rows = [drafts[at].tree_rows or 1 for at in slots]
            made = plant_all(network, [*slots.values()], rows)
        for at, result in zip(slots, made, strict=True):
            results[at] = result
    return results


def _draft_slots(drafts: dict[int, BlockDraft]) -> tuple[DFlash, dict[int, Slots]]:
    """The network, and the slots of each block, after one pass of the network and of its head."""
    sessions: list[Any] = [draft.session for draft in drafts.values()]
    network: DFlash = sessions[0].drafter
    target, first = sessions[0].target, network.config.first_row
    blocks = [network.block(draft.anchor, draft.width) for draft in drafts.values()]
    taps = [session.take()[0] for session in sessions]
    rows = _BatchRows(blocks, taps, [session.cache for session in sessions])
    x = network.embed(mx.concatenate(blocks)[None], target, rows.places)
    waiting = [one for one in taps if one.shape[1]]
    context = network.fuse(mx.concatenate(waiting, axis=1)) if waiting else None
    for index, layer in enumerate(network.layers):
        x = layer(x, partial(rows.attend, layer.self_attn, index, context), rows.places)
    # Rows that draft nothing are not read by the head.
    hidden = network.norm(x)[:, mx.array([at for at, place in rows.each if place >= first])]
    cuts = list(accumulate(len(block) - first for block in blocks))[:-1]
    logits = mx.split(network.logits(hidden, target)[0], cuts)
    slots = {}
    for (at, draft), session, own, states in zip(
        drafts.items(), sessions, logits, mx.split(hidden[0], cuts), strict=True
    ):
        with draft.guard:
            slots[at] = network.score(session, own, states, draft.anchor)
    return network, slots


class _BatchRows:
    """The rows of a pass: of the blocks, and of the features that are new.

    Attributes:
        each: the index of every row of the blocks, and its place in its block.
        places: [R], the places.
    """

    def __init__(
        self, blocks: Sequence[mx.array], taps: Sequence[mx.array], caches: Sequence[list[Any]]
    ) -> None:
        self._caches, self._blocks = caches, [len(block) for block in blocks]
        new = [one.shape[1] for one in taps]
        starts = [cache[0].offset for cache in self._caches]  # of the new features
        sizes = list(zip(starts, new, self._blocks, strict=True))
        places = [place for block in self._blocks for place in range(block)]
        self.each, self.places = list(enumerate(places)), mx.array(places)
        self._positions = mx.array(
            [start + count + row for start, count, block in sizes for row in range(block)]
        )
        self._key_positions = mx.array(
            [start + row for start, count, block in sizes for row in range(count + block)]
        )
        # Keys belong to the new features and the block's rows, request after request. In the pass
        # the features of all requests come before the blocks of all.
        order: list[int] = []
        feature, row = 0, sum(new)
        for _, count, block in sizes:
            order += [*range(feature, feature + count), *range(row, row + block)]
            feature, row = feature + count, row + block
        self._order = mx.array(order)
        self._cuts = list(accumulate(self._blocks))[:-1]
        self._key_cuts = list(accumulate(count + block for _, count, block in sizes))[:-1]

    def attend(
        self, attention: Attention, layer: int, context: mx.array | None, x: mx.array
    ) -> mx.array:
        """The heads' outputs [1, H, R, head_dim] of a layer's input x [1, R, D].

        `context` [1, S, D] holds the new fused features; None if there are none.
        """
        rows = x
        if context is not None:
            rows = mx.concatenate([context, x], axis=1)[:, self._order]
        # Rows are on the batch axis, where each may have its own position.
        both = attention.keys_values(rows.swapaxes(0, 1), self._key_positions)
        keys, values = (mx.split(one.swapaxes(0, 2), self._key_cuts, axis=2) for one in both)
        queries = attention.queries(x.swapaxes(0, 1), self._positions).swapaxes(0, 2)
        own = mx.split(queries, self._cuts, axis=2)
        outputs = []
        for at, caches in enumerate(self._caches):
            held = append_rows(caches[layer], keys[at], values[at], self._blocks[at])
            outputs.append(attention.attend(own[at], *held))
        return mx.concatenate(outputs, axis=2)
