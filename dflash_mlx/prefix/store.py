"""The store: what requests have read, for those that begin alike.

Chunks of a text are found by their keys, one after another, without a tree. A pair that cannot be
cut anywhere (windows, recurrent states) also needs a mark at or before the end of the match.

Entries lie in the order in which they are let go. Whoever uses a place moves it to the end, and
after it, from the last to the first, the chunks before it: so nothing ever goes before what needs
it, and no count of users is kept.
"""

from __future__ import annotations

import threading
from collections import OrderedDict
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path

import mlx.core as mx

from ..drafter.protocol import Drafter, DraftSession, check_pair, start_session
from ..errors import SettingsError
from ..sampling import Sampler
from ..targets import Target, TargetSession
from ..targets.caches import Arrays
from ..validation import MAX_BYTES, check_integer
from .disk import Folder
from .entries import Entry, Place, Places, can_trim, restore, rows_of, state_of
from .keys import chunk_keys, fingerprint, mark_key, root_key
from .ledger import Ledger

CHUNK = 256  # tokens; what is read anew after a hit is less than that, and a hit's own tokens
STRIDE = 4096  # tokens of a long prompt between marks
MOST_MARKS = 8  # on the way to one place
LEFT = 2  # tokens of a prompt that are always read: two rows are computed as any more are
PARTING = 16  # tokens at a prompt's end that the next turn may not repeat: "<|assistant|><think>"


class PrefixStore:
    """What requests of one pair have read, so that prompts which begin alike are read once.

    A server's system prompt and tools, the turns of a chat, four agents on one repository: a
    request begins where the longest stored beginning of its prompt ends and reads the rest. Its
    text is the one it would have had. Hand it to `stream_generate(..., prefix=store)`; any number
    of requests and threads share it. With a folder it outlasts the process.

    Anyone who reads the folder can recover prompts and answers from it. Requests of different
    people are kept apart by `salt`: how fast an answer comes else tells whether somebody has asked
    the same before.

    Args:
        target, drafter: the pair; None for no drafter. What a drafter of your own took in is stored
            if its sessions are `storable` (`DraftSession`), else nothing is.
        memory: bytes, of what is stored and of what is left to live requests together.
        folder: where entries are kept on disk as well; it is made, for this user alone.
        disk: bytes that they may take there.
        disk_left: bytes of the disk that stay free.
        chunk: tokens of an entry; a shorter one reads less anew and costs more to find.
        stride: tokens between marks of a long prompt.

    Raises:
        SettingsError: no pair, or a number that is not a whole one of its range.
        OutputError: the folder cannot be made.
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
        memory = check_integer("memory", memory, most=MAX_BYTES)
        disk = check_integer("disk", disk, most=MAX_BYTES)
        disk_left = check_integer("disk_left", disk_left, least=0, most=MAX_BYTES)
        self.ledger = Ledger(memory)
        self._target, self._drafter = target, drafter
        self._of, self._pair = (target, drafter), fingerprint(target, drafter)
        self._chunk, self._stride = check_integer("chunk", chunk), check_integer("stride", stride)
        self._entries: OrderedDict[bytes, Entry] = OrderedDict()
        self._folder = (
            None if folder is None else Folder(Path(folder).expanduser(), disk, disk_left)
        )
        self._places = Places()  # of the marks in memory
        self._lock = threading.RLock()

    # What a request asks

    def check(self, target: Target, drafter: Drafter | None) -> None:
        """Raise `SettingsError` unless the store is of this pair."""
        if self._of[0] is not target or self._of[1] is not drafter:
            raise SettingsError("The prefix store is of another target or drafter: make a new one.")

    def open(
        self, prompt: Sequence[int], sampler: Sampler, kv_bits: int | None = None, salt: str = ""
    ) -> tuple[TargetSession, DraftSession, int]:
        """New sessions, and how many tokens of the prompt they hold already; see `Prefix`."""
        taps = () if self._drafter is None else self._drafter.tap_layers
        target = self._target.start(taps, kv_bits)
        drafter = start_session(self._drafter, self._target, sampler)
        if not drafter.storable:
            return target, drafter, 0
        most = max(0, len(prompt) - LEFT)
        with self._lock:
            position, pieces = self._find(target, drafter, prompt[:most], salt)
        if position:
            room = len(prompt) - position + self._chunk
            restore(target, drafter, position, pieces, room)
            drafter.read_tokens(prompt[:position])
        return target, drafter, position

    def stops(
        self,
        target: TargetSession,
        drafter: DraftSession,
        prompt: Sequence[int],
        ends: Sequence[int] = (),
        salt: str = "",
    ) -> list[int]:
        """Where to pause for a `keep` with `mark`; see `Prefix`.

        All are ends of chunks: those before the places in `ends` (without any, before the prompt's
        end), every `stride` tokens, and where a stored text parts from this one: that text was the
        first to come by there, this is the second, so there may be more.
        """
        if not drafter.storable or can_trim(target, drafter):
            return []
        keys = chunk_keys(self._root(target.kv_bits, salt), prompt, self._chunk)
        with self._lock:
            parts = sum(1 for _ in self._leading(keys)) * self._chunk
        ends = [end // self._chunk * self._chunk for end in ends or [len(prompt) - PARTING]]
        strides = range(0, len(prompt), -(-self._stride // self._chunk) * self._chunk)
        last = len(prompt) - LEFT
        return sorted(p for p in {parts, *ends, *strides} if target.position < p <= last)

    def keep(
        self,
        target: TargetSession,
        drafter: DraftSession,
        ids: Sequence[int],
        mark: bool = False,
        salt: str = "",
    ) -> None:
        """Store what is new of these tokens; see `Prefix`."""
        if not drafter.storable or not target.intact:
            return
        if not len(ids) == target.position == drafter.position:
            return
        root, size = self._root(target.kv_bits, salt), self._chunk
        keys = chunk_keys(root, ids, size)
        with self._lock:
            new = [
                Entry(key, rows_of(target, drafter, at * size, (at + 1) * size))
                for at, key in enumerate(keys)
                if key not in self._entries
            ]
            path = list(keys)
            if mark and ids and not can_trim(target, drafter):
                path.append(self._mark(target, drafter, ids, [root, *keys], new))
            self._insert(new, path)
            kept = [entry for entry in new if entry.arrays is not None]
            mx.async_eval([entry.arrays for entry in kept])
            if self._folder is not None:
                self._folder.keep(path, kept)

    def leave_room(self, size: int) -> bool:
        """Leave this many bytes in all to live requests, if there are as many; see `Prefix`."""
        with self._lock:
            if size > self.ledger.total:
                return False
            self.ledger.live = size
            self._shrink()
            return True

    def flush(self) -> None:
        """Wait until all is on disk that will be; without a folder there is nothing to wait for."""
        if self._folder is not None:
            self._folder.flush()

    def clear(self) -> None:
        """Let go of all that is stored in memory; a folder keeps what it has."""
        with self._lock:
            while self._entries:
                self._let_go(next(iter(self._entries)))

    # How it is found

    def _root(self, kv_bits: int | None, salt: str) -> bytes:
        return root_key(self._pair, kv_bits, salt, self._chunk)

    def _has(self, key: bytes) -> bool:
        return key in self._entries or (self._folder is not None and self._folder.has(key))

    def _leading(self, keys: Iterable[bytes]) -> Iterator[bytes]:
        """The first of these keys that are all here."""
        for key in keys:
            if not self._has(key):
                return
            yield key

    def _find(
        self, target: TargetSession, drafter: DraftSession, ids: Sequence[int], salt: str
    ) -> tuple[int, list[Arrays]]:
        """The longest beginning of these tokens that is here, and what makes it up."""
        root = self._root(target.kv_bits, salt)
        keys = chunk_keys(root, ids, self._chunk)
        while True:
            path = list(self._leading(keys))
            position = len(path) * self._chunk
            if not can_trim(target, drafter):
                at, mark = self._deepest_mark([root, *path], ids)
                path = [] if mark is None else [*path[: at // self._chunk], mark]
                position = at
            entries = [self._get(key) for key in path]
            if None not in entries:
                break  # else a file was not what it should be, and is gone
        found = [entry for entry in entries if entry is not None]
        pieces = [entry.arrays or {} for entry in found]
        self._insert([entry for entry in found if entry.key not in self._entries], path)
        if self._folder is not None and path:
            self._folder.keep(path)
        return position, pieces

    def _deepest_mark(self, keys: Sequence[bytes], ids: Sequence[int]) -> tuple[int, bytes | None]:
        """The position and the key of the last mark in these tokens, whose chunks have keys."""
        marks = self._marks(keys, ids)
        return marks[-1] if marks else (0, None)

    def _marks(self, keys: Sequence[bytes], ids: Sequence[int]) -> list[tuple[int, bytes]]:
        """The marks on the way through these tokens, in the order of their positions."""
        found = []
        for at, chunk in enumerate(keys):
            start = at * self._chunk
            stored = [] if self._folder is None else self._folder.after(chunk)
            for length, key in sorted({*self._places.after(chunk), *stored}):
                tail = ids[start : start + length]
                if len(tail) == length and mark_key(chunk, tail) == key:
                    found.append((start + length, key))
        return found

    def _get(self, key: bytes) -> Entry | None:
        """An entry that is here, out of its file if need be; None if that is not what it was."""
        entry = self._entries.get(key)
        if entry is None and self._folder is not None:
            return self._folder.read(key)
        return entry

    # How it is kept and let go

    def _mark(
        self,
        target: TargetSession,
        drafter: DraftSession,
        ids: Sequence[int],
        keys: Sequence[bytes],
        new: list[Entry],
    ) -> bytes:
        """Add a mark of this place to what is new; its key."""
        start = (len(keys) - 1) * self._chunk
        key = mark_key(keys[-1], ids[start:])
        if key not in self._entries:
            rows = rows_of(target, drafter, start, len(ids)) if start < len(ids) else {}
            arrays = rows | state_of(target, drafter)
            new.append(Entry(key, arrays, Place(keys[-1], len(ids) - start)))
            marks = self._marks(keys, ids)
            # The first of a path stays, which may be a system prompt's; the next ones go.
            for _, early in marks[1 : max(1, len(marks) + 2 - MOST_MARKS)]:
                self._drop(early)
        return key

    def _insert(self, new: Sequence[Entry], path: Sequence[bytes]) -> None:
        """Add entries, and move a place with all before it to the end of the order."""
        for entry in new:
            self._entries[entry.key] = entry
            self.ledger.stored += entry.size
            if entry.place is not None:
                self._places.add(entry.key, entry.place)
        for key in reversed(path):
            if key in self._entries:
                self._entries.move_to_end(key)
        self._shrink()

    def _shrink(self) -> None:
        while self._entries and self.ledger.over > 0:
            self._let_go(next(iter(self._entries)))

    def _let_go(self, key: bytes) -> None:
        """Take an entry out of memory; what waits to be written then never is."""
        entry = self._entries.pop(key)
        self.ledger.stored -= entry.size
        entry.arrays = None
        self._places.forget(key)

    def _drop(self, key: bytes) -> None:
        """Take an entry out of memory and off the disk."""
        if self._folder is not None:
            self._folder.drop(key)
        if key in self._entries:
            self._let_go(key)
