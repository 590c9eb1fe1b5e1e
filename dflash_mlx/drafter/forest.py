"""The chains of many requests."""

from __future__ import annotations

from collections.abc import Sequence

from ..proposal import Proposal
from .protocol import Session


def propose_together(
    sessions: Sequence[Session], anchors: Sequence[int], widths: Sequence[int]
) -> list[Proposal]:
    """Each session's proposal of at most so many rows."""
    asked = zip(sessions, anchors, widths, strict=True)
    return [session.propose(anchor, width) for session, anchor, width in asked]
