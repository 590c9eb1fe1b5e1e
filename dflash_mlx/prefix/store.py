"""The prefix store: what earlier requests have read, for prompts with the same beginning.

Blocks of a text are found by their keys, one after another. What follows the last block depends on
the pair. If its caches can be trimmed, the entry that shares the most tokens with the text is used:
another block, or a *tail*, which holds the tokens after the last block of a conversation. Other
pairs (sliding windows, recurrent states) need a checkpoint at or before the end of the match.
"""

from __future__ import annotations

import threading
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
from .disk_cache import DiskCache
from .entries import (
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
from .memory_cache import MemoryCache

# Tokens in a block.
BLOCK_TOKENS = 256
# Tokens between the checkpoints of a long prompt.
CHECKPOINT_STRIDE = 4096
# Checkpoints that are kept of one text.
MAX_STORED_CHECKPOINTS = 8
# The last tokens of a prompt are always read again: mlx-lm computes a single row in another way.
ALWAYS_READ = 2
# Tokens at the end of a prompt that the next turn may not repeat, such as "<|assistant|><think>".
CHANGING_END = 16


class PrefixStore:
    """What requests of one pair have read, so that a common prefix is read once.

    A request starts where the longest cached prefix of its prompt ends, and reads the rest. Its
    text is the same as without the cache. Pass it to `stream_generate(..., prefix=cache)` or
    `Conversation(..., prefix=cache)`; any number of requests and threads may share it. Call `clear`
    and `flush` yourself; the loop calls the other methods.

    Prompts and answers can be recovered from the folder, and the time to the first token shows
    whether a prefix was cached. Use different salts for users who must not learn this.

    Args:
        target, drafter: the pair; None for no drafter. With a drafter whose sessions are not
            `SupportsSharing`, nothing is cached.
        memory: bytes for cached entries and for the caches of live requests together.
        folder: where entries are also written, so that they outlast the process. It is created,
            and only this user can read it.
        disk: the maximum total size of its files, in bytes.
        disk_left: bytes that have to stay free on the disk.
        chunk: tokens in a block. With small blocks, less is read again, but finding them is slower.
        stride: tokens between the checkpoints of a long prompt.

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
        chunk: int = BLOCK_TOKENS,
        stride: int = CHECKPOINT_STRIDE,
    ) -> None:
        check_pair(target, drafter)
        disk = check_integer("disk", disk, most=MAX_BYTES)
        disk_left = check_integer("disk_left", disk_left, least=0, most=MAX_BYTES)
        memory = check_integer("memory", memory, most=MAX_BYTES)
        self._memory = MemoryCache(memory, self._on_evict)
        self._target = target
        self._drafter = drafter
        # A store in memory serves one pair only, so its keys need no fingerprint.
        self._pair = b"" if folder is None else fingerprint(target, drafter)
        self._block = check_integer("chunk", chunk)
        self._stride = check_integer("stride", stride)
        self._disk = None if folder is None else DiskCache(user_path(folder), disk, disk_left)
        self._lock = threading.RLock()

    @property
    def used(self) -> int:
        """The bytes of all entries in memory."""
        return self._memory.used

    def check(self, target: Target, drafter: Drafter | None) -> None:
        """Raise `SettingsError` unless the store belongs to this pair."""
        if self._target is not target or self._drafter is not drafter:
            raise SettingsError(
                "The prefix store was made for another target or drafter: make a new one."
            )

    def open(
        self, prompt: Sequence[int], sampler: Sampler, kv_bits: int | None = None, salt: str = ""
    ) -> tuple[TargetSession, DraftSession, int]:
        """Start sessions of both models with the longest cached prefix of a prompt.

        At least two tokens of the prompt are left to read. Requests with different `kv_bits` or
        salts share nothing.

        Returns:
            Both sessions, and the number of tokens that they already hold.
        """
        taps = () if self._drafter is None else self._drafter.tap_layers
        target = self._target.start(taps, kv_bits)
        drafter = start_session(self._drafter, self._target, sampler)
        if not isinstance(drafter, SupportsSharing):
            return target, drafter, 0
        cacheable = prompt[: max(0, len(prompt) - ALWAYS_READ)]
        with self._lock:
            position, available, pieces = self._find(target, drafter, ids=cacheable, salt=salt)
        if position:
            room = len(prompt) - position + self._block
            restore(target, drafter, position=available, pieces=pieces, room=room)
            if position < available:
                target.trim_to(position)
                drafter.trim_to(position)
            if drafter.lookup is not None:
                drafter.lookup.read(prompt[:position])
        return target, drafter, position

    def keys(self, kv_bits: int | None, salt: str, ids: Sequence[int] = ()) -> BlockKeys:
        """The keys of a request's text, which begins with `ids`, for `insert`."""
        root = root_key(self._pair, kv_bits=kv_bits, salt=salt, size=self._block)
        return BlockKeys(root, self._block, ids)

    def checkpoint_positions(
        self,
        target: TargetSession,
        drafter: DraftSession,
        prompt: Sequence[int],
        ends: Sequence[int] = (),
        salt: str = "",
    ) -> list[int]:
        """Where to pause while reading the rest of a prompt, to `insert` a checkpoint.

        Empty for a pair whose caches can be trimmed to any position. Otherwise the positions are:
        - `ends`, where other prompts are likely to diverge (by default shortly before the end)
        - the end of a block every `stride` tokens
        - the end of the block where this prompt diverges from a cached one
        """
        if not isinstance(drafter, SupportsSharing) or can_trim(target, drafter):
            return []
        keys = self.keys(target.kv_bits, salt, prompt)
        with self._lock:
            diverges = len(self._cached_prefix(keys.path[1:])) * self._block
        ends = ends or [len(prompt) - CHANGING_END]
        stride = -(-self._stride // self._block) * self._block  # in whole blocks
        strides = range(0, len(prompt), stride)
        last = len(prompt) - ALWAYS_READ
        candidates = {diverges, *ends, *strides}
        return sorted(position for position in candidates if target.position < position <= last)

    def insert(
        self,
        target: TargetSession,
        drafter: DraftSession,
        keys: BlockKeys,
        ids: Sequence[int],
        checkpoint: bool = False,
    ) -> None:
        """Cache what is new of a text, between two forwards. Does not wait for the device.

        Args:
            target, drafter: a request's sessions, whether from `open` or not.
            keys: the request's keys, from `keys`. They are extended to the whole text.
            ids: all tokens that both sessions hold.
            checkpoint: whether later requests may start exactly here, even with a pair that needs
                a checkpoint for that.
        """
        if not (ids and target.intact and isinstance(drafter, SupportsSharing)):
            return
        if not len(ids) == target.position == drafter.position:
            return
        keys.read(ids)
        path = list(keys.path)
        text = keys.text
        trims = can_trim(target, drafter)
        with self._lock:
            new = self._new_blocks(target, drafter, keys)
            if checkpoint:
                key, tail = self._end_entry(path, text, trims)
                if key not in self._memory and (len(tail) or not trims):
                    arrays = _tail_arrays(target, drafter, start=len(ids) - len(tail), end=len(ids))
                    new.append(
                        Entry(
                            key,
                            arrays=arrays,
                            block=path[-1],
                            tokens=tail.copy(),
                            is_block=False,
                        )
                    )
                path.append(key)
            self._memory.add(new, path)
            if checkpoint:
                self._thin_out(path[:-1], text, trims)
            kept = [entry for entry in new if entry.arrays is not None]
            mx.async_eval([entry.arrays for entry in kept])
            if self._disk is not None:
                # Tails change with every turn, so only blocks and checkpoints are written.
                self._disk.write(path, [entry for entry in kept if entry.is_block or not trims])

    def reserve(self, size: int) -> bool:
        """Leave this many bytes to live requests. Returns False if that exceeds the memory."""
        with self._lock:
            return self._memory.reserve(size)

    def flush(self) -> None:
        """Wait until all entries are written to the folder, if there is one."""
        if self._disk is not None:
            self._disk.flush()

    def clear(self) -> None:
        """Evict everything from memory. A folder keeps its files."""
        with self._lock:
            self._memory.clear()

    def _on_evict(self, entry: Entry) -> None:
        """Subclasses may release what belongs to an entry that leaves the memory."""

    def _cached_prefix(self, keys: Iterable[bytes]) -> list[bytes]:
        """The leading keys that are in memory or on disk."""

        def is_cached(key: bytes) -> bool:
            return key in self._memory or (self._disk is not None and key in self._disk)

        return list(takewhile(is_cached, keys))

    def _new_blocks(
        self, target: TargetSession, drafter: SupportsSharing, keys: BlockKeys
    ) -> list[Entry]:
        """Copy the full blocks that are not in memory yet."""
        new = []
        for start, (block, key) in zip(count(step=self._block), pairwise(keys.path), strict=False):
            if key in self._memory:
                continue
            end = start + self._block
            rows = copy_rows(target, drafter, start=start, end=end)
            tokens = keys.text[start:end].copy()
            new.append(Entry(key, arrays=rows, block=block, tokens=tokens, is_block=True))
        return new

    def _end_entry(
        self, path: Sequence[bytes], text: np.ndarray, trims: bool
    ) -> tuple[bytes, np.ndarray]:
        """The key of the entry for the end of a text, and the tokens after its last block."""
        tail = text[(len(path) - 1) * self._block :]
        if trims:
            shared, key = self._memory.longest_match(path[-1], tail)
            if shared == len(tail):
                return key, tail  # a block or a longer tail already holds them
        return checkpoint_key(path[-1], tail), tail

    def _find(
        self, target: TargetSession, drafter: SupportsSharing, ids: Sequence[int], salt: str
    ) -> tuple[int, int, list[Arrays]]:
        """Find the longest cached prefix of `ids`.

        Returns:
            The number of tokens in it, the number of tokens in the arrays (the last ones may belong
            to another text), and the arrays.
        """
        keys = self.keys(target.kv_bits, salt, ids)
        text = keys.text
        [root, *blocks] = keys.path
        while True:
            path = [root, *self._cached_prefix(blocks)]
            position = (len(path) - 1) * self._block  # the root key stands for no block
            available = position
            if can_trim(target, drafter):
                shared, last = self._memory.longest_match(path[-1], text[position:])
                if shared:
                    path.append(last)
                    position += shared
                    available += len(self._memory.entries[last].tokens)
            else:
                checkpoints = self._checkpoints(path, text)
                position, last = checkpoints[-1] if checkpoints else (0, root)
                available = position
                path = path[: position // self._block + 1]  # the blocks before the checkpoint
                path += [last] if checkpoints else []
            entries = self._read(target, path=path, text=text[:position], length=available)
            if len(entries) == len(path) - 1:
                break  # otherwise a damaged file was removed: search again
        pieces = [entry.arrays or {} for entry in entries]
        self._memory.add([entry for entry in entries if entry.key not in self._memory], path)
        if self._disk is not None and entries:
            self._disk.write(path)
        return position, available, pieces

    def _checkpoints(self, path: Sequence[bytes], text: np.ndarray) -> list[tuple[int, bytes]]:
        """Position and key of the checkpoints and tails of a text, in order.

        Args:
            path: the keys of the root and of the leading blocks.
            text: the tokens.
        """
        checkpoints = []
        for start, block in zip(count(step=self._block), path, strict=False):
            entries = self._memory.after(block).items()
            ends = {(len(entry.tokens), key) for key, entry in entries if not entry.is_block}
            if self._disk is not None:
                ends |= self._disk.checkpoints_after(block)
            for length, key in sorted(ends):
                tail = text[start : start + length]
                if len(tail) == length and checkpoint_key(block, tail) == key:
                    checkpoints.append((start + length, key))
        return checkpoints

    def _read(
        self, session: TargetSession, path: Sequence[bytes], text: np.ndarray, length: int
    ) -> list[Entry]:
        """The entries of a text from memory or disk, up to the first with a damaged file.

        Args:
            session: a session with the taps and `kv_bits` of the request.
            path: the root key, and the keys of the entries.
            text: the tokens. The last entry may hold more of them if it is in memory.
            length: the number of tokens in all entries.
        """
        entries: list[Entry] = []
        layout = None
        for start, (block, key) in zip(count(step=self._block), pairwise(path), strict=False):
            entry = self._memory.entries.get(key)
            if entry is None and self._disk is not None:
                layout = layout or self._layout(session, length)
                tokens = text[start : start + self._block].copy()
                is_block = len(tokens) == self._block
                expected = layout.arrays(start, start + len(tokens), checkpoint=not is_block)
                arrays = self._disk.read(key, expected)
                if arrays is not None:
                    entry = Entry(key, arrays=arrays, block=block, tokens=tokens, is_block=is_block)
            if entry is None:
                break
            entries.append(entry)
        return entries

    def _layout(self, session: TargetSession, length: int) -> Layout:
        """The arrays that the pair stores for a text of `length` tokens."""
        target = self._target.start(session.tap_layers, session.kv_bits)
        drafter = start_session(self._drafter, self._target, Sampler())
        assert isinstance(drafter, SupportsSharing)
        return Layout(target, drafter, length=length, size=self._block)

    def _thin_out(self, path: Sequence[bytes], text: np.ndarray, trims: bool) -> None:
        """Drop the tails that a text has outgrown, or early checkpoints if there are too many."""
        checkpoints = self._checkpoints(path, text)
        if trims:
            dropped = [key for position, key in checkpoints if position < len(text)]
        else:
            # The first one is kept because it may be the end of a system prompt.
            excess = max(0, len(checkpoints) - MAX_STORED_CHECKPOINTS)
            dropped = [key for _, key in checkpoints[1 : 1 + excess]]
        for key in dropped:
            if self._disk is not None:
                self._disk.remove(key)
            if key in self._memory:
                self._memory.evict(key)


def can_trim(target: TargetSession, drafter: SupportsResume) -> bool:
    """Whether a pair can start from any position of its rows, without checkpoints."""
    return target.can_trim and drafter.can_trim


def _tail_arrays(target: TargetSession, drafter: SupportsSharing, start: int, end: int) -> Arrays:
    """The rows from `start` to `end`, if there are any, and the states of both sessions."""
    rows = copy_rows(target, drafter, start=start, end=end) if start < end else {}
    return rows | copy_state(target, drafter)
