"""The chains and the trees of many requests."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from ..proposal import Proposal
from .protocol import Session, TreeSession
from .tree import DraftTree

if TYPE_CHECKING:
    from .calibration import Calibration


def propose_together(
    sessions: Sequence[Session], anchors: Sequence[int], widths: Sequence[int]
) -> list[Proposal]:
    """Each session's proposal of at most so many rows."""
    asked = zip(sessions, anchors, widths, strict=True)
    return [session.propose(anchor, width) for session, anchor, width in asked]


def propose_trees_together(
    sessions: Sequence[TreeSession],
    anchors: Sequence[int],
    rows: Sequence[int],
    widths: Sequence[int],
    calibrations: Sequence[Calibration],
) -> list[DraftTree]:
    """Each session's tree."""
    asked = zip(sessions, anchors, rows, widths, calibrations, strict=True)
    return [session.propose_tree(a, r, w, c) for session, a, r, w, c in asked]
