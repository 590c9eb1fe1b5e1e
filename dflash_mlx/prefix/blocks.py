"""Blocks, checkpoints and tails of a prefix cache, and their keys.

A text is cut into blocks of equal length. The key of a block is a hash of the key before it and of
the block's tokens; the first one hangs on a root key: the models, `kv_bits` and the salt. So equal
keys mean equal rows, in this process or an earlier one.
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
from ..drafter.lookup import CombinedDrafter
from ..drafter.protocol import Drafter, SupportsSharing
from ..targets import Target, TargetSession
from ..targets.caches import Arrays, strip_prefix

FORMAT = 3  # of the stored arrays and their keys
PART = 2**26  # bytes of weights that a thread hashes at once
Tokens = Sequence[int] | np.ndarray
Value = TypeVar("Value")
_BITS = {1: mx.uint8, 2: mx.uint16, 4: mx.uint32, 8: mx.uint64}  # by a number's bytes


@dataclass(frozen=True)
class Location:
    """The position of a checkpoint: `length` tokens after a block, fewer than a block has."""

    block: bytes
    length: int


@dataclass
class Entry:
    """The rows of some tokens behind a block, and what a session needs to start after them.

    The arrays share no memory with caches or other entries, so evicting an entry frees its bytes.

    Attributes:
        key: of the block, checkpoint or tail.
        arrays: contiguous, by session and name; None after eviction.
        block: the key of the block before it, or the root's.
        tokens: those of its rows, uint32.
        is_block: whether it is a block; else a checkpoint or a tail.
    """

    key: bytes
    arrays: Arrays | None
    block: bytes
    tokens: np.ndarray
    is_block: bool

    @property
    def size(self) -> int:
        """Bytes."""
        return sum(x.nbytes for x in (self.arrays or {}).values())

    @property
    def location(self) -> Location | None:
        """The position of a checkpoint; None for a block."""
        return None if self.is_block else Location(self.block, len(self.tokens))

    def shared(self, tokens: np.ndarray) -> int:
        """How many of these tokens it begins with."""
        most = min(len(tokens), len(self.tokens))
        same = self.tokens[:most] == tokens[:most]
        return most if same.all() else int(same.argmin())


class BlockIndex(Generic[Value]):
    """What stands behind each block, by its key."""

    def __init__(self) -> None:
        self._after: dict[bytes, dict[bytes, Value]] = {}

    def add(self, block: bytes, key: bytes, value: Value) -> None:
        """Add something behind a block."""
        self._after.setdefault(block, {})[key] = value

    def remove(self, block: bytes, key: bytes) -> None:
        """Remove it."""
        found = self._after[block]
        del found[key]
        if not found:
            del self._after[block]

    def after(self, block: bytes) -> dict[bytes, Value]:
        """A copy of what stands behind a block."""
        return dict(self._after.get(block, {}))


def fingerprint(target: Target, drafter: Drafter | None) -> bytes:
    """A hash of everything that determines the rows of a pair: weights, configs, mlx-lm.

    It reads every byte of the weights, on all cores: a fine-tune may differ in a single row.
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

    Requests with another `kv_bits` or salt share nothing.
    """
    return _hash(b"root", pair, json.dumps([kv_bits, salt, size]).encode())


def packed(ids: Tokens) -> np.ndarray:
    """Tokens as an array of uint32."""
    return np.asarray(ids, dtype="<u4")


class BlockKeys:
    """A text that grows, and the keys of its full blocks: each block is hashed once.

    Args:
        root: the key before the first block.
        size: tokens of a block.
        ids: the text so far.

    Attributes:
        path: the root's key, and those of the full blocks.
        text: the tokens, uint32.
    """

    def __init__(self, root: bytes, size: int, ids: Tokens = ()) -> None:
        self._size = size
        self.path = [root]
        self.text = packed(())
        self.read(ids)

    def read(self, ids: Tokens) -> None:
        """Add what is new of the whole text `ids`, which begins with the tokens so far."""
        self.text = np.concatenate([self.text, packed(ids[len(self.text) :])])
        for end in range(len(self.path) * self._size, len(self.text) + 1, self._size):
            block = self.text[end - self._size : end].tobytes()
            self.path.append(_hash(b"block", self.path[-1], block))

    def cut(self, length: int) -> None:
        """Forget all tokens but the first `length`."""
        self.text = self.text[:length]
        del self.path[1 + length // self._size :]


def checkpoint_key(block: bytes, tail: Tokens) -> bytes:
    """The key of a checkpoint some tokens, fewer than a block, after a block."""
    return _hash(b"checkpoint", block, packed(tail).tobytes())


def copy_rows(target: TargetSession, drafter: SupportsSharing, start: int, end: int) -> Arrays:
    """A copy of the rows of both sessions from `start` to `end`."""
    rows = _named("target.rows.", target.rows(start, end))
    return rows | _named("draft.rows.", drafter.rows(start, end))


def copy_state(target: TargetSession, drafter: SupportsSharing) -> Arrays:
    """A copy of the states of both sessions at their position."""
    return _named("target.state.", target.state()) | _named("draft.state.", drafter.state())


class Layout:
    """What a pair stores of a text: names, shapes and types, in arrays that are never computed.

    Args:
        target, drafter: new sessions, which are of no use afterwards.
        length: tokens of the text.
        size: tokens of a block.
    """

    def __init__(
        self, target: TargetSession, drafter: SupportsSharing, length: int, size: int
    ) -> None:
        self._target = target
        self._drafter = drafter
        self._skipped = 0
        if target.is_recurrent:
            # A recurrent state has one shape at all positions, but may take a node per token.
            self._skipped = max(0, length // size - 1) * size
        taps = target.dry_run(length - self._skipped)
        drafter.dry_run(mx.zeros((1, length, taps.shape[2]), taps.dtype))

    def arrays(self, start: int, end: int, checkpoint: bool) -> Arrays:
        """The arrays of the tokens from `start` to `end`, the text's last ones if a checkpoint."""
        found: Arrays = {}
        if start < end:
            first = max(0, start - self._skipped)
            found = _named("target.rows.", self._target.rows(first, first + end - start))
            found |= _named("draft.rows.", self._drafter.rows(start, end))
        return found | copy_state(self._target, self._drafter) if checkpoint else found


def restore(
    target: TargetSession,
    drafter: SupportsSharing,
    position: int,
    pieces: Sequence[Arrays],
    room: int,
) -> None:
    """Start new sessions with `position` tokens.

    Args:
        target, drafter: new sessions.
        position: tokens in the pieces.
        pieces: the arrays of blocks, then of a checkpoint, if the pair needs one.
        room: tokens that are about to follow.
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
        bits = np.asarray(array.view(_BITS[array.dtype.size]))
        # Matrices may lie by column. Hashing them as they lie needs no copy.
        by_column = bits.flags.f_contiguous
        digest.update(f"{name} {array.shape} {array.dtype} {by_column}".encode())
        content = (bits.T if by_column else bits).reshape(-1).view(np.uint8)
        parts += [content[start : start + PART] for start in range(0, len(content), PART)]
    with ThreadPoolExecutor(os.cpu_count()) as threads:  # sha256 runs without the GIL
        for part in threads.map(lambda part: sha256(part).digest(), parts):
            digest.update(part)
