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
from operator import add
from typing import Any, NamedTuple

import mlx.core as mx

from ..proposal import Proposal
from .candidates import DraftScores
from .dflash import BlockSession, DFlash
from .draft_tree import DraftTree
from .layers import Attention, append_rows
from .network_session import build_chains, build_trees
from .protocol import DraftSession, SupportsTrees


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
    results: dict[int, Any] = {}
    groups: dict[tuple[int, ...], dict[int, BlockDraft]] = {}
    for number, draft in enumerate(drafts):
        session = draft.session
        key: tuple[int, ...] = (number,)
        if isinstance(session, BlockSession) and draft.width > 1:
            key = id(session.drafter), id(session.target), draft.tree_rows is None
        groups.setdefault(key, {})[number] = draft
    for group in groups.values():
        if len(group) > 1:
            results |= _draft_together(group)
            continue
        [(number, (session, anchor, width, tree_rows, guard))] = group.items()
        with guard:
            if tree_rows is not None and isinstance(session, SupportsTrees):
                results[number] = session.propose_tree(anchor, tree_rows, width)
            else:
                results[number] = session.propose(anchor, width)
    return [results.get(number) for number in range(len(drafts))]


def _draft_together(drafts: dict[int, BlockDraft]) -> dict[int, Proposal] | dict[int, DraftTree]:
    """The chains or the trees of blocks, after one pass of their network and of its head."""
    sessions: list[Any] = [draft.session for draft in drafts.values()]
    network: DFlash = sessions[0].drafter
    target = sessions[0].target
    first = network.config.first_row
    blocks = [network.block(draft.anchor, draft.width) for draft in drafts.values()]
    taps = [session.pop_features()[0] for session in sessions]
    rows = _BatchRows(blocks, taps, [session.cache for session in sessions], first)
    x = network.embed(mx.concatenate(blocks)[None], target, rows.places)
    waiting = [features for features in taps if features.shape[1]]
    context = network.fuse(mx.concatenate(waiting, axis=1)) if waiting else None
    for index, layer in enumerate(network.layers):
        x = layer(x, partial(rows.attend, layer.self_attn, index, context), rows.places)
    # Rows that draft nothing are not read by the head.
    hidden = network.norm(x)[:, rows.drafting]
    cuts = list(accumulate(len(block) - first for block in blocks))[:-1]
    logits = mx.split(network.logits(hidden, target)[0], cuts)
    slots = dict[int, DraftScores]()
    for (number, draft), session, rows_logits, states in zip(
        drafts.items(), sessions, logits, mx.split(hidden[0], cuts), strict=True
    ):
        with draft.guard:
            slots[number] = session.slots(rows_logits, states, draft.anchor)
    requests = [*slots.values()]
    tree_rows = [drafts[number].tree_rows or 0 for number in slots]
    if any(tree_rows):
        return dict(zip(slots, build_trees(network, requests, tree_rows), strict=True))
    return dict(zip(slots, build_chains(network, requests) if slots else [], strict=True))


class _BatchRows:
    """The rows of a pass: of the blocks, and of the features that are new.

    Attributes:
        places: [R], the place of every row of the blocks in its block.
        drafting: the rows of blocks from place `first` on.
    """

    def __init__(
        self,
        blocks: Sequence[mx.array],
        taps: Sequence[mx.array],
        caches: Sequence[list[Any]],
        first: int,
    ) -> None:
        self._caches, self._blocks = caches, [len(block) for block in blocks]
        new = [one.shape[1] for one in taps]
        places = [place for block in self._blocks for place in range(block)]
        self.places = mx.array(places)
        self.drafting = mx.array([at for at, place in enumerate(places) if place >= first])
        # Keys belong to the new features and the block's rows, request after request. In the pass
        # the features of all requests come before the blocks of all.
        order, positions, key_positions = list[int](), list[int](), list[int]()
        feature, row = 0, sum(new)
        for cache, count, block in zip(caches, new, self._blocks, strict=True):
            start = cache[0].offset  # of the new features
            order += [*range(feature, feature + count), *range(row, row + block)]
            positions += range(start + count, start + count + block)
            key_positions += range(start, start + count + block)
            feature, row = feature + count, row + block
        self._order = mx.array(order)
        self._positions, self._key_positions = mx.array(positions), mx.array(key_positions)
        self._cuts = list(accumulate(self._blocks))[:-1]
        self._key_cuts = list(accumulate(map(add, new, self._blocks)))[:-1]

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
