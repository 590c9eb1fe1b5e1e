"""Batched drafting: one pass of a network over the blocks of many requests.

The blocks are concatenated into one sequence, and so are the features that enter the contexts
before them. Projections, MLPs and the head take all rows at once, so the weights are read once.
Attention runs per request, over that request's context, and so does the choice from the logits.
Blocks may have any widths, and each request gets the same draft as in a pass of its own.
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
        session: the session that drafts.
        anchor: the last committed token.
        width: the maximum number of rows of a path, the anchor included.
        tree_rows: the maximum number of rows of a tree; None drafts a chain.
        guard: a context for what runs for this session only, such as its logits processors. If it
            suppresses an error, the result is None, and the other drafts are not affected.
    """

    session: DraftSession
    anchor: int
    width: int
    tree_rows: int | None = None
    guard: AbstractContextManager[Any] = nullcontext()


def draft_batch(drafts: Sequence[BlockDraft]) -> list[Any]:
    """Return what `propose` or `propose_tree` of each session returns, in one pass per network.

    A session drafts by itself if its network is not a `DFlash`, or if no other session uses the
    network. Only trees and processors wait for the device; trees wait once per network.
    """
    results: dict[int, Any] = {}
    groups: dict[tuple[int, ...], dict[int, BlockDraft]] = {}
    for number, draft in enumerate(drafts):
        session = draft.session
        key: tuple[int, ...] = (number,)
        if isinstance(session, BlockSession) and draft.width > 1:
            key = (id(session.drafter), id(session.target), draft.tree_rows is None)
        groups.setdefault(key, {})[number] = draft
    for group in groups.values():
        if len(group) > 1:
            results |= _draft_together(group)
            continue
        [(number, draft)] = group.items()
        session = draft.session
        with draft.guard:
            if draft.tree_rows is not None and isinstance(session, SupportsTrees):
                results[number] = session.propose_tree(draft.anchor, draft.tree_rows, draft.width)
            else:
                results[number] = session.propose(draft.anchor, draft.width)
    return [results.get(number) for number in range(len(drafts))]


def _draft_together(drafts: dict[int, BlockDraft]) -> dict[int, Proposal] | dict[int, DraftTree]:
    """Draft chains or trees from one pass of the sessions' network and of its head."""
    sessions: list[Any] = [draft.session for draft in drafts.values()]
    network: DFlash = sessions[0].drafter
    target = sessions[0].target
    first_row = network.config.first_row
    blocks = [network.block(draft.anchor, draft.width) for draft in drafts.values()]
    taps = [session.pop_features()[0] for session in sessions]
    rows = _BatchRows(
        blocks, taps=taps, caches=[session.cache for session in sessions], first_row=first_row
    )
    x = network.embed(mx.concatenate(blocks)[None], target, rows.places)
    waiting = [features for features in taps if features.shape[1]]
    context = network.fuse(mx.concatenate(waiting, axis=1)) if waiting else None
    for index, layer in enumerate(network.layers):
        attend = partial(rows.attend, layer.self_attn, index, context)
        x = layer(x, attend, rows.places)
    # The head does not read rows that draft nothing.
    hidden = network.norm(x)[:, rows.drafting]
    cuts = list(accumulate(len(block) - first_row for block in blocks))[:-1]
    logits = mx.split(network.logits(hidden, target)[0], cuts)
    states = mx.split(hidden[0], cuts)
    scores: dict[int, DraftScores] = {}
    for index, (number, draft) in enumerate(drafts.items()):
        with draft.guard:
            scores[number] = sessions[index].scores(logits[index], states[index], draft.anchor)
    if not scores:
        return {}
    requests = list(scores.values())
    tree_rows = [drafts[number].tree_rows or 0 for number in scores]
    if any(tree_rows):
        return dict(zip(scores, build_trees(network, requests, tree_rows), strict=True))
    return dict(zip(scores, build_chains(network, requests), strict=True))


class _BatchRows:
    """The rows of a pass: those of the blocks, and those of the new features.

    Attributes:
        places: [R], the place of each row in its block.
        drafting: the indices of the rows from place `first_row` on, which draft a token.
    """

    def __init__(
        self,
        blocks: Sequence[mx.array],
        taps: Sequence[mx.array],
        caches: Sequence[list[Any]],
        first_row: int,
    ) -> None:
        self._caches = caches
        self._blocks = [len(block) for block in blocks]
        feature_counts = [features.shape[1] for features in taps]
        places = [place for block in self._blocks for place in range(block)]
        self.places = mx.array(places)
        drafting = [row for row, place in enumerate(places) if place >= first_row]
        self.drafting = mx.array(drafting)
        # The keys of a request are those of its new features, then those of its block. In the pass,
        # the features of all requests come before the blocks of all.
        order: list[int] = []
        positions: list[int] = []
        key_positions: list[int] = []
        first_feature = 0  # the request's first feature and first block row, in the pass
        first_row_of_block = sum(feature_counts)
        for cache, count, block in zip(caches, feature_counts, self._blocks, strict=True):
            start = cache[0].offset  # the position of the first new feature
            order += range(first_feature, first_feature + count)
            order += range(first_row_of_block, first_row_of_block + block)
            positions += range(start + count, start + count + block)
            key_positions += range(start, start + count + block)
            first_feature += count
            first_row_of_block += block
        self._order = mx.array(order)
        self._positions = mx.array(positions)
        self._key_positions = mx.array(key_positions)
        self._cuts = list(accumulate(self._blocks))[:-1]
        self._key_cuts = list(accumulate(map(add, feature_counts, self._blocks)))[:-1]

    def attend(
        self, attention: Attention, layer: int, context: mx.array | None, x: mx.array
    ) -> mx.array:
        """Compute the heads' outputs [1, H, R, head_dim] from a layer's input x [1, R, D].

        `context` [1, S, D] holds the new fused features; None if there are none.
        """
        rows = x
        if context is not None:
            rows = mx.concatenate([context, x], axis=1)[:, self._order]
        # Rows are put on the batch axis, where positions may differ.
        new_keys, new_values = attention.keys_values(rows.swapaxes(0, 1), self._key_positions)
        keys_by_request = mx.split(new_keys.swapaxes(0, 2), self._key_cuts, axis=2)
        values_by_request = mx.split(new_values.swapaxes(0, 2), self._key_cuts, axis=2)
        queries = attention.queries(x.swapaxes(0, 1), self._positions).swapaxes(0, 2)
        queries_by_request = mx.split(queries, self._cuts, axis=2)
        outputs = []
        for index, caches in enumerate(self._caches):
            keys, values = append_rows(
                caches[layer],
                keys_by_request[index],
                values_by_request[index],
                block=self._blocks[index],
            )
            outputs.append(attention.attend(queries_by_request[index], keys, values))
        return mx.concatenate(outputs, axis=2)
