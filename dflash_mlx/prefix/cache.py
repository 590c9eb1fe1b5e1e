"""The prefix cache: what requests have read, for prompts that begin the same way.

Blocks of a text are found by their keys, one after another. Behind the last one, a pair whose
caches can be trimmed goes on with the entry that shares the most tokens with the text: another
block, or a *tail*, which holds what follows the last block of a conversation. Other pairs (sliding
windows, recurrent states) need a checkpoint at or before the end of the match.

Entries are evicted in least-recently-used order. A use moves the last entry of a text to the end of
that order, and behind it the ones before it, last to first. So a block is never evicted before what
needs it.
"""

from __future__ import annotations

import threading
from collections import OrderedDict
from collections.abc import Iterable, Sequence
from itertools import count, pairwise, takewhile
from pathlib import Path

import mlx.core as mx
import numpy as np

from ..drafter.protocol import (
    Drafter,
    DraftSession,
    SupportsResume,
    SupportsSharing,
    check_pair,
    start_session,
)
from ..errors import SettingsError
from ..sampling import Sampler
from ..targets import Target, TargetSession
from ..targets.caches import Arrays
from ..validation import MAX_BYTES, check_integer, user_path
from .blocks import (
    BlockIndex,
    BlockKeys,
    Entry,
    Layout,
    checkpoint_key,
    copy_rows,
    copy_state,
    fingerprint,
    restore,
    root_key,
)
from .disk import DiskCache

CHUNK = 256  # tokens of a block
STRIDE = 4096  # tokens of a long prompt between checkpoints
MAX_CHECKPOINTS = 8  # of one text
UNCACHED = 2  # last tokens of a prompt that are always read: one row is computed differently
TAIL = 16  # tokens at a prompt's end that the next turn may not repeat: "<|assistant|><think>"


class PrefixStore:
    """What requests of one pair have read, so that a common prefix is read once.

    A request starts where the longest cached prefix of its prompt ends, and reads the rest. Its
    text is the same as without the cache. Pass it to `stream_generate(..., prefix=cache)` or
    `Conversation(..., prefix=cache)`; any number of requests and threads may share it. `clear` and
    `flush` are for you, the other methods are the loop's.

    Prompts and answers can be recovered from the folder, and the time to the first token shows
    whether a prefix was cached: give users that must not learn this different salts.

    Args:
        target, drafter: the pair; None for no drafter. With a drafter whose sessions are not
            `SupportsSharing`, nothing is cached.
        memory: bytes for cached entries and for the caches of live requests together.
        folder: where entries are written as well, so that they outlast the process; it is created,
            readable by this user only.
        disk: bytes of its files.
        disk_left: bytes of the disk that stay free.
        chunk: tokens of a block. Small blocks leave less to read again and take longer to find.
        stride: tokens of a long prompt between checkpoints.

    Raises:
        SettingsError: not a pair, or a number out of its range.
        OutputError: the folder cannot be created.
    """

    def __init__(
        self,
        target: Target,
        drafter: Drafter | None,
        *,
        memory: int,
        folder: str | Path | None = None,
        disk: int = 32 << 30,
        disk_left: int = 10 << 30,
        chunk: int = CHUNK,
        stride: int = STRIDE,
    ) -> None:
        check_pair(target, drafter)
        disk = check_integer("disk", disk, most=MAX_BYTES)
        disk_left = check_integer("disk_left", disk_left, least=0, most=MAX_BYTES)
        self.capacity = check_integer("memory", memory, most=MAX_BYTES)
        self.reserved = 0  # bytes for live requests
        self.used = 0  # bytes of entries
        self._target = target
        self._drafter = drafter
        # In memory, keys of other pairs cannot meet.
        self._pair = b"" if folder is None else fingerprint(target, drafter)
        self._chunk = check_integer("chunk", chunk)
        self._stride = check_integer("stride", stride)
        self._entries: OrderedDict[bytes, Entry] = OrderedDict()
        self._index = BlockIndex[Entry]()
        self._disk = None if folder is None else DiskCache(user_path(folder), disk, disk_left)
        self._lock = threading.RLock()

    def check(self, target: Target, drafter: Drafter | None) -> None:
        """Raise `SettingsError` unless the cache belongs to this pair."""
        if self._target is not target or self._drafter is not drafter:
            raise SettingsError("The prefix store is of another target or drafter: make a new one.")

    def open(
        self, prompt: Sequence[int], sampler: Sampler, kv_bits: int | None = None, salt: str = ""
    ) -> tuple[TargetSession, DraftSession, int]:
        """New sessions of both, and how many tokens of the prompt they hold already.

        At least two tokens of the prompt are left to read. Requests with another `kv_bits` or salt
        share nothing.
        """
        taps = () if self._drafter is None else self._drafter.tap_layers
        target = self._target.start(taps, kv_bits)
        drafter = start_session(self._drafter, self._target, sampler)
        if not isinstance(drafter, SupportsSharing):
            return target, drafter, 0
        cacheable = prompt[: max(0, len(prompt) - UNCACHED)]
        with self._lock:
            position, held, pieces = self._find(target, drafter=drafter, ids=cacheable, salt=salt)
        if position:
            room = len(prompt) - position + self._chunk
            restore(target, drafter=drafter, position=held, pieces=pieces, room=room)
            if position < held:
                target.trim_to(position)
                drafter.trim_to(position)
            if drafter.lookup is not None:
                drafter.lookup.read(prompt[:position])
        return target, drafter, position

    def keys(self, kv_bits: int | None, salt: str, ids: Sequence[int] = ()) -> BlockKeys:
        """The keys of a request's text, which begins with `ids`, for `insert`."""
        return BlockKeys(
            root_key(self._pair, kv_bits=kv_bits, salt=salt, size=self._chunk), self._chunk, ids
        )

    def checkpoint_positions(
        self,
        target: TargetSession,
        drafter: DraftSession,
        prompt: Sequence[int],
        ends: Sequence[int] = (),
        salt: str = "",
    ) -> list[int]:
        """Where reading the rest of a prompt should pause for an `insert` with a checkpoint.

        Empty for a pair whose caches can be trimmed to any position. They are the positions in
        `ends`, where other prompts are likely to diverge (by default before the prompt's end), and
        ends of blocks: every `stride` tokens, and where this prompt diverges from a cached one.
        """
        if not isinstance(drafter, SupportsSharing) or can_trim(target, drafter):
            return []
        keys = self.keys(target.kv_bits, salt, prompt)
        with self._lock:
            diverges = len(self._cached_prefix(keys.path[1:])) * self._chunk
        ends = ends or [len(prompt) - TAIL]
        strides = range(0, len(prompt), -(-self._stride // self._chunk) * self._chunk)
        last = len(prompt) - UNCACHED
        return sorted(p for p in {diverges, *ends, *strides} if target.position < p <= last)

    def insert(
        self,
        target: TargetSession,
        drafter: DraftSession,
        keys: BlockKeys,
        ids: Sequence[int],
        checkpoint: bool = False,
    ) -> None:
        """Cache what is new of these tokens, between two forwards. Does not wait for the device.

        Args:
            target, drafter: a request's sessions, from `open` or not.
            keys: of the request, from `keys`; it reads what is new.
            ids: all tokens that both hold.
            checkpoint: make this position one to start from, also for a pair that needs one.
        """
        if not (ids and target.intact and isinstance(drafter, SupportsSharing)):
            return
        if not len(ids) == target.position == drafter.position:
            return
        keys.read(ids)
        path = [*keys.path]
        text = keys.text
        size = self._chunk
        trims = can_trim(target, drafter)
        with self._lock:
            new = []
            for start, (block, key) in zip(count(step=size), pairwise(path), strict=False):
                if key not in self._entries:
                    rows = copy_rows(target, drafter=drafter, start=start, end=start + size)
                    own = text[start : start + size].copy()
                    new.append(Entry(key, arrays=rows, block=block, tokens=own, is_block=True))
            if checkpoint:
                key, rest = self._end(path, text, trims)
                path.append(key)
                if key not in self._entries and (len(rest) or not trims):
                    start = len(ids) - len(rest)
                    rows = (
                        copy_rows(target, drafter=drafter, start=start, end=len(ids))
                        if len(rest)
                        else {}
                    )
                    arrays = rows | copy_state(target, drafter)
                    new.append(
                        Entry(
                            key, arrays=arrays, block=path[-2], tokens=rest.copy(), is_block=False
                        )
                    )
            self._add(new, path)
            if checkpoint:
                self._thin_out(path[:-1], text, trims)
            kept = [entry for entry in new if entry.arrays is not None]
            mx.async_eval([entry.arrays for entry in kept])
            if self._disk is not None:
                # Tails change with every turn: a folder has full blocks.
                self._disk.write(path, [entry for entry in kept if entry.is_block or not trims])

    def reserve(self, size: int) -> bool:
        """Leave this many bytes to live requests, evicting entries; False if there are fewer."""
        with self._lock:
            if size > self.capacity:
                return False
            self.reserved = size
            self._shrink()
            return True

    def flush(self) -> None:
        """Wait until all entries are written to the folder, if there is one."""
        if self._disk is not None:
            self._disk.flush()

    def clear(self) -> None:
        """Evict everything from memory; a folder keeps its files."""
        with self._lock:
            while self._entries:
                self._evict(next(iter(self._entries)))

    def _cached_prefix(self, keys: Iterable[bytes]) -> list[bytes]:
        """The first of these keys that are all in memory or on disk."""

        def is_cached(key: bytes) -> bool:
            return key in self._entries or (self._disk is not None and key in self._disk)

        return list(takewhile(is_cached, keys))

    def _end(
        self, path: Sequence[bytes], text: np.ndarray, trims: bool
    ) -> tuple[bytes, np.ndarray]:
        """The key of the entry that holds a text's end, new or not, and the tokens there."""
        rest = text[(len(path) - 1) * self._chunk :]
        if trims:
            shared, key = self._longest(path[-1], rest)
            if shared == len(rest):
                return key, rest  # a block or a longer tail
        return checkpoint_key(path[-1], rest), rest

    def _longest(self, block: bytes, text: np.ndarray) -> tuple[int, bytes]:
        """How many tokens of a text stand behind a block in memory, and the key of their entry."""
        entries = self._index.after(block).items()
        return max([(entry.shared(text), key) for key, entry in entries], default=(0, b""))

    def _find(
        self, target: TargetSession, drafter: SupportsSharing, ids: Sequence[int], salt: str
    ) -> tuple[int, int, list[Arrays]]:
        """The length of the longest cached prefix, and the arrays that make it up.

        In between: how many tokens are in the arrays, of which the last may be another text's.
        """
        keys = self.keys(target.kv_bits, salt, ids)
        text = keys.text
        [root, *blocks] = keys.path
        while True:
            path = [root, *self._cached_prefix(blocks)]
            position = held = (len(path) - 1) * self._chunk
            if can_trim(target, drafter):
                shared, last = self._longest(path[-1], text[position:])
                if shared:
                    path.append(last)
                    position = position + shared
                    held = held + len(self._entries[last].tokens)
            else:
                found = self._checkpoints(path, text)
                position, last = found[-1] if found else (0, root)
                held = position
                path = path[: position // self._chunk + 1]
                path += [last] if found else []
            entries = self._read(target, path, text[:position], held)
            if len(entries) == len(path) - 1:
                break  # otherwise a file was damaged and is gone now: search again
        pieces = [entry.arrays or {} for entry in entries]
        self._add([entry for entry in entries if entry.key not in self._entries], path)
        if self._disk is not None and entries:
            self._disk.write(path)
        return position, held, pieces

    def _checkpoints(self, path: Sequence[bytes], text: np.ndarray) -> list[tuple[int, bytes]]:
        """Position and key of the checkpoints and tails of these tokens, in order.

        path: the keys of the root and of the leading blocks.
        """
        found = []
        for start, block in zip(count(step=self._chunk), path, strict=False):
            entries = self._index.after(block).items()
            ends = {(len(entry.tokens), key) for key, entry in entries if not entry.is_block}
            if self._disk is not None:
                ends |= self._disk.checkpoints_after(block)
            for length, key in sorted(ends):
                tail = text[start : start + length]
                if len(tail) == length and checkpoint_key(block, tail) == key:
                    found.append((start + length, key))
        return found

    def _read(
        self, like: TargetSession, path: Sequence[bytes], text: np.ndarray, held: int
    ) -> list[Entry]:
        """The entries of a text, up to the first whose file is damaged.

        They hold `held` tokens: the last one, if it is in memory, may hold more than the text.
        """
        found = list[Entry]()
        layout = None
        size = self._chunk
        for start, (block, key) in zip(count(step=size), pairwise(path), strict=False):
            entry = self._entries.get(key)
            if entry is None and self._disk is not None:
                if layout is None:
                    target = self._target.start(like.tap_layers, like.kv_bits)
                    drafter = start_session(self._drafter, self._target, Sampler())
                    assert isinstance(drafter, SupportsSharing)
                    layout = Layout(target, drafter=drafter, length=held, size=size)
                tokens = text[start : start + size].copy()
                end = start + len(tokens)
                is_block = len(tokens) == size
                arrays = self._disk.read(key, layout.arrays(start, end, not is_block))
                entry = (
                    None
                    if arrays is None
                    else Entry(key, arrays=arrays, block=block, tokens=tokens, is_block=is_block)
                )
            if entry is None:
                break
            found.append(entry)
        return found

    def _thin_out(self, path: Sequence[bytes], text: np.ndarray, trims: bool) -> None:
        """Drop tails that a text has outgrown, or early checkpoints of one with too many.

        The first checkpoint may be a system prompt's.
        """
        found = self._checkpoints(path, text)
        if trims:
            found = [(position, key) for position, key in found if position < len(text)]
        else:
            found = found[1 : max(1, len(found) + 1 - MAX_CHECKPOINTS)]
        for _, key in found:
            if self._disk is not None:
                self._disk.remove(key)
            if key in self._entries:
                self._evict(key)

    def _add(self, new: Sequence[Entry], path: Sequence[bytes]) -> None:
        """Add entries, and mark all entries of a text as used."""
        for entry in new:
            self._entries[entry.key] = entry
            self.used += entry.size
            self._index.add(entry.block, entry.key, entry)
        for key in reversed(path):
            if key in self._entries:
                self._entries.move_to_end(key)
        self._shrink()

    def _shrink(self) -> None:
        while self._entries and self.used + self.reserved > self.capacity:
            self._evict(next(iter(self._entries)))

    def _evict(self, key: bytes) -> None:
        """Remove an entry from memory; if it is not on disk yet, it is not written any more."""
        entry = self._entries.pop(key)
        self.used -= entry.size
        entry.arrays = None
        self._index.remove(entry.block, key)


def can_trim(target: TargetSession, drafter: SupportsResume) -> bool:
    """Whether a pair can start from any position of its rows, without checkpoints."""
    return target.can_trim and drafter.can_trim
