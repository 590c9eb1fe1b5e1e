"""Names for what was read: a hash of the model, and of every token up to the end of a chunk.

Chunk i of a text is named by chunk i - 1 and by its own tokens, chunk 0 by the *root*: the pair,
how keys and values are kept, and who may share. So equal names are equal rows, whoever read them,
in this process or in one before it.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from hashlib import sha256
from importlib.metadata import version
from typing import Any

import mlx.core as mx
import mlx.nn as nn
import numpy as np
from mlx.utils import tree_flatten

from ..drafter.combined import CombinedDrafter
from ..drafter.protocol import Drafter
from ..targets import Target

VERSION = 1  # of what is stored and of how it is named
SAMPLE = 1024  # numbers of an array that its fingerprint looks at


def fingerprint(target: Target, drafter: Drafter | None) -> bytes:
    """A hash of what decides about the rows of a pair: weights, configs, mlx-lm, this format.

    Of an array it takes name, shape, type and a sample of `SAMPLE` numbers, spread evenly: training
    changes nearly all of them, and billions need not be read.
    """
    mlx_lm = ".".join(version("mlx-lm").split(".")[:2])
    digest = sha256(f"dflash-mlx {VERSION}, mlx-lm {mlx_lm}".encode())
    _add_model(digest, target.model, target.config)
    network = drafter.network if isinstance(drafter, CombinedDrafter) else drafter
    digest.update(type(drafter).__qualname__.encode())
    if isinstance(network, nn.Module):
        _add_model(digest, network, repr(getattr(network, "config", None)))
    return digest.digest()


def root_key(pair: bytes, kv_bits: int | None, salt: str, size: int) -> bytes:
    """The key of no tokens at all.

    Args:
        pair: from `fingerprint`.
        kv_bits, salt: requests that differ in them share nothing.
        size: tokens of a chunk.
    """
    return _hash(b"root", pair, json.dumps([kv_bits, salt, size]).encode())


def chunk_keys(root: bytes, ids: Sequence[int], size: int) -> list[bytes]:
    """The keys of the whole chunks that these tokens begin with."""
    packed, keys, key = _packed(ids), [], root
    for end in range(size, len(ids) + 1, size):
        key = _hash(b"rows", key, packed[end - size : end].tobytes())
        keys.append(key)
    return keys


def mark_key(chunk: bytes, tail: Sequence[int]) -> bytes:
    """The key of the place some tokens, fewer than a chunk, after the end of a chunk."""
    return _hash(b"mark", chunk, _packed(tail).tobytes())


def _packed(ids: Sequence[int]) -> Any:
    return np.asarray(ids, dtype="<u4")


def _hash(*parts: bytes) -> bytes:
    return sha256(b"".join(parts)).digest()


def _add_model(digest: Any, model: nn.Module, config: Any) -> None:
    digest.update(json.dumps(config, sort_keys=True, default=repr).encode())
    for name, array in sorted(tree_flatten(model.parameters())):
        step = max(1, array.size // SAMPLE)
        sample = mx.contiguous(array.reshape(-1)[::step]).view(mx.uint8)
        digest.update(f"{name} {array.shape} {array.dtype}".encode())
        digest.update(np.asarray(sample).tobytes())
