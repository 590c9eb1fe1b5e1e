"""Blocks, checkpoints and tails of a prefix cache, and their keys.

A text is cut into blocks of equal length. The key of a block is a hash of the previous key and of
the block's tokens. The first key follows from a root key, which depends on the models, `kv_bits`
and the salt. So equal keys mean equal rows, in this process or an earlier one.
"""

from __future__ import annotations

import json
import os
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from hashlib import sha256
from importlib.metadata import version
from typing import Any, Generic, TypeVar

import mlx.core as mx
import mlx.nn as nn
import numpy as np
from mlx.utils import tree_flatten

from ..drafter.draft_model import DraftModel
from ..drafter.lookup_drafter import CombinedDrafter
from ..drafter.protocol import Drafter, SupportsSharing
from ..targets import Target, TargetSession
from ..targets.caches import Arrays, strip_prefix

FORMAT = 3  # version of the stored arrays and their keys
HASHED_BYTES = 2**26  # bytes of weights that a thread hashes at a time
Tokens = Sequence[int] | np.ndarray
Value = TypeVar("Value")
# Unsigned types by size in bytes, to read the bits of any array.
_UINT_OF_SIZE = {1: mx.uint8, 2: mx.uint16, 4: mx.uint32, 8: mx.uint64}


@dataclass(frozen=True)
class Location:
    """The position of a checkpoint: `length` tokens after a block, with `length` < block size."""

    block: bytes
    length: int


@dataclass
class Entry:
    """The rows of the tokens after a block, and what a session needs to start after them.

    The arrays share no memory with caches or other entries, so evicting an entry frees its bytes.

    Attributes:
        key: the key of the block, checkpoint or tail.
        arrays: contiguous arrays by session and name; None after eviction.
        block: the key of the previous block, or the root key.
        tokens: the tokens of its rows, uint32.
        is_block: True for a block, False for a checkpoint or tail.
    """

    key: bytes
    arrays: Arrays | None
    block: bytes
    tokens: np.ndarray
    is_block: bool

    @property
    def size(self) -> int:
        """The size of the arrays in bytes."""
        return sum(array.nbytes for array in (self.arrays or {}).values())

    @property
    def location(self) -> Location | None:
        """The position of a checkpoint; None for a block."""
        return None if self.is_block else Location(self.block, len(self.tokens))

    def shared(self, tokens: np.ndarray) -> int:
        """The number of leading tokens that the entry shares with `tokens`."""
        limit = min(len(tokens), len(self.tokens))
        equal = self.tokens[:limit] == tokens[:limit]
        return limit if equal.all() else int(equal.argmin())


class BlockIndex(Generic[Value]):
    """Entries by the key of the block that they follow."""

    def __init__(self) -> None:
        self._after: dict[bytes, dict[bytes, Value]] = {}

    def add(self, block: bytes, key: bytes, value: Value) -> None:
        """Add an entry that follows a block."""
        self._after.setdefault(block, {})[key] = value

    def remove(self, block: bytes, key: bytes) -> None:
        """Remove an entry."""
        entries = self._after[block]
        del entries[key]
        if not entries:
            del self._after[block]

    def after(self, block: bytes) -> dict[bytes, Value]:
        """A copy of the entries that follow a block."""
        return dict(self._after.get(block, {}))


def fingerprint(target: Target, drafter: Drafter | None) -> bytes:
    """A hash of everything that determines the rows of a pair: weights, configs, mlx-lm.

    It reads every byte of the weights because a fine-tuned model may differ in a single row.
    """
    mlx_lm = ".".join(version("mlx-lm").split(".")[:2])
    digest = sha256(f"dflash-mlx {FORMAT}, mlx-lm {mlx_lm}".encode())
    _add_model(digest, target.model, target.config)
    network = drafter.network if isinstance(drafter, CombinedDrafter) else drafter
    digest.update(type(drafter).__qualname__.encode())
    if isinstance(network, DraftModel):
        _add_model(digest, network.model.model, network.model.config)
    elif isinstance(network, nn.Module):
        _add_model(digest, network, repr(getattr(network, "config", None)))
    return digest.digest()


def root_key(pair: bytes, kv_bits: int | None, salt: str, size: int) -> bytes:
    """The key before the first block, for a pair's `fingerprint` and a block size in tokens.

    Requests with different `kv_bits` or salts share nothing.
    """
    return _hash(b"root", pair, json.dumps([kv_bits, salt, size]).encode())


def packed(ids: Tokens) -> np.ndarray:
    """Tokens as an array of uint32."""
    return np.asarray(ids, dtype="<u4")


class BlockKeys:
    """A growing text and the keys of its full blocks. Each block is hashed once.

    Args:
        root: the key before the first block.
        size: the number of tokens in a block.
        ids: the tokens so far.

    Attributes:
        path: the root key, then the keys of the full blocks.
        text: the tokens, uint32.
    """

    def __init__(self, root: bytes, size: int, ids: Tokens = ()) -> None:
        self._size = size
        self.path = [root]
        self.text = packed(())
        self.read(ids)

    def read(self, ids: Tokens) -> None:
        """Extend the text to `ids`, which begins with the tokens so far."""
        self.text = np.concatenate([self.text, packed(ids[len(self.text) :])])
        # With the root key, `path` has one key more than there are blocks: the next one ends here.
        for end in range(len(self.path) * self._size, len(self.text) + 1, self._size):
            block = self.text[end - self._size : end].tobytes()
            self.path.append(_hash(b"block", self.path[-1], block))

    def cut(self, length: int) -> None:
        """Forget all tokens but the first `length`."""
        self.text = self.text[:length]
        del self.path[1 + length // self._size :]  # 1 for the root key


def checkpoint_key(block: bytes, tail: Tokens) -> bytes:
    """The key of a checkpoint after a block and the tokens in `tail`, fewer than a block."""
    return _hash(b"checkpoint", block, packed(tail).tobytes())


def copy_rows(target: TargetSession, drafter: SupportsSharing, start: int, end: int) -> Arrays:
    """A copy of the rows of both sessions from `start` to `end`."""
    rows = _named("target.rows.", target.rows(start, end))
    return rows | _named("draft.rows.", drafter.rows(start, end))


def copy_state(target: TargetSession, drafter: SupportsSharing) -> Arrays:
    """A copy of the states of both sessions at their position."""
    return _named("target.state.", target.state()) | _named("draft.state.", drafter.state())


class Layout:
    """The names, shapes and types of what a pair stores, as arrays that are never computed.

    Args:
        target, drafter: new sessions, which cannot be used for anything else afterwards.
        length: the number of tokens in the text.
        size: the number of tokens in a block.
    """

    def __init__(
        self, target: TargetSession, drafter: SupportsSharing, length: int, size: int
    ) -> None:
        self._target = target
        self._drafter = drafter
        self._skipped = 0
        if target.is_recurrent:
            # A recurrent state has the same shape at every position, but its graph may have a node
            # per token.
            self._skipped = max(0, length // size - 1) * size
        taps = target.dry_run(length - self._skipped)
        drafter.dry_run(mx.zeros((1, length, taps.shape[2]), taps.dtype))

    def arrays(self, start: int, end: int, checkpoint: bool) -> Arrays:
        """The arrays of the tokens from `start` to `end`.

        With `checkpoint`, these are the last tokens of the text, and the states are included.
        """
        arrays: Arrays = {}
        if start < end:
            target_start = max(0, start - self._skipped)
            target_rows = self._target.rows(target_start, target_start + end - start)
            arrays |= _named("target.rows.", target_rows)
            arrays |= _named("draft.rows.", self._drafter.rows(start, end))
        if checkpoint:
            arrays |= copy_state(self._target, self._drafter)
        return arrays


def restore(
    target: TargetSession,
    drafter: SupportsSharing,
    position: int,
    pieces: Sequence[Arrays],
    room: int,
) -> None:
    """Put the first `position` tokens of a text into new sessions.

    Args:
        target, drafter: new sessions.
        position: the number of tokens in the pieces.
        pieces: the arrays of blocks, then of a checkpoint if the pair needs one.
        room: the number of tokens that will follow soon.
    """
    session: TargetSession | SupportsSharing
    for name, session in (("target", target), ("draft", drafter)):
        rows = [strip_prefix(piece, f"{name}.rows.") for piece in pieces]
        session.restore(position, rows, strip_prefix(pieces[-1], f"{name}.state."), room)


def _named(prefix: str, arrays: Arrays) -> Arrays:
    return {f"{prefix}{name}": mx.contiguous(x) for name, x in arrays.items()}


def _hash(*parts: bytes) -> bytes:
    return sha256(b"".join(parts)).digest()


def _add_model(digest: Any, model: nn.Module, config: Any) -> None:
    digest.update(json.dumps(config, sort_keys=True, default=repr).encode())
    parts = []
    for name, array in sorted(tree_flatten(model.parameters())):
        bits = np.asarray(array.view(_UINT_OF_SIZE[array.dtype.size]))
        # Matrices may be stored by column. Hashing them in memory order avoids a copy.
        by_column = bits.flags.f_contiguous
        digest.update(f"{name} {array.shape} {array.dtype} {by_column}".encode())
        content = (bits.T if by_column else bits).reshape(-1).view(np.uint8)
        for start in range(0, len(content), HASHED_BYTES):
            parts.append(content[start : start + HASHED_BYTES])
    with ThreadPoolExecutor(os.cpu_count()) as threads:  # sha256 runs without the GIL
        for part in threads.map(lambda part: sha256(part).digest(), parts):
            digest.update(part)
