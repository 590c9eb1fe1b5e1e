"""Loads a drafter from a folder: a network, a language model, or a part made for one target."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import mlx.core as mx
import mlx.nn as nn
import numpy as np
from mlx_lm.utils import dequantize_model

from ..drafter.config import DraftConfig
from ..drafter.dflash import DFlash
from ..drafter.draft_model import DraftModel
from ..drafter.gemma4_assistant import Gemma4Assistant
from ..drafter.lookup_drafter import CombinedDrafter, LookupDrafter
from ..drafter.mtp import MTPHead
from ..drafter.networks import ASSISTANTS, EAGLE3, needs_target, network_for
from ..drafter.protocol import Drafter
from ..errors import ConfigError, SettingsError, WeightsError
from ..targets import Target
from ..threads import evaluate
from ..validation import ErrorWrapper
from .config_gaps import build_model
from .drafter_fields import our_tensors, with_tensor_facts
from .folder import Folder, StoredTensor
from .mtp_loader import head_tensors, read_head, stands_alone, why_no_head
from .quantization import LARGE_DRAFTER, Quantization, is_quantized, stored_quantization
from .reading import (
    LOADING_ERRORS,
    MLX_ERRORS,
    check_not_quantized,
    load_as_stored,
    load_tensors,
    on_cpu,
    start_reading,
)
from .registry import LOOKUP, MTP, NONE
from .target_loader import is_language_model, open_target

if TYPE_CHECKING:
    from ..kernels.modules import Kernels

# Kinds of drafters.
NETWORK = "network"
MODEL = "model"
HEAD = "head"
ASSISTANT = "assistant"
# The number of embedding rows that are compared to find out whether two embeddings are the same.
COMPARED_ROWS = 256


def check_drafter(folder: Folder, model: nn.Module | None) -> None:
    """Refuse a drafter whose config is not understood, or that was made for another target.

    Args:
        folder: the folder of the drafter, which needs only a config.json.
        model: the target's model, from `build_model`; None to check only the drafter.

    Raises:
        ConfigError, IncompatibleDrafterError: it cannot be used.
    """
    if is_language_model(folder.config):
        build_model(folder.name, folder.config)
        return
    if needs_target(folder.config):
        return
    config = _read_config(folder)
    if model is None:
        return
    for part in model.modules():
        if isinstance(part, nn.Embedding):
            vocabulary, width = part.weight.shape
            config.check_fits(width, vocabulary, _depth_for(config, model))
            return


def _depth_for(config: DraftConfig, model: Any) -> int:
    """The number of target layers to check a drafter's config against.

    A model that loops over its layers has a cache for each time that it runs one. A config may
    count either the layers or the runs.
    """
    layers = len(model.layers)
    if config.num_target_layers == layers:
        return layers
    caches = model.make_cache() if hasattr(model, "make_cache") else ()
    return max(layers, len(caches))


def _read_config(folder: Folder) -> DraftConfig:
    """Read the config of a network. Raises `ConfigError`."""
    file = str(folder.path / "config.json")
    config = DraftConfig.from_dict(folder.config, file)
    if config.unreadable is not None:
        raise ConfigError(f"{file}: {config.unreadable}: it cannot be read.")
    return config


@dataclass(frozen=True)
class DraftSource:
    """Where a drafter comes from, and of which kind it is.

    Attributes:
        name: the name that the user gave.
        folder: its folder; for "mtp", that of the target.
        kind: `NETWORK`, `MODEL`, `HEAD`, `ASSISTANT`, `LOOKUP` or `NONE`.
        target: the config.json of the target.
        with_lookup: whether to add a lookup drafter.
    """

    name: str
    folder: Folder
    kind: str
    target: dict[str, Any]
    with_lookup: bool = False

    @classmethod
    def of(
        cls, name: str, folder: Folder, target: dict[str, Any], with_lookup: bool = False
    ) -> DraftSource:
        """Find out what a folder contains for a target. Raises `ConfigError`, `WeightsError`."""
        if name in (LOOKUP, NONE):
            kind = name
        elif head_tensors(folder, target):
            kind = HEAD
        elif name == MTP:
            raise WeightsError(why_no_head(folder, target))
        elif folder.config.get("model_type") in ASSISTANTS:
            kind = ASSISTANT
        else:
            kind = MODEL if is_language_model(folder.config) else NETWORK
        return cls(name, folder=folder, kind=kind, target=target, with_lookup=with_lookup)

    def check_settings(self, bits: int | None, window: int | None) -> None:
        """Raise `SettingsError` for a setting that this kind of drafter does not have."""
        unused = None
        if bits is not None and self.kind in (LOOKUP, NONE):
            unused = "draft_bits"
        elif window is not None and self.kind != NETWORK:
            unused = "draft_window"
        if unused is not None:
            raise SettingsError(f"{unused} means nothing to {self.name}: leave it out.")

    @property
    def tensors(self) -> Sequence[StoredTensor]:
        """The tensors of the drafter, except those that are counted with the target's."""
        in_target = self.kind == HEAD and not stands_alone(self.folder)
        if in_target or self.kind in (LOOKUP, NONE):
            return ()
        return list(self.folder.tensors.values())

    def default_quantization(self, target: Quantization | None) -> Quantization | None:
        """How to quantize the drafter if the user does not say; None for not at all.

        If the target is quantized, a head is quantized in the same way, and other drafters in 4
        bits if they are large: that makes drafting cheaper, and drafts hardly worse.

        Args:
            target: how the target is quantized on load.
        """
        if self.kind == HEAD:
            names = head_tensors(self.folder, self.target)
            if any(name.endswith(".scales") for name in names):
                return None
            return target or stored_quantization(self.target)
        if target is None and not is_quantized(self.target):
            return None
        size = sum(math.prod(tensor.shape) for tensor in self.tensors)
        if self.folder.is_quantized or size <= LARGE_DRAFTER:
            return None
        return Quantization(4, 64)


def open_drafter(
    source: DraftSource,
    target: Target | None,
    quantization: Quantization | None,
    kernels: Kernels | None,
    window: int | None = None,
) -> Drafter | None:
    """Load a drafter, and run its layers on our kernels.

    Args:
        source: where it comes from.
        target: the target. Only a network can be loaded without it.
        quantization: how to quantize the weights, None for not at all.
        kernels: our kernels, None to use only MLX's own.
        window: the maximum number of rows that it remembers.

    Raises:
        ConfigError, WeightsError, NotEnoughMemoryError, SettingsError,
        IncompatibleDrafterError.
    """
    if source.kind in (LOOKUP, NONE):
        return LookupDrafter() if source.kind == LOOKUP else None
    drafter: DraftModel | DFlash | MTPHead | Gemma4Assistant
    if source.kind == MODEL:
        drafter = DraftModel(open_target(source.folder, quantization))
    else:
        drafter = _read(source, target, window)
        _prepare(source.name, drafter, quantization)
    if kernels is not None:
        from .kernel_plan import use_drafter_kernels

        network = drafter.model.model if isinstance(drafter, DraftModel) else drafter
        use_drafter_kernels(network, kernels)
    if target is not None:
        drafter.check_fits(target)
        if isinstance(drafter, DFlash):
            drop_copies(drafter, target)
    return CombinedDrafter(drafter) if source.with_lookup else drafter


def _prepare(name: str, drafter: nn.Module, quantization: Quantization | None) -> None:
    """Quantize a drafter, if requested, and read its weights into memory."""
    quantized = any("scales" in module for module in drafter.modules())
    check_not_quantized(name, quantization, quantized)
    with ErrorWrapper(WeightsError, f"{name}: the weights cannot be used", MLX_ERRORS):
        if quantized and on_cpu():
            # MLX's quantized products are slow on a CPU.
            dequantize_model(drafter)
        start_reading(name, drafter, quantization)
        evaluate(drafter)


def _read(
    source: DraftSource, target: Target | None, window: int | None
) -> DFlash | MTPHead | Gemma4Assistant:
    """Make the network, head or assistant. Its weights are as stored, and not read yet."""
    folder = source.folder
    error_prefix = f"{folder.path / 'config.json'}: no drafter can be made of it"
    with ErrorWrapper(ConfigError, error_prefix, LOADING_ERRORS):
        if target is None or source.kind == NETWORK:
            return read_drafter(folder, window, None if target is None else target.num_layers)
        if source.kind == HEAD:
            return read_head(folder, target)
        assistant = Gemma4Assistant(folder.config, target)
    weights = load_tensors(folder.tensors)
    weights.pop("lm_head.weight", None)  # a copy of the embedding
    load_as_stored(assistant, weights, f"{folder.path}: the weights do not fit the config,")
    return assistant


def read_drafter(
    folder: Folder, window: int | None = None, num_layers: int | None = None
) -> DFlash:
    """Make the network of a folder. Its weights are as stored, and not read yet.

    Args:
        folder: a folder with a config.json and safetensors files.
        window: the maximum number of rows that the network remembers.
        num_layers: the number of layers of the target, if it is known.

    Raises:
        ConfigError, WeightsError: the config or the tensors cannot be used.
    """
    config = _read_config(folder).within(window).for_target(num_layers)
    tensors = our_tensors(folder, config)
    config = with_tensor_facts(config, tensors)
    weights = load_tensors(tensors)
    drafter = network_for(config)(config, weights)
    if config.kind == EAGLE3 and config.draft_vocab_size == config.vocab_size:
        weights.pop("d2t", None)  # some EAGLE-3 files have one with only zeros
    load_as_stored(drafter, weights, f"{folder.path}: the weights do not fit the config,")
    if "d2t" in weights:
        # For each token that can be drafted: its id in the vocabulary, minus its index here.
        offsets = np.array(weights["d2t"]).astype(np.int64)
        ids = set((offsets + np.arange(len(offsets))).tolist())
        vocabulary = config.vocab_size
        if len(ids) < len(offsets) or not ids <= set(range(vocabulary)):
            count = f"{len(offsets)} different tokens of {vocabulary}"
            raise WeightsError(f"{folder.path}: the tensor d2t does not name {count}.")
    return drafter


def drop_copies(drafter: DFlash, target: Target) -> list[str]:
    """Make a drafter use the target's embedding and head if its own are copies of them.

    Some publishers store such copies. Embeddings are compared by a sample of their rows, heads by
    their logits for a few random states.

    Returns:
        The dropped parts: "embedding", "head".
    """
    config = drafter.config
    dropped: list[str] = []
    if target.hidden_size != config.hidden_size or config.vocab_size != target.vocab_size:
        return dropped
    own_head = "lm_head" in drafter
    own_embedding = "embed_tokens" in drafter
    if own_embedding and (own_head or not config.tie_word_embeddings):
        stride = max(1, config.vocab_size // COMPARED_ROWS)
        ids = mx.arange(0, config.vocab_size, stride)[None]
        scale = config.own_embedding_scale
        theirs = target.embed(ids)
        ours = drafter.embed_tokens(ids) * scale
        # Targets round the scaled embedding in different ways.
        if mx.allclose(theirs, ours, rtol=1e-2 if scale != 1 else 0, atol=0):
            del drafter["embed_tokens"]
            dropped.append("embedding")
    if own_head and "d2t" not in drafter:
        states = mx.random.normal((1, 4, target.hidden_size), key=mx.random.key(0))
        theirs = target.head(states)
        ours = drafter.lm_head(states)
        tolerance = 1e-5 * mx.abs(theirs).max()
        if theirs.shape == ours.shape and (mx.abs(theirs - ours).max() <= tolerance).item():
            del drafter["lm_head"]
            dropped.append("head")
    return dropped
