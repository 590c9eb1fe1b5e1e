"""What a GGUF file is to mlx-lm: a config, and parameters made of the file's tensors."""

from __future__ import annotations

import math
import re
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import mlx.core as mx
import mlx.nn as nn
import numpy as np
from gguf import get_tensor_name_map
from gguf.constants import MODEL_ARCH_NAMES, GGMLQuantizationType
from mlx.utils import tree_flatten
from tqdm import tqdm

from ...errors import ConfigError, WeightsError
from ...validation import ErrorWrapper
from ..config_gaps import build_model
from ..contents import MODEL, read_contents
from ..reading import LOADING_ERRORS
from . import gguf_tokenizer
from .architectures import LONG, ROPE_DIVISORS, SHORT, architectures, read_config
from .block_formats import GROUP, PACKINGS, is_readable, pack, unpack
from .header import Tensor, read_header
from .layout import find_change, gguf_name, stored_shape

BYTES_PER_FILE = 1 << 30
EMBEDDING = "token_embd.weight"
HEAD = "lm_head.weight"
# Architectures whose activations are too large for half precision. (mlx-lm clips Gemma 3's.)
_WIDE = {"gemma2", "gemma4"}
_LAYER = re.compile(r"blk\.(\d{1,6})\.")


class Conversion:
    """A file, the model of mlx-lm that it is, and which tensor is which parameter.

    Args:
        parts: the files that the model is split into, or its only file.
        unpacked: float32 weights instead of the file's own bits.

    Attributes:
        header: the header of the file.
        config: the config.json of the model.

    Raises `WeightsError`, `ConfigError`.
    """

    def __init__(self, parts: Sequence[Path], unpacked: bool) -> None:
        path = parts[0]
        self._path = path
        self.header = read_header(parts)
        self._kind = str(self.header.metadata.get("general.architecture"))
        kind, words = read_contents(path)
        if kind != MODEL:
            raise ConfigError(f"{path}: {words}, not a model: name the model's file.")
        count = self.header.metadata.get("split.count", 1)
        if count > len(parts):
            raise WeightsError(
                f"{path}: one of {count} parts of a model under another name: name all parts as "
                f"NAME-00001-of-{count:05}.gguf, in one folder."
            )
        for name, tensor in self.header.tensors.items():
            if not is_readable(tensor.type):
                raise ConfigError(f"{path}: {name} is stored as {tensor.type.name}: not readable.")
        if EMBEDDING not in self.header.tensors:
            raise WeightsError(f"{path}: the tensor {EMBEDDING} is missing.")
        error_prefix = f"{path}: its metadata describes no model of mlx-lm"
        with ErrorWrapper(ConfigError, error_prefix, LOADING_ERRORS):
            self.config = read_config(path, self.header)
            self.config["eos_token_id"] = gguf_tokenizer.end_tokens(path, self.header.metadata)
            model = build_model(path, self.config)
        self._sources = self._find_sources(model)
        modules = dict(model.named_modules())
        self._packed: set[str] = set()
        if not unpacked:
            for name, (tensor, _) in self._sources.items():
                module = modules.get(name.removesuffix(".weight"))
                if tensor.type in PACKINGS and hasattr(module, "to_quantized"):
                    self._packed.add(name)
        self._casts = getattr(model, "cast_predicate", lambda name: True)
        if self._packed:
            self.config["quantization"] = self._quantization()
        # Half precision holds the scales of blocks as they are; floats alone may be bfloat16.
        bfloat = GGMLQuantizationType.BF16 in {tensor.type for tensor, _ in self._sources.values()}
        if self._kind in _WIDE or (bfloat and not self._packed):
            self._dtype = mx.bfloat16
        else:
            self._dtype = mx.float16
        if unpacked:
            self._dtype = mx.float32

    @property
    def size(self) -> int:
        """Bytes of the weights once loaded."""
        total = 0.0
        for name, (tensor, shape) in self._sources.items():
            stored_bytes = tensor.size / math.prod(tensor.shape)  # of a weight, in the file
            bytes_per_weight = stored_bytes if name in self._packed else self._dtype.size
            total += math.prod(shape) * bytes_per_weight
        return int(total)

    def save_tokenizer(self, folder: Path) -> None:
        """Write the tokenizer's files. Raises `ConfigError`."""
        gguf_tokenizer.save(self._path, self.header.metadata, folder)

    def files(self) -> Iterator[dict[str, mx.array]]:
        """The weights under mlx-lm's names, in groups for a file each."""
        weights: dict[str, mx.array] = {}
        title = f"Converting {self._path.name}"
        for name in tqdm(self._sources, title, leave=False, disable=None):
            weights |= self._parameter(name)
            if sum(array.nbytes for array in weights.values()) > BYTES_PER_FILE:
                yield weights
                weights = {}
        if weights:
            yield weights

    def _find_sources(self, model: nn.Module) -> dict[str, tuple[Tensor, tuple[int, ...]]]:
        """The tensor and the shape of every parameter. Raises `ConfigError`, `WeightsError`."""
        tensors = self.header.tensors
        sources = {}
        used = {ROPE_DIVISORS, LONG, SHORT}
        num_layers = self.config["num_hidden_layers"]
        architecture_by_name = {name: number for number, name in MODEL_ARCH_NAMES.items()}
        names = get_tensor_name_map(architecture_by_name[self._kind], num_layers)
        special_names = architectures()[self._kind].get("names", {})
        for name, parameter in tree_flatten(model.parameters()):
            suffixes = (".weight", ".bias", ".scale")
            stored_name = names.get_name(gguf_name(name, special_names), suffixes)
            source = stored_name if stored_name in tensors else f"{stored_name}.weight"
            if source not in tensors and name.endswith(HEAD):
                if hasattr(model, "tie_word_embeddings"):
                    continue  # mlx-lm's class shares the embedding by itself
                source = EMBEDDING
            if source not in tensors:
                raise WeightsError(f"{self._path}: the tensor {stored_name or name} is missing.")
            expected = stored_shape(name, parameter.shape, self._kind)
            if not _shapes_agree(tensors[source].shape, expected, parameter.size):
                shapes = f"{tensors[source].shape} and not {parameter.shape}"
                raise WeightsError(f"{self._path}: the tensor {source} is {shapes}.")
            sources[name] = tensors[source], parameter.shape
            used.add(source)
        shared = self.config.get("num_kv_shared_layers", 0)
        for name in tensors.keys() - used:
            match = _LAYER.match(name)
            layer = int(match[1]) if match else -1  # outside of the layers nothing may be left over
            in_mtp_head = layer >= num_layers
            shares_keys = layer >= num_layers - shared
            # Layers that share keys and values may have attention tensors that are not used.
            if not (in_mtp_head or (shares_keys and "attn_" in name)):
                raise ConfigError(f"{self._path}: the tensor {name} is not understood.")
        return sources

    def _quantization(self) -> dict[str, Any]:
        """The config's `quantization`: the most common one as a default, others by layer."""
        packings = {name: PACKINGS[self._sources[name][0].type] for name in sorted(self._packed)}
        settings = {
            name.removesuffix(".weight"): {
                "group_size": GROUP,
                "bits": packing.bits,
                "mode": packing.mode,
            }
            for name, packing in packings.items()
        }
        usual = max(settings.values(), key=list(settings.values()).count)
        return usual | {name: packing for name, packing in settings.items() if packing != usual}

    def _parameter(self, name: str) -> dict[str, mx.array]:
        """A parameter by its name, or its quantized parts."""
        result = {}
        (tensor, shape) = self._sources[name]
        if name in self._packed:
            parts = pack(tensor.blocks(), tensor.type)
        else:
            parts = {"": unpack(tensor.blocks(), tensor.type)}
        change = find_change(name, self.config, self._kind)
        shape = stored_shape(name, shape, self._kind)
        for part, array in parts.items():
            array = array.reshape(*shape[:-1], -1)
            value = mx.array(np.ascontiguousarray(change(array) if change else array))
            if mx.issubdtype(value.dtype, mx.floating) and self._casts(name):
                value = value.astype(self._dtype)
            result[name.removesuffix("weight") + part if part else name] = value
        mx.eval(result)
        return result


def _shapes_agree(stored: Sequence[int], expected: Sequence[int], size: int) -> bool:
    """Whether a tensor can be a parameter with `size` elements.

    Dimensions of 1 do not count, because files leave them out. A vector may be stored in rows.
    """
    stored = [length for length in stored if length > 1]
    expected = [length for length in expected if length > 1]
    return stored == expected or (len(expected) <= 1 and math.prod(stored) == size)
