"""One pass of a network over the blocks of many requests.

Alone, every request would read the network's weights, and the head, which is as large as the
target's vocabulary. Here all blocks lie side by side in one sequence, as do the features that enter
the contexts before them; projections, MLPs and the head take all rows at once. Attention is each
request's own, over its own context, and so is what is chosen from the logits, but for a walk that
reads matrices itself (DSpark's). So blocks may be of any widths, and drafts are those that every
request would get alone.
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext
from functools import partial
from itertools import accumulate
from typing import TYPE_CHECKING, Any, NamedTuple

import mlx.core as mx

from ..proposal import Proposal
from .candidates import Candidates, Ranking, Slots
from .network import Attention, DFlash
from .protocol import DraftSession
from .session import NetworkSession, Part
from .tree import DraftTree

if TYPE_CHECKING:
    from ..sampling import DraftScores
    from ..targets import Target
    from .calibration import Calibration

Guard = AbstractContextManager[Any]


class _Group(NamedTuple):
    """Sessions that draft in one pass, and their places among all."""

    network: DFlash
    target: Target
    sessions: list[NetworkSession]
    places: list[int]


def propose_batch(
    sessions: Sequence[DraftSession],
    anchors: Sequence[int],
    widths: Sequence[int],
    guards: Sequence[Guard] | None = None,
) -> list[Proposal | None]:
    """What each session's own `propose` returns, in as few passes as there are networks.

    Sessions that have no network of ours, or share it with no other one here, propose by
    themselves. Nothing waits for the device, unless a processor does.

    Args:
        sessions: each of them once.
        anchors: the last committed token of each.
        widths: the most rows of each proposal, the anchor included.
        guards: entered around what runs for each session alone, as its processors. One that takes
            an error leaves None for the session's proposal, and the others as they are.
    """
    guards = guards or [nullcontext()] * len(sessions)
    proposals: list[Proposal | None] = [None] * len(sessions)
    alone, groups = _groups(sessions, widths)
    for at in alone:
        with guards[at]:
            proposals[at] = sessions[at].propose(anchors[at], widths[at])
    for group in groups:
        parts = _parts(group, anchors, widths)
        ready: list[tuple[int, tuple[Slots, DraftScores]]] = []
        for index, slots in enumerate(_slots(group, parts)):
            with guards[group.places[index]]:
                ready.append((index, (slots, group.network.draft_scores(slots))))
        chosen = group.network.choose([request for _, request in ready]) if ready else []
        for (index, (slots, _)), drafts in zip(ready, chosen, strict=True):
            session = group.sessions[index]
            proposals[group.places[index]] = session.chain(parts[index], slots.hidden[None], drafts)
    return proposals


def propose_tree_batch(
    sessions: Sequence[DraftSession],
    anchors: Sequence[int],
    rows: Sequence[int],
    widths: Sequence[int],
    calibrations: Sequence[Calibration],
    guards: Sequence[Guard] | None = None,
) -> list[DraftTree | None]:
    """What each session's own `propose_tree` returns; waits once for each network.

    Args as of `propose_batch` and of `DraftSession.propose_tree`.
    """
    guards = guards or [nullcontext()] * len(sessions)
    trees: list[DraftTree | None] = [None] * len(sessions)
    alone, groups = _groups(sessions, widths)
    for at in alone:
        with guards[at]:
            of_tree = anchors[at], rows[at], widths[at], calibrations[at]
            trees[at] = sessions[at].propose_tree(*of_tree)
    for group in groups:
        ready: list[tuple[int, Ranking]] = []
        parts = _parts(group, anchors, widths)
        for at, slots in zip(group.places, _slots(group, parts), strict=True):
            with guards[at]:
                ready.append((at, group.network.rank(slots, calibrations[at], rows[at] - 1)))
        candidates = Candidates.read_together([ranking for _, ranking in ready])
        for (at, _), found in zip(ready, candidates, strict=True):
            trees[at] = DraftTree(anchors[at], found, calibrations[at], rows[at])
    return trees


def _groups(
    sessions: Sequence[DraftSession], widths: Sequence[int]
) -> tuple[list[int], list[_Group]]:
    """The places of sessions that propose by themselves, and those that draft in one pass."""
    alone: list[int] = []
    groups: dict[tuple[int, int], _Group] = {}
    for at, (session, width) in enumerate(zip(sessions, widths, strict=True)):
        if type(session) is NetworkSession and width > 1:
            network, target = session.pair
            if isinstance(network, DFlash):
                key = id(network), id(target)
                group = groups.setdefault(key, _Group(network, target, [], []))
                group.sessions.append(session)
                group.places.append(at)
                continue
        alone.append(at)
    alone += [group.places[0] for group in groups.values() if len(group.places) == 1]
    return alone, [group for group in groups.values() if len(group.places) > 1]


def _parts(group: _Group, anchors: Sequence[int], widths: Sequence[int]) -> list[Part]:
    """What each session of a group brings to its pass."""
    pairs = zip(group.sessions, group.places, strict=True)
    return [session.part(anchors[at], widths[at]) for session, at in pairs]


def _slots(group: _Group, parts: Sequence[Part]) -> list[Slots]:
    """The slots of all blocks, after one pass of the network, and of its head."""
    network, target, first = group.network, group.target, group.network.config.first_row
    hidden = _pass(network, target, parts)
    ends = accumulate(len(part.block) for part in parts)
    drafting = [
        row
        for end, part in zip(ends, parts, strict=True)
        for row in range(end - len(part.block) + first, end)
    ]
    hidden = hidden[:, mx.array(drafting)]
    cuts = list(accumulate(len(part.block) - first for part in parts))[:-1]
    logits = mx.split(network.logits(hidden, target)[0], cuts)
    each = zip(logits, mx.split(hidden[0], cuts), parts, strict=True)
    return [Slots(of, states, mx.array(part.anchor), part.sampler) for of, states, part in each]


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
