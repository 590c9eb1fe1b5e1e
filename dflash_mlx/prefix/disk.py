"""Entries on disk: a safetensors file each, so that hits outlast the process.

A file's name says what it is and its checksum, so the folder needs no index, and whatever is not as
it was written is a miss: it is removed. Nothing that goes wrong here concerns a request. One thread
writes; it takes up arrays that others have computed, and computes none. It ends with the program,
after its last file.
"""

from __future__ import annotations

import io
import os
import re
import shutil
import threading
import time
import warnings
import zlib
from collections import OrderedDict
from collections.abc import Iterable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import mlx.core as mx

from ..errors import OutputError
from ..threads import clean_up_at_end
from .entries import Entry, Place, Places

NAME = re.compile(
    r"(rows|mark)-(?P<key>[0-9a-f]{64})(-(?P<chunk>[0-9a-f]{64})-(?P<length>\d{1,9}))?"
    r"-(?P<checksum>[0-9a-f]{8})\.safetensors"
)
UNFINISHED = re.compile(r"\.[0-9a-f]{64}\.\d+")
STALE = 3600  # seconds after which an unfinished file is nobody's


@dataclass
class File:
    """An entry's file: its name, its bytes, and the place of a mark."""

    name: str
    size: int
    place: Place | None


class Folder:
    """The files of a store's folder, in the order in which they are let go.

    Args:
        path: a folder `prefix` in it is made and used, open to this user alone.
        budget: bytes of all files.
        left_free: bytes of the disk that are never used.

    Raises `OutputError` when the folder cannot be made or read.
    """

    def __init__(self, path: Path, budget: int, left_free: int) -> None:
        self._path, self._budget, self._left_free = path / "prefix", budget, left_free
        self._files: OrderedDict[bytes, File] = OrderedDict()
        self._places, self._lock = Places(), threading.Lock()
        self._warned = False
        self._last: Future[None] | None = None
        try:
            self._path.mkdir(parents=True, exist_ok=True)
            self._path.chmod(0o700)
            self._scan()
        except OSError as error:
            raise OutputError.because(self._path, error) from error
        self._writer = ThreadPoolExecutor(1, "dflash-prefix", initializer=clean_up_at_end)

    def after(self, chunk: bytes) -> list[tuple[int, bytes]]:
        """As `Places.after`, of the marks that are here."""
        with self._lock:
            return self._places.after(chunk)

    def has(self, key: bytes) -> bool:
        """Whether there is a file of this name; what is in it is seen when it is read."""
        return key in self._files

    def read(self, key: bytes) -> Entry | None:
        """An entry, computed; None, and no file any more, if it is not what was written."""
        with self._lock:
            file = self._files.get(key)
        if file is None:
            return None
        try:
            data = (self._path / file.name).read_bytes()
            if file.name != _name(key, file.place, data):
                raise ValueError("another checksum")
            loaded: Any = mx.load(io.BytesIO(data), format="safetensors", return_metadata=True)
            arrays, said = loaded
            if said.get("key") != key.hex():
                raise ValueError("another entry")
            mx.eval(arrays)
        except (OSError, RuntimeError, ValueError):
            self.drop(key)
            return None
        return Entry(key, arrays, file.place)

    def keep(self, path: Sequence[bytes], new: Sequence[Entry] = ()) -> None:
        """Write entries, soon, and have this place, with all before it, be the last to go.

        Args:
            path: keys of the place and, in front of it, of what it needs.
            new: entries of it, computed or about to be.
        """
        with suppress(RuntimeError):  # the program ends
            self._last = self._writer.submit(self._keep, path, new)

    def flush(self) -> None:
        """Wait until all is written."""
        if self._last is not None:
            self._last.result()

    def drop(self, key: bytes) -> None:
        """Remove an entry's file."""
        with self._lock:
            self._drop(key)

    def _keep(self, path: Sequence[bytes], new: Iterable[Entry]) -> None:
        """In the writer's thread."""
        try:
            for entry in new:
                if not self.has(entry.key) and not self._write(entry, set(path)):
                    break  # what comes after it would be of no use
        except OSError as error:
            if not self._warned:
                self._warned = True
                why = OutputError.because(self._path, error)
                warnings.warn(f"dflash-mlx: prefixes are not kept on disk: {why}", stacklevel=1)
        now = time.time_ns()
        with self._lock:
            for later, key in enumerate(reversed(path)):
                if key in self._files:
                    self._files.move_to_end(key)
                    self._stamp(key, now + 1000 * later)

    def _write(self, entry: Entry, needed: set[bytes]) -> bool:
        """Write a file whole or not at all; False without room beside what is needed."""
        arrays = entry.arrays
        if arrays is None:
            return False
        buffer = io.BytesIO()
        mx.save_safetensors(buffer, arrays, {"key": entry.key.hex()})
        data = buffer.getbuffer()
        if not self._make_room(len(data), needed):
            return False
        name = _name(entry.key, entry.place, data)
        unfinished = self._path / f".{entry.key.hex()}.{os.getpid()}"
        try:
            opened = os.open(unfinished, os.O_CREAT | os.O_TRUNC | os.O_WRONLY, 0o600)
            with open(opened, "wb") as to:
                to.write(data)
            unfinished.replace(self._path / name)
        finally:
            unfinished.unlink(missing_ok=True)
        with self._lock:
            self._add(entry.key, File(name, len(data), entry.place))
        return True

    def _make_room(self, size: int, needed: set[bytes]) -> bool:
        """Let old files go until another fits."""
        with self._lock:
            held = sum(file.size for file in self._files.values())
            for key in [key for key in self._files if key not in needed]:
                if self._fits(held + size, size):
                    return True
                held -= self._files[key].size
                self._drop(key)
            return self._fits(held + size, size)

    def _fits(self, total: int, size: int) -> bool:
        free = shutil.disk_usage(self._path).free
        return total <= self._budget and free - size >= self._left_free

    def _add(self, key: bytes, file: File) -> None:
        self._files[key] = file
        if file.place is not None:
            self._places.add(key, file.place)

    def _drop(self, key: bytes) -> None:
        file = self._files.pop(key, None)
        self._places.forget(key)
        if file is not None:
            with suppress(OSError):  # it may not be ours to remove: it is not asked for again
                (self._path / file.name).unlink(missing_ok=True)

    def _stamp(self, key: bytes, when: int) -> None:
        """Write down when a file was used; one that another process has removed is none."""
        try:
            os.utime(self._path / self._files[key].name, ns=(when, when))
        except OSError:
            self._drop(key)

    def _scan(self) -> None:
        """Learn what is here; remove what a process that was killed left behind."""
        found = []
        for item in os.scandir(self._path):
            try:
                named, status = NAME.fullmatch(item.name), item.stat(follow_symlinks=False)
            except FileNotFoundError:
                continue  # another process has finished it, or removed it
            if named is not None:
                chunk = named["chunk"]
                place = Place(bytes.fromhex(chunk), int(named["length"])) if chunk else None
                file = File(item.name, status.st_size, place)
                found.append((status.st_mtime_ns, bytes.fromhex(named["key"]), file))
            elif UNFINISHED.fullmatch(item.name) and status.st_mtime < time.time() - STALE:
                Path(item.path).unlink(missing_ok=True)
        found.sort(key=lambda each: each[0])
        for _, key, file in found:
            self._add(key, file)


def _name(key: bytes, place: Place | None, data: bytes | memoryview) -> str:
    """The name of an entry's file: what it is, and a checksum of all of it."""
    where = "" if place is None else f"-{place.chunk.hex()}-{place.length}"
    kind = "rows" if place is None else "mark"
    return f"{kind}-{key.hex()}{where}-{zlib.crc32(data):08x}.safetensors"
