"""A folder -> the network that its config and tensors describe, target or drafter."""

from __future__ import annotations

import sys
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, cast

import mlx.core as mx
import mlx.nn as nn
import numpy as np
from mlx.utils import tree_flatten
from mlx_lm.utils import load_model, load_tokenizer

from ..drafter.config import DraftConfig
from ..drafter.network import DFlash
from ..drafter.networks import EAGLE3, PACKAGINGS, network_for, our_name
from ..errors import ConfigError, ModelNotFoundError, WeightsError
from ..proposal import Proposal
from ..targets import Target
from ..targets.internals import classes_of
from ..validation import ErrorWrapper, read_json
from .checks import check_safetensors
from .computed import bounded, complete, spelled_for, words_of
from .inspect import settle
from .reading import SCALES, load_as_stored, load_file, without_fp8

SAMPLE = 256  # rows of an embedding that are compared


def read_target(name: str, folder: Path) -> tuple[nn.Module, dict[str, Any]]:
    """mlx-lm's model of a folder, its weights still on disk, and the config that it computes.

    Raises: `ConfigError`, `WeightsError`.
    """
    files = check_safetensors(folder)
    for file in files:
        load_file(file)  # so that an error about a file does not blame the config
    with ErrorWrapper(ConfigError, f"{folder / 'config.json'}: mlx-lm cannot load it"):
        config = spelled_for(read_json(folder / "config.json"))
        with TemporaryDirectory() as view:  # mlx-lm would read other files than the index's, too
            for file in (*files, *folder.glob("*.json")):
                Path(view, file.name).symlink_to(file.resolve())
            model, config = load_model(
                Path(view), lazy=True, model_config=config, get_model_classes=_reading_fp8
            )
        model.__dict__.pop("sanitize", None)
        complete(name, model, config)
        return model, bounded(name, model, config)


def _reading_fp8(config: dict[str, Any]) -> tuple[Any, Any]:
    """mlx-lm's classes of a config, 8-bit floats becoming 16-bit ones where its own leave them."""
    model_class, arguments = classes_of(config)

    def build(args: Any) -> nn.Module:
        model: Any = model_class(args)
        own = getattr(model, "sanitize", dict)
        if f"weight{SCALES}" not in words_of(model):
            model.sanitize = lambda weights: own(without_fp8(weights))
        return cast(nn.Module, model)

    return build, arguments


def read_tokenizer(folder: Path, config: dict[str, Any]) -> Any:
    """mlx-lm's tokenizer of a folder. Raises: `ModelNotFoundError`, `ConfigError`."""
    if not any((folder / name).exists() for name in ("tokenizer.json", "tokenizer.model")):
        raise ModelNotFoundError(f"{folder}: there is no tokenizer.json, the tokenizer is missing.")
    # Otherwise transformers asks at the terminal whether to run the model's own code, and warns
    # of texts that the target can read.
    extra = {"trust_remote_code": False, "model_max_length": sys.maxsize}
    with ErrorWrapper(ConfigError, f"{folder}: the tokenizer cannot be read"):
        return load_tokenizer(folder, extra, eos_token_ids=config.get("eos_token_id"))


def check_runs(target: Target) -> None:
    """Read two tokens and drop them, and raise if that fails or gives NaN.

    Raises `ConfigError`; `WeightsError` if weights are the cause.

    Some fields of a config, such as a number of experts, matter only in a forward.
    """
    wrong = f"{target.name}: the model that config.json describes does not run"
    with ErrorWrapper(ConfigError, wrong):
        session = target.start()
        for _ in session.prefill([0, 0]):
            pass
        logits, _ = session.verify(Proposal([0, 0]))
        broken = mx.isnan(logits).any().item()
        session.commit([0])
    if broken:
        if damaged := damaged_weights(target.model):
            raise WeightsError(f"{target.name}: {describe_damage(damaged)}. Download it again.")
        raise ConfigError(f"{wrong} (its logits are NaN).")


def damaged_weights(model: nn.Module) -> list[str]:
    """The names of parameters that hold NaN or infinity. Reads every weight."""
    return [
        name
        for name, value in tree_flatten(model.parameters())
        if mx.issubdtype(value.dtype, mx.floating) and not mx.isfinite(value).all().item()
    ]


def describe_damage(damaged: list[str]) -> str:
    """What `damaged_weights` found, in words."""
    return f"NaN or infinite weights in {damaged[0]}, {len(damaged)} tensors in all"


def read_drafter(folder: Path, window: int | None = None, num_layers: int | None = None) -> DFlash:
    """The drafter of a folder, its weights as stored and still on disk.

    Args:
        folder: with config.json and safetensors.
        window: bounds the rows that it remembers.
        num_layers: the target's, if it is known.

    Raises: `ConfigError`, `WeightsError`.
    """
    config = DraftConfig.from_file(folder / "config.json").within(window).for_target(num_layers)
    if config.unreadable is not None:
        raise ConfigError(f"{folder / 'config.json'}: {config.unreadable}: it cannot be read.")
    weights = _tensors(folder, config)
    config = settle(config, {name: tuple(tensor.shape) for name, tensor in weights.items()})
    drafter = network_for(config)(config, weights)
    if config.kind == EAGLE3 and config.draft_vocab_size == config.vocab_size:
        weights.pop("d2t", None)  # all zeros, in some EAGLE-3 files
    load_as_stored(drafter, weights, f"{folder}: the weights do not fit the config,")
    if "d2t" in weights:
        _check_ids(weights["d2t"], config.vocab_size, folder)
    return drafter


def drop_copies(drafter: DFlash, target: Target) -> list[str]:
    """Have a drafter use the target's embedding and head instead of its own copies of them.

    Some publishers store such copies. Embeddings are compared by a sample of their rows, heads by
    their logits for a few random states. Returns what was dropped: "embedding", "head".
    """
    config, dropped = drafter.config, list[str]()
    if target.hidden_size != config.hidden_size or config.vocab_size != target.vocab_size:
        return dropped
    own_head, own_embedding = "lm_head" in drafter, "embed_tokens" in drafter
    if own_embedding and (own_head or not config.tie_word_embeddings):
        ids = mx.arange(0, config.vocab_size, max(1, config.vocab_size // SAMPLE))[None]
        scale = config.own_embedding_scale
        theirs, ours = target.embed(ids), drafter.embed_tokens(ids) * scale
        # Targets round their products with the scale in several ways.
        if mx.allclose(theirs, ours, rtol=1e-2 if scale != 1 else 0, atol=0):
            del drafter["embed_tokens"]
            dropped.append("embedding")
    if own_head and "d2t" not in drafter:
        states = mx.random.normal((1, 4, target.hidden_size), key=mx.random.key(0))
        theirs, ours = target.head(states), drafter.lm_head(states)
        tolerance = 1e-5 * mx.abs(theirs).max()
        if theirs.shape == ours.shape and (mx.abs(theirs - ours).max() <= tolerance).item():
            del drafter["lm_head"]
            dropped.append("head")
    return dropped


def _tensors(folder: Path, config: DraftConfig) -> dict[str, mx.array]:
    """A drafter's tensors by our names, without those that decoding does not use."""
    packaging, weights = PACKAGINGS[config.packaging], dict[str, mx.array]()
    for file in check_safetensors(folder):
        for stored, tensor in load_file(file).items():
            name = our_name(packaging, stored)
            if name is not None:
                weights[name] = tensor
    return weights


def _check_ids(offsets: mx.array, vocabulary: int, folder: Path) -> None:
    """Raise `WeightsError` unless every draft token maps to a target token of its own."""
    ids = np.array(offsets).astype(np.int64) + np.arange(len(offsets))
    if ids.min() < 0 or ids.max() >= vocabulary or len(np.unique(ids)) < len(ids):
        raise WeightsError(
            f"{folder}: the tensor d2t does not name {len(ids)} different tokens of {vocabulary}."
        )
