"""A drafter's folder -> the network that its config and its tensors call for."""

from __future__ import annotations

from pathlib import Path

import mlx.core as mx
import mlx.nn as nn
import numpy as np
from mlx.utils import tree_flatten

from ..drafter.config import DraftConfig
from ..drafter.dspark import CONFIDENCE_ALONE, network_for
from ..drafter.network import DFlash
from ..drafter.packagings import CONFIDENCE, PACKAGINGS, our_name
from ..errors import ConfigError, WeightsError
from ..targets import Target
from .checkpoint import load_file
from .inspect import settle
from .weights import check_safetensors

CHUNK = 4096  # rows of an embedding that are compared at once


def read_drafter(folder: Path) -> DFlash:
    """The drafter of a folder, its weights as they are stored and still on disk.

    Raises: `ConfigError`, `WeightsError`.
    """
    config = DraftConfig.from_file(folder / "config.json")
    if config.unreadable is not None:
        raise ConfigError(f"{folder / 'config.json'}: {config.unreadable}: it cannot be read.")
    weights = _named_as_ours(_tensors(folder), config)
    config = settle(config, {name: tuple(tensor.shape) for name, tensor in weights.items()})
    parts = set(weights)
    if weights.get(CONFIDENCE, mx.zeros((1, 0))).shape[-1] == config.hidden_size:
        parts.add(CONFIDENCE_ALONE)
    drafter = network_for(config)(config, parts)
    if config.quantization is not None:
        _quantize_as_stored(drafter, config, weights)
    _check_tensors(drafter, weights, folder)
    if "d2t" in weights:
        _check_ids(weights["d2t"], config.vocab_size, folder)
    drafter.load_weights(list(weights.items()))
    return drafter


def drop_copies(drafter: DFlash, target: Target) -> list[str]:
    """Have a drafter borrow what it brings and the target has, too; returns what that was.

    Some publishers store frozen copies of the target's embedding and head. Heads are compared by
    what they make of a few random states: two linear maps that agree on those are the same.
    """
    dropped: list[str] = []
    if target.hidden_size != drafter.config.hidden_size:
        return dropped
    if (
        "embed_tokens" in drafter
        and drafter.config.tie_word_embeddings
        and "lm_head" not in drafter
    ):
        return dropped  # its embedding is its head
    if "embed_tokens" in drafter and _same_embedding(drafter, target):
        del drafter["embed_tokens"]
        dropped.append("embedding")
    if "lm_head" in drafter and "d2t" not in drafter:
        states = mx.random.normal((1, 4, target.hidden_size), key=mx.random.key(0))
        theirs, ours = target.head(states), drafter.lm_head(states)
        if theirs.shape == ours.shape and _close(theirs, ours):
            del drafter["lm_head"]
            dropped.append("head")
    return dropped


def _same_embedding(drafter: DFlash, target: Target) -> bool:
    vocabulary = drafter.config.vocab_size
    if vocabulary != target.vocab_size:
        return False
    for start in range(0, vocabulary, CHUNK):
        ids = mx.arange(start, min(start + CHUNK, vocabulary))[None]
        if not mx.array_equal(target.embed(ids), drafter.embed_tokens(ids)):
            return False
    return True


def _close(a: mx.array, b: mx.array) -> bool:
    return bool((mx.abs(a - b).max() <= 1e-5 * mx.abs(a).max()).item())


def _named_as_ours(weights: dict[str, mx.array], config: DraftConfig) -> dict[str, mx.array]:
    """The tensors that are computed with, under our names."""
    packaging = PACKAGINGS[config.packaging]
    named = ((our_name(packaging, name), tensor) for name, tensor in weights.items())
    return {name: tensor for name, tensor in named if name is not None}


def _check_ids(offsets: mx.array, vocabulary: int, folder: Path) -> None:
    """Raise `WeightsError` unless each token that can be drafted is another one of the target's."""
    ids = np.array(offsets).astype(np.int64) + np.arange(len(offsets))
    if ids.min() < 0 or ids.max() >= vocabulary or len(np.unique(ids)) < len(ids):
        raise WeightsError(
            f"{folder}: the tensor d2t does not name {len(ids)} different tokens of {vocabulary}."
        )


def _tensors(folder: Path) -> dict[str, mx.array]:
    """Every tensor of a folder by name; nothing but headers is read yet."""
    weights: dict[str, mx.array] = {}
    for file in check_safetensors(folder):
        weights.update(load_file(file))
    return weights


def _check_tensors(drafter: DFlash, weights: dict[str, mx.array], folder: Path) -> None:
    """Raise `WeightsError`, naming the tensor, unless the config calls for these tensors."""
    wrong = f"{folder}: the weights do not fit the config, the tensor"
    expected = dict(tree_flatten(drafter.parameters()))
    for name in sorted(expected.keys() ^ weights.keys()):
        problem = "is missing" if name in expected else "has no place in this drafter"
        raise WeightsError(f"{wrong} {name} {problem}.")
    for name, tensor in weights.items():
        if tensor.shape != expected[name].shape:
            raise WeightsError(f"{wrong} {name} is {tensor.shape} and not {expected[name].shape}.")


def _quantize_as_stored(drafter: DFlash, config: DraftConfig, weights: dict[str, mx.array]) -> None:
    """Give the layers that were stored quantized the shape their tensors have."""
    stored = dict(config.quantization or {})

    def predicate(name: str, module: nn.Module) -> bool | dict[str, object]:
        # A layer may have an entry of its own, as in mlx-lm's mixed quantizations.
        return f"{name}.scales" in weights and stored.get(name, True)

    nn.quantize(
        drafter,
        group_size=stored["group_size"],
        bits=stored["bits"],
        mode=stored.get("mode", "affine"),
        class_predicate=predicate,
    )
