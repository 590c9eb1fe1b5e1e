"""A drafter in a GGUF file, as llama.cpp's converter writes one: z-lab's DFlash, and DSpark.

The keys and tensors are those of github.com/ggml-org/llama.cpp (architecture `dflash`:
src/models/dflash.cpp). Such a file borrows the target's embedding and head unless it has its own.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import mlx.core as mx
import numpy as np

from ...errors import ConfigError, WeightsError
from .architectures import Fields
from .block_formats import GROUP, PACKINGS, is_readable, pack, unpack
from .header import Tensor, read_header

KIND = "dflash"
MARKOV = "markov_w1.weight"
_KEY = "tokenizer.ggml."
# A tensor's name in GGUF -> in our networks. {N} is the layer.
_TENSORS = {
    "token_embd.weight": "embed_tokens.weight",
    "output.weight": "lm_head.weight",
    "output_norm.weight": "norm.weight",
    "enc.output_norm.weight": "hidden_norm.weight",
    "fc.weight": "fc.weight",
    "d2t": "d2t",
    MARKOV: "markov_head.markov_w1.weight",
    "markov_w2.weight": "markov_head.markov_w2.weight",
    "blk.{N}.attn_norm.weight": "layers.{N}.input_layernorm.weight",
    "blk.{N}.attn_q.weight": "layers.{N}.self_attn.q_proj.weight",
    "blk.{N}.attn_k.weight": "layers.{N}.self_attn.k_proj.weight",
    "blk.{N}.attn_v.weight": "layers.{N}.self_attn.v_proj.weight",
    "blk.{N}.attn_output.weight": "layers.{N}.self_attn.o_proj.weight",
    "blk.{N}.attn_q_norm.weight": "layers.{N}.self_attn.q_norm.weight",
    "blk.{N}.attn_k_norm.weight": "layers.{N}.self_attn.k_norm.weight",
    "blk.{N}.ffn_norm.weight": "layers.{N}.post_attention_layernorm.weight",
    "blk.{N}.ffn_gate.weight": "layers.{N}.mlp.gate_proj.weight",
    "blk.{N}.ffn_up.weight": "layers.{N}.mlp.up_proj.weight",
    "blk.{N}.ffn_down.weight": "layers.{N}.mlp.down_proj.weight",
}
_LAYER = re.compile(r"(?<=^blk\.)\d+(?=\.)")
_CONFIDENCE = "conf_proj"  # its output is not used here


class DrafterConversion:
    """A file, the config.json of its drafter, and its weights by our names.

    Args:
        parts: the files that it is split into, or its only file.
        unpacked: float32 weights instead of the file's own bits.

    Attributes:
        config: config.json, as z-lab and SpecForge write it.

    Raises `WeightsError`, `ConfigError`.
    """

    def __init__(self, parts: Sequence[Path], unpacked: bool) -> None:
        self._path = parts[0]
        header = read_header(parts)
        kind = header.metadata.get("general.architecture")
        if kind != KIND:
            raise ConfigError(
                f"{self._path}: the drafter's architecture is {str(kind)[:40]!r}. Only "
                f"{KIND!r} can be read from GGUF: use the drafter's safetensors files instead."
            )
        self._unpacked = unpacked
        self._metadata = header.metadata
        self._sources = {
            self._our_name(name): tensor
            for name, tensor in header.tensors.items()
            if _CONFIDENCE not in name
        }
        for name, tensor in header.tensors.items():
            if not is_readable(tensor.type) and name != "d2t":
                raise ConfigError(
                    f"{self._path}: {name} is stored as {tensor.type.name}: not readable."
                )
        self.config = self._read_config(Fields(f"the drafter {self._path}", KIND, header))

    @property
    def size(self) -> int:
        """Bytes of the weights once loaded."""
        width = 4 if self._unpacked else 2
        sizes = (
            tensor.size if self._is_packed(name) else math.prod(tensor.shape) * width
            for name, tensor in self._sources.items()
        )
        return sum(sizes)

    def save_tokenizer(self, folder: Path) -> None:
        """Write nothing: a drafter uses its target's tokenizer."""

    def files(self) -> Iterator[dict[str, mx.array]]:
        """The weights under our names."""
        weights: dict[str, mx.array] = {}
        for name, tensor in self._sources.items():
            weights |= self._parameter(name, tensor)
        yield weights

    def _our_name(self, name: str) -> str:
        """Our name of a tensor. Raises `ConfigError` for one that our networks do not have."""
        layer = _LAYER.search(name)
        pattern = name if layer is None else _LAYER.sub("{N}", name, count=1)
        ours = _TENSORS.get(pattern)
        if ours is None:
            raise ConfigError(
                f"{self._path}: the tensor {name} is not understood. In GGUF, only drafters of "
                "the kinds DFlash and DSpark can be read; DFlash2 cannot."
            )
        if layer is None:
            return ours
        number = layer[0]  # `_LAYER` matches the digits only
        return ours.replace("{N}", number)

    def _read_config(self, fields: Fields) -> dict[str, Any]:
        """The config.json that the metadata and the tensors amount to. Raises `ConfigError`."""
        layers = fields("block_count")
        width = fields("embedding_length")
        heads = fields("attention.head_count")
        head_dim = fields("attention.key_length", width // heads)
        theta = fields("rope.freq_base", 10000.0)
        taps = fields("target_layers")
        vocabulary = fields("vocab_size", len(self._metadata.get(f"{_KEY}tokens", ())))
        mask = self._metadata.get(f"{_KEY}mask_token_id")
        if mask is None:
            raise ConfigError(f"{self._path}: {_KEY}mask_token_id is missing.")
        if not isinstance(taps, list) or not all(taps):
            raise fields.wrong("target_layers", taps)
        is_dspark = _TENSORS[MARKOV] in self._sources
        config = {
            "architectures": ["DSparkDraftModel" if is_dspark else "DFlashDraftModel"],
            "hidden_size": width,
            "num_hidden_layers": layers,
            "intermediate_size": fields("feed_forward_length"),
            "num_attention_heads": heads,
            "num_key_value_heads": fields("attention.head_count_kv", heads),
            "head_dim": head_dim,
            "rms_norm_eps": fields("attention.layer_norm_rms_epsilon"),
            "max_position_embeddings": fields("context_length"),
            "rope_theta": theta,
            "vocab_size": vocabulary,
            "block_size": fields("block_size"),
            # The file numbers the inputs of layers: input n is the output of layer n - 1.
            "dflash_config": {"mask_token_id": mask, "target_layer_ids": [n - 1 for n in taps]},
            "final_logit_softcapping": fields("final_logit_softcapping", None),
            "logit_scale": fields("logit_scale", None),
            **self._read_windows(fields, layers),
        }
        scaling = fields.scaling(head_dim, theta)
        if scaling:
            config["rope_scaling"] = {"rope_type": scaling.pop("type", None), **scaling}
        if is_dspark:
            config["markov_rank"] = self._sources[_TENSORS[MARKOV]].shape[-1]
            config["sample_from_anchor"] = fields("sample_from_anchor", True)
        if "d2t" in self._sources:
            config["draft_vocab_size"] = self._sources["d2t"].shape[0]
        if any(self._is_packed(name) for name in self._sources):
            # The shapes of a layer's tensors say its own bits.
            config["quantization"] = {"group_size": GROUP, "bits": 4}
        return {name: value for name, value in config.items() if value is not None}

    def _read_windows(self, fields: Fields, layers: int) -> dict[str, Any]:
        """The config's fields for sliding windows; empty if there are none."""
        window = fields("attention.sliding_window", 0)
        if not window:
            return {}
        slides = fields.by_layer("attention.sliding_window_pattern", layers)
        kinds = ["sliding_attention" if slide else "full_attention" for slide in slides]
        return {"sliding_window": window, "layer_types": kinds}

    def _is_packed(self, name: str) -> bool:
        """Whether a matrix keeps the file's bits; an embedding, a head and its bias do not."""
        tensor = self._sources[name]
        is_layer = name.startswith("layers.") or name == "fc.weight"
        return not self._unpacked and is_layer and tensor.type in PACKINGS

    def _parameter(self, name: str, tensor: Tensor) -> dict[str, mx.array]:
        """A parameter by its name, or its quantized parts."""
        # The file has the id of each drafted token. Ours is its distance from the token's index.
        if name == "d2t":
            width = tensor.size // math.prod(tensor.shape)
            tokens = tensor.blocks().view({4: np.int32, 8: np.int64}[width]).reshape(-1)
            return {name: mx.array((tokens - np.arange(len(tokens))).astype(np.int32))}
        if self._is_packed(name):
            parts = pack(tensor.blocks(), tensor.type)
        else:
            parts = {"": unpack(tensor.blocks(), tensor.type)}
        arrays = {}
        for part, array in parts.items():
            value = mx.array(array.reshape(*tensor.shape[:-1], -1))
            if part == "" and not self._unpacked:
                value = value.astype(mx.float16)
            arrays[name.removesuffix("weight") + part if part else name] = value
        mx.eval(arrays)
        if not all(
            mx.isfinite(value).all().item() for value in arrays.values() if _is_float(value)
        ):
            raise WeightsError(f"{self._path}: NaN or infinite weights in {name}.")
        return arrays


def _is_float(value: mx.array) -> bool:
    return bool(mx.issubdtype(value.dtype, mx.floating))
