"""Fine-tunes of a model: adapters of `mlx_lm.lora`, and LoRA or DoRA as PEFT stores them.

PEFT's format: huggingface.co/docs/peft, "PEFT checkpoint format". Its `lora_A` [r, in] and `lora_B`
[out, r] are mlx-lm's `lora_a` and `lora_b` transposed, and its scale is alpha / r.
"""

from __future__ import annotations

import math
import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import mlx.core as mx
import mlx.nn as nn
from mlx.utils import tree_flatten, tree_unflatten

from ..errors import ModelNotFoundError, WeightsError
from ..validation import (
    PATH_ERRORS,
    ErrorWrapper,
    brief,
    is_positive,
    path_kind,
    read_json,
    user_path,
)
from .contents import ADAPTER, ADAPTER_CONFIG, read_contents
from .folder import StoredTensor, read_tensors_of_file
from .hub import Hub
from .reading import LOADING_ERRORS, load_file, on_cpu
from .registry import Name, as_name

FILE = "adapters.safetensors"
PEFT_FILE = "adapter_model.safetensors"
_PARTS = ("lora_a", "lora_b", "m")  # the tensors of an adapted layer in mlx-lm
_KINDS = ("lora", "dora", "full")
_OUTER = "base_model.model."  # begins the names of PEFT's tensors
# The end of a PEFT tensor's name -> the tensor of mlx-lm's adapted layer.
_PEFT_PARTS = {
    "lora_A.weight": "lora_a",
    "lora_B.weight": "lora_b",
    "lora_embedding_A": "lora_a",  # of an adapted embedding, like the next
    "lora_embedding_B": "lora_b",
    "lora_magnitude_vector": "m",
    "lora_magnitude_vector.weight": "m",
}
# PEFT's settings that make another computation than LoRA's or DoRA's, unless they are falsy.
_OTHER_SETTINGS = ("fan_in_fan_out", "lora_bias", "layer_replication", "alora_invocation_tokens")
# Initial weights for which PEFT changes the base model's own.
_CHANGED_BASES = ("pissa", "olora", "corda", "loftq", "lora_ga")


@dataclass(frozen=True)
class Adapter:
    """A fine-tune: its folder, its adapter_config.json and what its weights' header says."""

    folder: Path
    config: dict[str, Any]
    stored: Mapping[str, StoredTensor]

    @property
    def is_peft(self) -> bool:
        """Whether PEFT wrote it."""
        return "peft_type" in self.config

    def add_to(self, name: str, model: nn.Module) -> None:
        """Add its layers to a target, in place.

        Raises `WeightsError` if it was made for another model, or is incomplete.
        """
        error_prefix = f"{self.folder}: this adapter does not fit {name}"
        with ErrorWrapper(WeightsError, error_prefix, LOADING_ERRORS):
            if self.is_peft:
                _add_peft(self, error_prefix, model)
            else:
                self._add_mlx_lm(error_prefix, model)
        if on_cpu():
            model.set_dtype(mx.float32)
        model.eval()  # no dropout

    def _add_mlx_lm(self, error_prefix: str, model: nn.Module) -> None:
        """Add layers that mlx_lm.lora stored. Raises `WeightsError` for one that is missing."""
        # Imported only here, because it imports mlx-lm's trainer as well.
        from mlx_lm.tuner.utils import load_adapters

        load_adapters(model, str(self.folder))
        if self.config.get("fine_tune_type") == "full":
            return
        for path, _ in tree_flatten(model.parameters()):
            if path.rpartition(".")[2] in _PARTS and path not in self.stored:
                raise WeightsError(f"{error_prefix} (the tensor {path} is missing).")


def find_adapter(name: Name, hub: Hub) -> Adapter:
    """Find the adapter in a folder, or in a repository, which is downloaded.

    Raises: `ModelNotFoundError`, `DownloadError`, `ConfigError`, `WeightsError`, `SettingsError`.
    """
    name = as_name(name)
    with ErrorWrapper(ModelNotFoundError, f"No adapter {brief(name)}", PATH_ERRORS):
        path = user_path(name)
        path_type = path_kind(path)
    if path_type is None:
        if name.count("/") != 1 or name.startswith((".", "/", "~")):
            raise ModelNotFoundError(f"No adapter {name!r}: there is no such folder.")
        path = hub.fetch(name, [FILE, PEFT_FILE]).path
    # The user may name the file of the weights instead of its folder.
    is_weights_file = path_type == "file" and (path.parent / ADAPTER_CONFIG).is_file()
    folder = path.parent if is_weights_file else path
    kind, words = read_contents(folder)
    if kind != ADAPTER or not folder.is_dir():
        raise ModelNotFoundError(
            f"{folder} is {words}, not an adapter: that is a folder with {ADAPTER_CONFIG} and "
            f"{FILE} (mlx_lm.lora) or {PEFT_FILE} (PEFT)."
        )
    config = read_json(folder / ADAPTER_CONFIG)
    is_peft = "peft_type" in config
    fine_tune_type = config.get("fine_tune_type", "lora")
    file_order = (PEFT_FILE, FILE) if is_peft else (FILE, PEFT_FILE)
    files = [file for file in file_order if (folder / file).exists()]
    if not files:
        raise ModelNotFoundError(f"{folder} is {words}, and there is no {file_order[0]} in it.")
    if is_peft:
        _check_peft(folder / ADAPTER_CONFIG, config)
    elif fine_tune_type not in _KINDS:
        raise WeightsError(
            f"{folder / ADAPTER_CONFIG}: fine_tune_type is {brief(fine_tune_type)}, not lora, "
            "dora or full."
        )
    return Adapter(folder, config, read_tensors_of_file(folder / files[0]))


# PEFT


def _check_peft(file: Path, config: Mapping[str, Any]) -> None:
    """Raise `WeightsError` for an adapter that is more than LoRA or DoRA."""
    kind = config["peft_type"]
    if kind != "LORA":
        raise WeightsError(f"{file}: peft_type is {brief(kind)}; only LORA can be loaded.")
    for setting in _OTHER_SETTINGS:
        if config.get(setting):
            raise WeightsError(f"{file}: {setting} is {brief(config[setting])}, which is not read.")
    initial = str(config.get("init_lora_weights")).lower()
    if initial.startswith(_CHANGED_BASES):
        raise WeightsError(
            f"{file}: init_lora_weights is {initial!r}, which changes the base model's weights; "
            "convert it to plain LoRA with PEFT (path_initial_model_for_weight_conversion)."
        )
    if not is_positive(config.get("lora_alpha")):
        raise WeightsError(f"{file}: lora_alpha is {brief(config.get('lora_alpha'))}.")


def _add_peft(adapter: Adapter, error_prefix: str, model: nn.Module) -> None:
    """Add PEFT's layers to a model, converted to mlx-lm's.

    Raises `WeightsError` for a tensor that belongs to no layer.
    """
    modules = dict(model.named_modules())
    files = {tensor.file for tensor in adapter.stored.values()}
    weights = {name: x for file in files for name, x in load_file(file).items()}
    parts: dict[str, dict[str, mx.array]] = {}
    saved: dict[str, mx.array] = {}
    for name, array in weights.items():
        inner = name.removeprefix(_OUTER)
        end = None  # of the name, such as lora_A.weight; None for a whole weight of the model
        for part in _PEFT_PARTS:
            if name.endswith(f".{part}"):
                end = part
        if end is None:
            layer_name, _, parameter = inner.rpartition(".")
        else:
            layer_name = inner.removesuffix(f".{end}")
        path = _path_in(modules, layer_name)
        if path is None:
            raise WeightsError(f"{error_prefix} (the tensor {name} has no place in it).")
        if end is not None:
            parts.setdefault(path, {})[_PEFT_PARTS[end]] = array.T if array.ndim > 1 else array
        else:  # PEFT's modules_to_save are trained and stored as a whole
            saved[f"{path}.{parameter}"] = array
    model.load_weights(list(saved.items()), strict=False)
    layers = [
        (path, _peft_layer(adapter.config, path=path, base=modules[path], parts=parts[path]))
        for path in parts
    ]
    model.update_modules(tree_unflatten(layers))


def _path_in(modules: Mapping[str, nn.Module], stem: str) -> str | None:
    """The path in mlx-lm's model of a module that transformers calls `stem`; None without one."""
    spellings = (
        stem,
        f"language_model.{stem}",
        f"model.{stem}",
        stem.replace("model.language_model.", "language_model.model.", 1),
        stem.replace("language_model.", "", 1),
    )
    return next((path for path in spellings if path in modules), None)


def _peft_layer(
    config: Mapping[str, Any], path: str, base: nn.Module, parts: Mapping[str, mx.array]
) -> nn.Module:
    """mlx-lm's layer around a base of a model, with an adapter's parts."""
    from mlx_lm.tuner.dora import DoRAEmbedding, DoRALinear
    from mlx_lm.tuner.lora import LoRAEmbedding, LoRALinear

    is_embedding = isinstance(base, nn.Embedding | nn.QuantizedEmbedding)
    if not is_embedding and not isinstance(base, nn.Linear | nn.QuantizedLinear):
        raise WeightsError(f"an adapter of {path}, a {type(base).__name__}, cannot be read")
    is_dora = "m" in parts
    layer_class: Any = DoRALinear if is_dora else LoRALinear
    if is_embedding:
        layer_class = DoRAEmbedding if is_dora else LoRAEmbedding
    for part in ("lora_a", "lora_b"):
        if part not in parts:
            raise WeightsError(f"{path} has no {part}")
    rank = parts["lora_a"].shape[-1]
    # A layer has an alpha of its own if a pattern matches its name.
    patterns = config.get("alpha_pattern") or {}
    alphas = [value for name, value in patterns.items() if re.fullmatch(rf"(.*\.)?({name})", path)]
    alpha = alphas[0] if alphas else config["lora_alpha"]
    divisor = math.sqrt(rank) if config.get("use_rslora") else rank
    scale = alpha / divisor
    layer: nn.Module = layer_class.from_base(base, r=rank, scale=scale)
    expected = dict(tree_flatten(layer.parameters()))
    for part, array in parts.items():
        shape = expected[part].shape
        if array.shape != shape:
            raise WeightsError(f"{path}.{part} is {array.shape} and not {shape}")
    layer.load_weights(list(parts.items()), strict=False)
    return layer
