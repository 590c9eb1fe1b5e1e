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
from typing import Any

import mlx.core as mx

from ..proposal import Proposal
from .candidates import DraftInput, Slots, read_candidates
from .layers import Attention
from .network import DFlash, NetworkSession, chain
from .protocol import DraftSession
from .tree import DraftTree

Guard = AbstractContextManager[Any]


def propose_batch(
    sessions: Sequence[DraftSession],
    anchors: Sequence[int],
    widths: Sequence[int],
    guards: Sequence[Guard] | None = None,
) -> list[Proposal | None]:
    """What each session's own `propose` returns, in one pass per network.

    Sessions without a network of ours, or alone with theirs, propose by themselves. Nothing waits
    for the device, unless a processor does.

    Args:
        sessions: each of them once.
        anchors: the last committed token of each.
        widths: the most rows of each proposal, the anchor included.
        guards: entered around what runs for one session only, as its processors. If a guard
            suppresses an error, the session's proposal is None; the others are not affected.
    """
    guards = guards or [nullcontext()] * len(sessions)
    proposals: list[Proposal | None] = [None] * len(sessions)
    for group in _groups(sessions, widths):
        if len(group) == 1:
            [at] = group
            with guards[at]:
                proposals[at] = sessions[at].propose(anchors[at], widths[at])
            continue
        network, slots = _draft(group, sessions, anchors, widths, guards)
        chosen = network.choose([*slots.values()]) if slots else []
        for at, drafts in zip(slots, chosen, strict=True):
            proposals[at] = chain(anchors[at], drafts)
    return proposals


def propose_tree_batch(
    sessions: Sequence[DraftSession],
    anchors: Sequence[int],
    rows: Sequence[int],
    widths: Sequence[int],
    guards: Sequence[Guard] | None = None,
) -> list[DraftTree | None]:
    """What each session's own `propose_tree` returns; waits once per network.

    Args as of `propose_batch` and of `DraftSession.propose_tree`.
    """
    guards = guards or [nullcontext()] * len(sessions)
    trees: list[DraftTree | None] = [None] * len(sessions)
    for group in _groups(sessions, widths):
        if len(group) == 1:
            [at] = group
            with guards[at]:
                trees[at] = sessions[at].propose_tree(anchors[at], rows[at], widths[at])
            continue
        network, slots = _draft(group, sessions, anchors, widths, guards)
        found = read_candidates(
            [network.candidates(one, rows[at] - 1) for at, one in slots.items()]
        )
        for at, (tokens, log_probs) in zip(slots, found, strict=True):
            trees[at] = DraftTree(anchors[at], tokens, log_probs, rows[at])
    return trees


def _groups(sessions: Sequence[DraftSession], widths: Sequence[int]) -> list[list[int]]:
    """The indices of sessions that can draft in one pass: those of one network and target."""
    groups: dict[tuple[int, ...], list[int]] = {}
    for at, (session, width) in enumerate(zip(sessions, widths, strict=True)):
        key: tuple[int, ...] = (at,)
        if isinstance(session, NetworkSession) and width > 1:
            key = id(session.drafter), id(session.target)
        groups.setdefault(key, []).append(at)
    return list(groups.values())


def _draft(
    group: Sequence[int],
    sessions: Sequence[Any],
    anchors: Sequence[int],
    widths: Sequence[int],
    guards: Sequence[Guard],
) -> tuple[DFlash, dict[int, Slots]]:
    """The network of a group, and the slots of its blocks by index, after one pass over all."""
    network: DFlash = sessions[group[0]].drafter
    target, first = sessions[group[0]].target, network.config.first_row
    inputs = [sessions[at].draft_input(anchors[at], widths[at]) for at in group]
    rows = _BatchRows(inputs)
    x = network.embed_block(mx.concatenate([one.block for one in inputs]), target, rows.places)
    waiting = [one.taps for one in inputs if one.taps.shape[1]]
    context = network.fuse(mx.concatenate(waiting, axis=1)) if waiting else None
    for index, layer in enumerate(network.layers):
        x = layer(x, partial(rows.attend, layer.self_attn, index, context), rows.places)
    # Rows that draft nothing are not read by the head.
    hidden = network.norm(x)[:, mx.array([at for at, place in rows.each if place >= first])]
    cuts = list(accumulate(len(one.block) - first for one in inputs))[:-1]
    logits = mx.split(network.logits(hidden, target)[0], cuts)
    slots = {}
    for at, own, states in zip(group, logits, mx.split(hidden[0], cuts), strict=True):
        with guards[at]:
            slots[at] = sessions[at].score(own, states, anchors[at])
    return network, slots


class _BatchRows:
    """The rows of a pass: of the blocks, and of the features that are new.

    Attributes:
        each: the index of every row of the blocks, and its place in its block.
        places: [R], the places.
    """

    def __init__(self, inputs: Sequence[DraftInput]) -> None:
        self._caches = [one.cache for one in inputs]
        self._blocks = [len(one.block) for one in inputs]
        new = [one.taps.shape[1] for one in inputs]
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
            held = caches[layer].update(keys[at], values[at], block=self._blocks[at])
            outputs.append(attention.attend(own[at], *held))
        return mx.concatenate(outputs, axis=2)
