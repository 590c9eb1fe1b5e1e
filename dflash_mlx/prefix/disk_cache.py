"""Entries of the prefix cache on disk, one safetensors file each.

A file's name contains its key and checksum, so the folder needs no index. A file that is damaged,
or has arrays that do not fit the pair, counts as a miss and is removed. No error here reaches a
request. A single thread writes the files; it does not compute arrays. The program ends once its
last file is written.
"""

from __future__ import annotations

import io
import os
import re
import shutil
import threading
import time
import warnings
from collections import OrderedDict
from collections.abc import Iterable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass
from hashlib import sha256
from pathlib import Path
from typing import Any

import mlx.core as mx

from ..errors import OutputError
from ..targets.caches import Arrays
from ..threads import clean_up_at_end
from ..validation import check_file
from .entries import BlockIndex, Entry, Location

NAME = re.compile(
    r"(block|checkpoint)-(?P<key>[0-9a-f]{64})"
    r"(-(?P<block>[0-9a-f]{64})-(?P<length>\d{1,9}))?-(?P<checksum>[0-9a-f]{8})\.safetensors"
)
UNFINISHED = re.compile(r"\.[0-9a-f]{64}\.\d+")
MAX_HEADER = 2**20  # bytes that a file may have in addition to its arrays
STALE_SECONDS = 3600  # an unfinished file of this age was left by a process that was killed


@dataclass
class File:
    """An entry's file: its name, its bytes, and the location of a checkpoint."""

    name: str
    size: int
    location: Location | None


class DiskCache:
    """The files of a folder, in least-recently-used order.

    Args:
        path: the folder. The files are in its subfolder `prefix`, which only this user can read.
        budget: the maximum total size of the files, in bytes.
        left_free: bytes that have to stay free on the disk.

    Raises:
        OutputError: the folder cannot be created or read.
    """

    def __init__(self, path: Path, budget: int, left_free: int) -> None:
        self._path = path / "prefix"
        self._budget = budget
        self._left_free = left_free
        self._files: OrderedDict[bytes, File] = OrderedDict()
        self._index = BlockIndex[int]()
        self._lock = threading.Lock()
        self._warned = False
        self._last: Future[None] | None = None
        try:
            self._path.mkdir(parents=True, exist_ok=True)
            self._path.chmod(0o700)
            self._scan()
            # The files that are here could make room, so their bytes count as free.
            self._fits(0, -sum(file.size for file in self._files.values()), warn=True)
        except OSError as error:
            raise OutputError.because(self._path, error) from error
        self._writer = ThreadPoolExecutor(1, "dflash-prefix", initializer=clean_up_at_end)

    def __contains__(self, key: bytes) -> bool:
        """Whether there is a file for this key, damaged or not."""
        return key in self._files

    def checkpoints_after(self, block: bytes) -> set[tuple[int, bytes]]:
        """The length and key of every checkpoint that follows a block."""
        with self._lock:
            return {(length, key) for key, length in self._index.after(block).items()}

    def read(self, key: bytes, expected: Arrays) -> Arrays | None:
        """Load an entry's arrays. Returns None if there is no file, or it was damaged and removed.

        Args:
            key: the key of the entry.
            expected: arrays with the names, shapes and types that the entry must have.
        """
        file = self._files.get(key)
        if file is None:
            return None
        path = self._path / file.name
        expected_size = sum(array.nbytes for array in expected.values())
        try:
            if check_file(path, OutputError) > expected_size + MAX_HEADER:
                raise ValueError("too large")
            data = path.read_bytes()
            if file.name != _name(key, file.location, data):
                raise ValueError("wrong checksum")
            loaded: Any = mx.load(io.BytesIO(data), format="safetensors", return_metadata=True)
            arrays: Arrays = loaded[0]
            metadata = loaded[1]
            if metadata.get("key") != key.hex() or _layout(arrays) != _layout(expected):
                raise ValueError("another entry")
            if not _all_finite(arrays):
                raise ValueError("not finite")
            mx.eval(arrays)
        except (OSError, OutputError, RuntimeError, ValueError):
            self.remove(key)
            return None
        return arrays

    def write(self, path: Sequence[bytes], new: Sequence[Entry] = ()) -> None:
        """Write new entries in the background, and mark all entries of a text as used.

        Args:
            path: the keys of the text's entries, in order.
            new: the entries that have no file yet. Their arrays are computed or being computed.
        """
        with suppress(RuntimeError):  # the program is ending
            self._last = self._writer.submit(self._write_all, path, new)

    def flush(self) -> None:
        """Wait until everything is written."""
        if self._last is not None:
            self._last.result()

    def remove(self, key: bytes) -> None:
        """Remove an entry's file."""
        with self._lock:
            self._remove(key)

    def _write_all(self, path: Sequence[bytes], new: Iterable[Entry]) -> None:
        """Write the entries and set the time of use of all files of the text."""
        try:
            for entry in new:
                if entry.key not in self and not self._write(entry, set(path)):
                    break  # later entries are useless without this one
        except OSError as error:
            self._warn(OutputError.because(self._path, error))
        now = time.time_ns()
        with self._lock:
            # The order in time is that of `OrderedDict`: the first block is used last, so that it
            # is evicted after the entries that need it.
            for index, key in enumerate(reversed(path)):
                if key in self._files:
                    self._files.move_to_end(key)
                    used_at = now + 1000 * index  # nanoseconds, a microsecond apart
                    try:
                        os.utime(self._path / self._files[key].name, ns=(used_at, used_at))
                    except OSError:  # another process removed it
                        self._remove(key)

    def _write(self, entry: Entry, needed: set[bytes]) -> bool:
        """Write an entry's file in one move; False if it was evicted or there is no room."""
        arrays = entry.arrays
        if arrays is None:
            return False
        buffer = io.BytesIO()
        mx.save_safetensors(buffer, arrays, {"key": entry.key.hex()})
        data = buffer.getbuffer()
        if not self._make_room(len(data), needed):
            return False
        name = _name(entry.key, entry.location, data)
        unfinished = self._path / f".{entry.key.hex()}.{os.getpid()}"
        try:
            opened = os.open(unfinished, os.O_CREAT | os.O_TRUNC | os.O_WRONLY, 0o600)
            with open(opened, "wb") as stream:
                stream.write(data)
            unfinished.replace(self._path / name)
        finally:
            unfinished.unlink(missing_ok=True)
        with self._lock:
            self._add(entry.key, File(name, len(data), entry.location))
        return True

    def _make_room(self, size: int, needed: set[bytes]) -> bool:
        """Remove the least recently used files, except `needed`, until `size` bytes fit."""
        with self._lock:
            held = sum(file.size for file in self._files.values())
            for key in [key for key in self._files if key not in needed]:
                if self._fits(held + size, size):
                    return True
                held -= self._files[key].size
                self._remove(key)
            return self._fits(held + size, size, warn=True)

    def _fits(self, total: int, size: int, warn: bool = False) -> bool:
        """Whether `size` new bytes fit on the disk, and all files, `total` bytes, in the budget.

        `warn` warns if the disk is too full.
        """
        free = shutil.disk_usage(self._path).free
        enough = free - size >= self._left_free
        if warn and not enough:
            self._warn(
                f"{self._path}: {free / 1e9:.1f} GB of the disk are free, and "
                f"{self._left_free / 1e9:.1f} GB have to stay free; choose another place."
            )
        return enough and total <= self._budget

    def _warn(self, why: object) -> None:
        """Say once why files are missing."""
        if not self._warned:
            self._warned = True
            warnings.warn(f"dflash-mlx: prefixes are not kept on disk: {why}", stacklevel=1)

    def _add(self, key: bytes, file: File) -> None:
        self._files[key] = file
        if file.location is not None:
            self._index.add(file.location.block, key, file.location.length)

    def _remove(self, key: bytes) -> None:
        file = self._files.pop(key, None)
        if file is not None:
            if file.location is not None:
                self._index.remove(file.location.block, key)
            with suppress(OSError):
                (self._path / file.name).unlink(missing_ok=True)

    def _scan(self) -> None:
        """Find the files of earlier processes, and remove unfinished ones."""
        files = []
        for item in os.scandir(self._path):
            try:
                match = NAME.fullmatch(item.name)
                status = item.stat(follow_symlinks=False)
            except FileNotFoundError:
                continue  # another process has just finished or removed it
            if match is not None:
                block = match["block"]
                location = None
                if block is not None:
                    location = Location(bytes.fromhex(block), int(match["length"]))
                file = File(item.name, status.st_size, location)
                files.append((status.st_mtime_ns, bytes.fromhex(match["key"]), file))
            elif UNFINISHED.fullmatch(item.name) and status.st_mtime < time.time() - STALE_SECONDS:
                Path(item.path).unlink(missing_ok=True)
        files.sort(key=lambda item: item[0])  # by time of last use
        for _, key, file in files:
            self._add(key, file)


def _layout(arrays: Arrays) -> dict[str, Any]:
    """The shape and type of each array."""
    return {name: (array.shape, array.dtype) for name, array in arrays.items()}


def _all_finite(arrays: Arrays) -> bool:
    """Whether no floating-point array contains NaN or an infinity."""
    checks = []
    for array in arrays.values():
        if mx.issubdtype(array.dtype, mx.floating):
            checks.append(mx.isfinite(array).all())
    return all(check.item() for check in checks)


def _name(key: bytes, location: Location | None, data: bytes | memoryview) -> str:
    """The name of an entry's file, with a checksum of its key and its contents."""
    digest = sha256(key)
    digest.update(data)
    checksum = digest.hexdigest()[:8]
    if location is None:
        return f"block-{key.hex()}-{checksum}.safetensors"
    place = f"{location.block.hex()}-{location.length}"
    return f"checkpoint-{key.hex()}-{place}-{checksum}.safetensors"
