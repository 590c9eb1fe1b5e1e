"""Prefixes of texts, kept by all ranks: each its own heads, by the numbers that rank 0 gives.

Rank 0 finds, keeps and lets go, and the others do the same, so none lacks what another has.
"""

from __future__ import annotations

from typing import Any

from ..drafter.protocol import Drafter
from ..errors import SettingsError
from ..prefix.cache import PrefixCache
from ..targets.caches import strip_prefix
from .sessions import PIECE, LeadingTarget, number_of
from .wire import Kind


class LeadingStore(PrefixCache):
    """Rank 0's store. `memory` is what each machine keeps.

    Raises `SettingsError` for a folder: the others' parts would not be in it.
    """

    def __init__(self, target: LeadingTarget, drafter: Drafter | None, **settings: Any) -> None:
        if settings.get("folder") is not None:
            raise SettingsError("A prefix store of several machines is not kept on disk.")
        super().__init__(target, drafter, **settings)
        self._leader = target.leader

    def _evict(self, key: bytes) -> None:
        arrays = self._entries[key].arrays or {}
        for part in ("rows", "state"):
            piece = strip_prefix(arrays, f"target.{part}.")
            if PIECE in piece:
                self._leader.tell(Kind.FREE, number_of(piece))
        super()._evict(key)
