"""A drafter's folder -> what drafts: a network, a language model, or a part made for one target."""

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
from ..drafter.lookup import CombinedDrafter, LookupDrafter
from ..drafter.mtp import MTPHead
from ..drafter.networks import ASSISTANTS, EAGLE3, needs_target, network_for
from ..drafter.protocol import Drafter
from ..errors import ConfigError, SettingsError, WeightsError
from ..targets import Target
from ..threads import evaluate
from ..validation import ErrorWrapper
from .computed import model_of
from .folder import Folder, StoredTensor
from .inspect import our_tensors, settle
from .mtp import head_tensors, read_head, stands_alone, why_no_head
from .quantization import LARGE_DRAFTER, Quantization, is_quantized, stored_quantization
from .reading import (
    MLX_ERRORS,
    MODEL_ERRORS,
    check_not_quantized,
    load_as_stored,
    load_tensors,
    on_cpu,
    start_reading,
)
from .registry import LOOKUP, MTP, NONE
from .target import is_language_model, open_target

if TYPE_CHECKING:
    from ..kernels.modules import Kernels

# What a folder holds.
NETWORK = "network"
MODEL = "model"
HEAD = "head"
ASSISTANT = "assistant"
SAMPLE = 256  # rows of an embedding that are compared


def check_drafter(folder: Folder, model: nn.Module | None) -> None:
    """Refuse a drafter that is not understood, or that was made for another target.

    Args:
        folder: with its config.json.
        model: the target's, from `model_of`; None to check the drafter alone.

    Raises: `ConfigError`, `IncompatibleDrafterError`.
    """
    if is_language_model(folder.config):
        model_of(folder.name, folder.config)
        return
    if needs_target(folder.config):
        return
    config = _read_config(folder)
    for part in model.modules() if model else ():
        if isinstance(part, nn.Embedding):
            vocabulary, width = part.weight.shape
            config.check_fits(width, vocabulary, _depth_for(config, model))
            return


def _depth_for(config: DraftConfig, model: Any) -> int:
    """The number of layers to compare a drafter's with.

    A model that loops over its layers has as many caches as it runs layers.
    """
    caches = model.make_cache() if hasattr(model, "make_cache") else ()
    depths = [max(len(model.layers), len(caches)), len(model.layers)]
    return depths[config.num_target_layers == depths[1]]


def _read_config(folder: Folder) -> DraftConfig:
    """A network's config. Raises `ConfigError`."""
    file = str(folder.path / "config.json")
    config = DraftConfig.from_dict(folder.config, file)
    if config.unreadable is not None:
        raise ConfigError(f"{file}: {config.unreadable}: it cannot be read.")
    return config


@dataclass(frozen=True)
class DraftSource:
    """A drafter's folder, and what is in it.

    Attributes:
        name: as it was named.
        folder: where it is; of "mtp", the target's.
        kind: `NETWORK`, `MODEL`, `HEAD`, `ASSISTANT`, `LOOKUP` or `NONE`.
        target: the target's config.json.
        with_lookup: whether a lookup drafter joins it.
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
        """What a folder holds for a target. Raises `ConfigError`, `WeightsError`."""
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
        return cls(name, folder, kind, target, with_lookup)

    def check_settings(self, bits: int | None, window: int | None) -> None:
        """Raise `SettingsError` for a setting that it has no use for."""
        for setting, value, kinds in (
            ("draft_bits", bits, (NETWORK, MODEL, HEAD, ASSISTANT)),
            ("draft_window", window, (NETWORK,)),
        ):
            if value is not None and self.kind not in kinds:
                raise SettingsError(f"{setting} means nothing to {self.name}: leave it out.")

    @property
    def tensors(self) -> Sequence[StoredTensor]:
        """Its tensors, but for those that the target's memory counts, too."""
        shared = self.kind == HEAD and not stands_alone(self.folder)
        if shared or self.kind in (LOOKUP, NONE):
            return ()
        return [*self.folder.tensors.values()]

    def quantization_beside(self, target: Quantization | None) -> Quantization | None:
        """How it is quantized beside a target that is, on load or already; None to leave it.

        A head as the target. Others in 4 bits if they are large: drafts get cheaper, not worse.
        """
        if self.kind == HEAD:
            stored = any(
                name.endswith(".scales") for name in head_tensors(self.folder, self.target)
            )
            return None if stored else target or stored_quantization(self.target)
        if target is None and not is_quantized(self.target):
            return None
        size = sum(math.prod(tensor.shape) for tensor in self.tensors)
        return None if self.folder.is_quantized or size <= LARGE_DRAFTER else Quantization(4, 64)


def open_drafter(
    source: DraftSource,
    target: Target | None,
    quantization: Quantization | None,
    kernels: Kernels | None,
    window: int | None = None,
) -> Drafter | None:
    """Load what a source holds, and give its layers to our kernels.

    Only a network may be loaded without its target. `window` bounds the rows that it remembers.

    Raises: `ConfigError`, `WeightsError`, `NotEnoughMemoryError`, `SettingsError`,
        `IncompatibleDrafterError`.
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
        from .wiring import wire_drafter

        wire_drafter(drafter.model.model if isinstance(drafter, DraftModel) else drafter, kernels)
    if target is not None:
        drafter.check_fits(target)
        if isinstance(drafter, DFlash):
            drop_copies(drafter, target)
    return CombinedDrafter(drafter) if source.with_lookup else drafter


def _prepare(name: str, drafter: nn.Module, quantization: Quantization | None) -> None:
    """Quantize a drafter that is not, and read its weights into memory."""
    quantized = any("scales" in module for module in drafter.modules())
    check_not_quantized(name, quantization, quantized)
    with ErrorWrapper(WeightsError, f"{name}: the weights cannot be used", MLX_ERRORS):
        if quantized and on_cpu():
            # MLX's quantized products are slow on a CPU, and drafts do not change the text.
            dequantize_model(drafter)
        start_reading(name, drafter, quantization)
        evaluate(drafter)


def _read(
    source: DraftSource, target: Target | None, window: int | None
) -> DFlash | MTPHead | Gemma4Assistant:
    """The network, head or assistant of a source, its weights as stored and still on disk."""
    folder = source.folder
    wrong = f"{folder.path / 'config.json'}: no drafter can be made of it"
    with ErrorWrapper(ConfigError, wrong, MODEL_ERRORS):
        if target is None or source.kind == NETWORK:
            return read_drafter(folder, window, None if target is None else target.num_layers)
        if source.kind == HEAD:
            return read_head(folder, target)
        assistant = Gemma4Assistant(folder.config, target)
    weights = load_tensors(folder.tensors)
    weights.pop("lm_head.weight", None)  # the embedding once more
    load_as_stored(assistant, weights, f"{folder.path}: the weights do not fit the config,")
    return assistant


def read_drafter(
    folder: Folder, window: int | None = None, num_layers: int | None = None
) -> DFlash:
    """The network of a folder, its weights as stored and still on disk.

    Args:
        folder: with config.json and safetensors.
        window: bounds the rows that it remembers.
        num_layers: the target's, if it is known.

    Raises: `ConfigError`, `WeightsError`.
    """
    config = _read_config(folder).within(window).for_target(num_layers)
    found = our_tensors(folder, config)
    config = settle(config, found)
    weights = load_tensors(found)
    drafter = network_for(config)(config, weights)
    if config.kind == EAGLE3 and config.draft_vocab_size == config.vocab_size:
        weights.pop("d2t", None)  # all zeros, in some EAGLE-3 files
    load_as_stored(drafter, weights, f"{folder.path}: the weights do not fit the config,")
    if "d2t" in weights:
        offsets = np.array(weights["d2t"]).astype(np.int64)
        ids = {*(offsets + np.arange(len(offsets))).tolist()}
        vocabulary = config.vocab_size
        if len(ids) < len(offsets) or not ids <= {*range(vocabulary)}:
            count = f"{len(offsets)} different tokens of {vocabulary}"
            raise WeightsError(f"{folder.path}: the tensor d2t does not name {count}.")
    return drafter


def drop_copies(drafter: DFlash, target: Target) -> list[str]:
    """Have a drafter use the target's embedding and head instead of its own copies of them.

    Some publishers store such copies. Embeddings are compared by a sample of their rows, heads by
    their logits for a few random states. Returns what was dropped: "embedding", "head".
    """
    config = drafter.config
    dropped = list[str]()
    if target.hidden_size != config.hidden_size or config.vocab_size != target.vocab_size:
        return dropped
    own_head = "lm_head" in drafter
    own_embedding = "embed_tokens" in drafter
    if own_embedding and (own_head or not config.tie_word_embeddings):
        ids = mx.arange(0, config.vocab_size, max(1, config.vocab_size // SAMPLE))[None]
        scale = config.own_embedding_scale
        theirs = target.embed(ids)
        ours = drafter.embed_tokens(ids) * scale
        # Targets round their products with the scale in several ways.
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
