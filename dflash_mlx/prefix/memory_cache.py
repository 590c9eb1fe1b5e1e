"""Entries of the prefix cache in memory, in least-recently-used order.

A use moves the last entry of a text to the end of that order, and behind it the ones before it,
last to first. So a block is never evicted before the entries that need it.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Sequence

import numpy as np

from .entries import BlockIndex, Entry


class MemoryCache:
    """The entries of one pair. Not thread-safe: its owner holds a lock.

    Args:
        capacity: bytes for entries and for the caches of live requests together.
        on_evict: called with every entry that is about to leave.

    Attributes:
        entries: the entries by key, least recently used first.
        used: the bytes of all entries.
    """

    def __init__(self, capacity: int, on_evict: Callable[[Entry], None]) -> None:
        self.entries: OrderedDict[bytes, Entry] = OrderedDict()
        self.used = 0
        self._capacity = capacity
        self._on_evict = on_evict
        self._reserved = 0
        self._index = BlockIndex[Entry]()

    def __contains__(self, key: bytes) -> bool:
        """Whether there is an entry for this key."""
        return key in self.entries

    def after(self, block: bytes) -> dict[bytes, Entry]:
        """A copy of the entries that follow a block."""
        return self._index.after(block)

    def longest_match(self, block: bytes, text: np.ndarray) -> tuple[int, bytes]:
        """The entry after a block that shares the most tokens with a text.

        Returns:
            The number of shared tokens, and the key of the entry.
        """
        matches = [(entry.shared(text), key) for key, entry in self.after(block).items()]
        return max(matches, default=(0, b""))

    def add(self, new: Sequence[Entry], path: Sequence[bytes]) -> None:
        """Add entries, mark all entries of a text as used, and evict what no longer fits.

        Args:
            new: the entries to add.
            path: the keys of the text's entries, in order.
        """
        for entry in new:
            self.entries[entry.key] = entry
            self.used += entry.size
            self._index.add(entry.block, entry.key, entry)
        for key in reversed(path):
            if key in self.entries:
                self.entries.move_to_end(key)
        self._shrink()

    def reserve(self, size: int) -> bool:
        """Leave this many bytes to live requests. Returns False if that exceeds the capacity."""
        if size > self._capacity:
            return False
        self._reserved = size
        self._shrink()
        return True

    def evict(self, key: bytes) -> None:
        """Remove an entry. If it is still waiting to be written to disk, it is not written."""
        entry = self.entries.pop(key)
        self._on_evict(entry)
        self.used -= entry.size
        entry.arrays = None
        self._index.remove(entry.block, key)

    def clear(self) -> None:
        """Evict all entries."""
        while self.entries:
            self.evict(next(iter(self.entries)))

    def _shrink(self) -> None:
        while self.entries and self.used + self._reserved > self._capacity:
            self.evict(next(iter(self.entries)))
