"""One pass of a network over the blocks of many requests.

Alone, every request would read the network's weights, and the head, which is as large as the
target's vocabulary. Here all blocks lie side by side in one sequence, as do the features that enter
the contexts before them; projections, MLPs and the head take all rows at once. Attention is each
request's own, over its own context, and so is what is chosen from the logits, but for a walk that
reads matrices itself (DSpark's). So blocks may be of any widths, and drafts are those that every
request would get alone.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from functools import partial
from itertools import accumulate
from typing import TYPE_CHECKING

import mlx.core as mx

from ..proposal import Proposal
from .candidates import Candidates, Slots
from .network import Attention, DFlash
from .protocol import Session, TreeSession
from .session import DraftSession, Part
from .tree import DraftTree

if TYPE_CHECKING:
    from ..target import Target
    from .calibration import Calibration


def propose_together(
    sessions: Sequence[Session], anchors: Sequence[int], widths: Sequence[int]
) -> list[Proposal]:
    """What each session's own `propose` returns, in as few passes as there are networks.

    Sessions that have no network of ours, or share it with no other one here, propose by
    themselves. Nothing waits for the device.

    Args:
        sessions: each of them once.
        anchors: the last committed token of each.
        widths: the most rows of each proposal, the anchor included.
    """
    proposals: dict[int, Proposal] = {}
    for group in _groups(sessions, widths):
        if len(group) == 1:
            at = group[0]
            proposals[at] = sessions[at].propose(anchors[at], widths[at])
            continue
        members = [_draft_session(sessions[at]) for at in group]
        network, slots, parts = _slots(members, [(anchors[at], widths[at]) for at in group])
        for at, session, part, of, drafts in zip(
            group, members, parts, slots, network.choose(slots), strict=True
        ):
            proposals[at] = session.chain(part, of.hidden, drafts)
    return [proposals[at] for at in range(len(sessions))]


def propose_trees_together(
    sessions: Sequence[TreeSession],
    anchors: Sequence[int],
    rows: Sequence[int],
    widths: Sequence[int],
    calibrations: Sequence[Calibration],
) -> list[DraftTree]:
    """What each session's own `propose_tree` returns; waits once for each network.

    Args as of `propose_together` and of `TreeSession.propose_tree`.
    """
    trees: dict[int, DraftTree] = {}
    for group in _groups(sessions, widths):
        if len(group) == 1:
            at = group[0]
            of_tree = anchors[at], rows[at], widths[at], calibrations[at]
            trees[at] = sessions[at].propose_tree(*of_tree)
            continue
        members = [_draft_session(sessions[at]) for at in group]
        network, slots, _ = _slots(members, [(anchors[at], widths[at]) for at in group])
        rankings = [
            network.rank(of, calibrations[at], rows[at] - 1)
            for at, of in zip(group, slots, strict=True)
        ]
        for at, candidates in zip(group, Candidates.read_together(rankings), strict=True):
            trees[at] = DraftTree(anchors[at], candidates, calibrations[at], rows[at])
    return [trees[at] for at in range(len(sessions))]


def _groups(sessions: Sequence[Session], widths: Sequence[int]) -> Iterator[list[int]]:
    """The places of sessions that draft in one pass."""
    groups: dict[tuple[int, ...], list[int]] = {}
    for at, (session, width) in enumerate(zip(sessions, widths, strict=True)):
        key: tuple[int, ...] = (at,)
        if type(session) is DraftSession and width > 1:
            network, target = session.pair
            if isinstance(network, DFlash):
                key = -1, id(network), id(target)
        groups.setdefault(key, []).append(at)
    yield from groups.values()


def _draft_session(session: Session) -> DraftSession:
    assert isinstance(session, DraftSession), "see _groups"
    return session


def _slots(
    sessions: Sequence[DraftSession], blocks: Sequence[tuple[int, int]]
) -> tuple[DFlash, list[Slots], list[Part]]:
    """The slots of blocks, given by anchor and width, after one pass of the sessions' network."""
    network, target = sessions[0].pair
    assert isinstance(network, DFlash), "see _groups"
    parts = [session.part(*block) for session, block in zip(sessions, blocks, strict=True)]
    hidden = _pass(network, target, parts)
    first, ends = network.config.first_row, list(accumulate(len(part.block) for part in parts))
    drafting = [
        row
        for end, part in zip(ends, parts, strict=True)
        for row in range(end - len(part.block) + first, end)
    ]
    hidden = hidden[:, mx.array(drafting)]
    cuts = list(accumulate(len(part.block) - first for part in parts))[:-1]
    logits = mx.split(network.logits(hidden, target)[0], cuts)
    each = zip(logits, mx.split(hidden[0], cuts), parts, strict=True)
    slots = [Slots(of, states, part.block[0], part.sampler) for of, states, part in each]
    return network, slots, parts


def _pass(network: DFlash, target: Target, parts: Sequence[Part]) -> mx.array:
    """The network's hidden states [1, R, D] of all blocks, after the final norm.

    Each cache takes its request's new features, as when the network is called for it alone.
    """
    rows = _Rows(parts)
    x = network.embed_rows(mx.concatenate([part.block for part in parts]), rows.places, target)
    waiting = [part.taps for part in parts if part.taps.shape[1]]
    context = network.fuse(mx.concatenate(waiting, axis=1)) if waiting else None
    for index, layer in enumerate(network.layers):
        x = layer(x, partial(rows.attend, layer.self_attn, index, context), rows.places)
    return network.norm(x)


class _Rows:
    """The rows of a pass: of the blocks, and of the features that are new.

    Attributes:
        places: [R] of the blocks' rows, each in its block.
    """

    def __init__(self, parts: Sequence[Part]) -> None:
        self._caches = [part.cache for part in parts]
        self._blocks = [len(part.block) for part in parts]
        news = [part.taps.shape[1] for part in parts]
        starts = [cache[0].offset for cache in self._caches]  # of the new features
        each = list(zip(starts, news, self._blocks, strict=True))
        self.places = mx.array([row for block in self._blocks for row in range(block)])
        self._positions = mx.array(
            [start + new + row for start, new, block in each for row in range(block)]
        )
        self._key_positions = mx.array(
            [start + row for start, new, block in each for row in range(new + block)]
        )
        # Keys are of the new features and the block's rows, request after request. The features of
        # all come before the blocks of all.
        order: list[int] = []
        feature, row = 0, sum(news)
        for _, new, block in each:
            order += [*range(feature, feature + new), *range(row, row + block)]
            feature, row = feature + new, row + block
        self._order = mx.array(order)
        self._cuts = list(accumulate(self._blocks))[:-1]
        self._key_cuts = list(accumulate(new + block for _, new, block in each))[:-1]

    def attend(
        self, attention: Attention, layer: int, context: mx.array | None, x: mx.array
    ) -> mx.array:
        """The heads' outputs [1, H, R, head_dim] of a layer's input x [1, R, D].

        `context` [1, S, D] are the fused features that are new, None if there are none.
        """
        rows = x
        if context is not None:
            rows = mx.concatenate([context, x], axis=1)[:, self._order]
        # Rows on the batch axis: there each may have its own position.
        of_keys = attention.keys_values(rows.swapaxes(0, 1), self._key_positions)
        keys, values = (mx.split(of.swapaxes(0, 2), self._key_cuts, axis=2) for of in of_keys)
        queries = attention.queries(x.swapaxes(0, 1), self._positions).swapaxes(0, 2)
        outputs = []
        for own, new_keys, new_values, caches, block in zip(
            mx.split(queries, self._cuts, axis=2),
            keys,
            values,
            self._caches,
            self._blocks,
            strict=True,
        ):
            held = caches[layer].update(new_keys, new_values, block=block)
            outputs.append(attention.attend(own, *held))
        return mx.concatenate(outputs, axis=2)
