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
from typing import TYPE_CHECKING, Any, NamedTuple

import mlx.core as mx

from ..proposal import Proposal
from .candidates import Candidates, DraftInput, Slots, read_candidates
from .layers import Attention
from .network import NetworkSession, chain
from .protocol import DraftSession
from .tree import DraftTree

if TYPE_CHECKING:
    from ..sampling import DraftScores

Guard = AbstractContextManager[Any]


class _Group(NamedTuple):
    """Sessions of one network, and their indices among all."""

    sessions: list[NetworkSession]
    indices: list[int]


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
    alone, groups = _groups(sessions, widths)
    for at in alone:
        with guards[at]:
            proposals[at] = sessions[at].propose(anchors[at], widths[at])
    for group in groups:
        network = group.sessions[0].drafter
        ready: list[tuple[int, tuple[Slots, DraftScores]]] = []
        for at, slots in zip(group.indices, _slots(group, anchors, widths), strict=True):
            with guards[at]:
                ready.append((at, (slots, network.draft_scores(slots))))
        chosen = network.choose([request for _, request in ready]) if ready else []
        for (at, _), drafts in zip(ready, chosen, strict=True):
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
    alone, groups = _groups(sessions, widths)
    for at in alone:
        with guards[at]:
            trees[at] = sessions[at].propose_tree(anchors[at], rows[at], widths[at])
    for group in groups:
        ready: list[tuple[int, Candidates]] = []
        for at, slots in zip(group.indices, _slots(group, anchors, widths), strict=True):
            with guards[at]:
                ready.append((at, group.sessions[0].drafter.candidates(slots, rows[at] - 1)))
        found = read_candidates([candidates for _, candidates in ready])
        for (at, _), (tokens, log_probs) in zip(ready, found, strict=True):
            trees[at] = DraftTree(anchors[at], tokens, log_probs, rows[at])
    return trees


def _groups(
    sessions: Sequence[DraftSession], widths: Sequence[int]
) -> tuple[list[int], list[_Group]]:
    """The indices of sessions that propose by themselves, and those that draft in one pass."""
    alone: list[int] = []
    groups: dict[tuple[int, int], _Group] = {}
    for at, (session, width) in enumerate(zip(sessions, widths, strict=True)):
        if isinstance(session, NetworkSession) and width > 1:
            pair = id(session.drafter), id(session.target)
            group = groups.setdefault(pair, _Group([], []))
            group.sessions.append(session)
            group.indices.append(at)
        else:
            alone.append(at)
    alone += [group.indices[0] for group in groups.values() if len(group.indices) == 1]
    return alone, [group for group in groups.values() if len(group.indices) > 1]


def _slots(group: _Group, anchors: Sequence[int], widths: Sequence[int]) -> list[Slots]:
    """The slots of all blocks, after one pass of the network and of its head."""
    network, target = group.sessions[0].drafter, group.sessions[0].target
    inputs = [
        session.draft_input(anchors[at], widths[at])
        for session, at in zip(group.sessions, group.indices, strict=True)
    ]
    rows, first = _BatchRows(inputs), network.config.first_row
    x = network.embed_block(mx.concatenate([one.block for one in inputs]), target, rows.places)
    waiting = [one.taps for one in inputs if one.taps.shape[1]]
    context = network.fuse(mx.concatenate(waiting, axis=1)) if waiting else None
    for index, layer in enumerate(network.layers):
        x = layer(x, partial(rows.attend, layer.self_attn, index, context), rows.places)
    # Rows that draft nothing are not read by the head.
    hidden = network.norm(x)[:, mx.array([at for at, place in rows.each if place >= first])]
    cuts = list(accumulate(len(one.block) - first for one in inputs))[:-1]
    logits = mx.split(network.logits(hidden, target)[0], cuts)
    each = zip(logits, mx.split(hidden[0], cuts), inputs, strict=True)
    return [Slots(of, states, mx.array(one.anchor), one.sampler) for of, states, one in each]


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
