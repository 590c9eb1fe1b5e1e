"""Reading the head for multi-token prediction of a target from a checkpoint.

mlx-lm's models drop the head's tensors. They are read from the target's own folder, or from another
one: conversions often leave them out. Where the head's decoder layer is stored differently from
mlx-lm's own (experts, MLA, FP8), the target's `sanitize` converts it as one of its layers.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

import mlx.core as mx

from ..drafter.mtp import LAYOUTS, HeadLayout, MTPHead
from ..drafter.networks import STANDALONE
from ..errors import WeightsError
from ..targets import Target
from ..validation import ErrorWrapper, text_config
from .folder import Folder, StoredTensor
from .reading import LOADING_ERRORS, load_as_stored, load_tensors, without_fp8

Config = dict[str, Any]

# Before a head's own prefix, in checkpoints of models with vision and in conversions.
_OUTER = ("", "model.", "language_model.", "language_model.model.", "model.language_model.")
_HALFWAY = 0.5  # the mean of norms stored minus one is below it, that of others above


def head_tensors(folder: Folder, config: Config) -> dict[str, StoredTensor]:
    """The tensors in a folder that belong to the head of a target of this config.

    Returns:
        By the name after the layout's prefix. Empty if there is no head of the target's width.
    """
    layout = LAYOUTS.get(str(config.get("model_type")))
    if layout is None:
        return {}
    prefixes = ("",) if stands_alone(folder) else _starts(layout, config)
    tensors = {}
    for name, tensor in folder.every_tensor.items():
        for prefix in prefixes:
            if name.startswith(prefix):
                tensors[name.removeprefix(prefix)] = tensor
                break
    [fuse_name] = [theirs for theirs, ours in layout.names.items() if ours == "fc."]
    fuse_tensor = tensors.get(f"{fuse_name}weight")
    width = text_config(config).get("hidden_size")
    if fuse_tensor is None or fuse_tensor.shape[:1] != (width,):
        return {}
    return tensors


def head_shards(folder: Folder, config: Config) -> set[str]:
    """The files of a repository that hold the head of a target of this config, by its index.

    Empty if it has no such head.
    """
    layout = LAYOUTS.get(str(config["model_type"]))
    if layout is None or folder.index is None:
        return set()
    target_text = text_config(config)
    folder_text = text_config(folder.config)
    if any(target_text.get(key) != folder_text.get(key) for key in ("model_type", "hidden_size")):
        return set()
    prefixes = _starts(layout, config)
    return {file for name, file in folder.index.items() if name.startswith(prefixes)}


def _starts(layout: HeadLayout, config: Config) -> tuple[str, ...]:
    """What the names of the head's tensors may begin with."""
    return tuple(outer + _prefix(layout, config) for outer in _OUTER)


def stands_alone(folder: Folder) -> bool:
    """Whether a folder is a head that mlx-vlm split off: its names have no prefix.

    Its tensors are in MLX's form, so nothing is added to its norms.
    """
    kind = str(folder.config.get("model_type"))
    return kind.endswith(STANDALONE) and "fc.weight" in folder.every_tensor


def read_head(folder: Folder, target: Target) -> MTPHead:
    """The head of a target, its weights as stored and still on disk. Raises `WeightsError`."""
    tensors = head_tensors(folder, target.config)
    if not tensors:
        raise WeightsError(why_no_head(folder, target.config))
    layout = LAYOUTS[target.config["model_type"]]
    head = MTPHead(target, layout)
    stored = load_tensors(tensors)
    error_prefix = f"{folder.path}: the tensors of its MTP head cannot be read"
    with ErrorWrapper(WeightsError, error_prefix, LOADING_ERRORS):
        weights = dict(_ours(layout, without_fp8(stored), target))
    if layout.zero_centred and not stands_alone(folder):
        _centre(weights)
    load_as_stored(
        head,
        weights=weights,
        error_prefix=f"{folder.path}: of its MTP head,",
        published=lambda name: _published(layout, name, target.config),
    )
    return head


def why_no_head(folder: Folder, config: Config) -> str:
    """Why a folder has no head for a target of this config, and what to do."""
    kind = str(config.get("model_type"))
    if kind not in LAYOUTS:
        return f"MTP heads of {kind} cannot be read, only those of {', '.join(LAYOUTS)}."
    return (
        f"{folder.path} has no MTP head for this target: there is no tensor "
        f"{_prefix(LAYOUTS[kind], config)}*. Conversions leave it out: name the folder or "
        "repository of the original as the drafter."
    )


def _prefix(layout: HeadLayout, config: Config) -> str:
    """The beginning of the head's tensors' names."""
    return layout.prefix.format(N=text_config(config).get("num_hidden_layers"))


def _published(layout: HeadLayout, name: str, config: Config) -> str:
    """A tensor's name in the checkpoint, from ours."""
    for theirs, ours in layout.names.items():
        if ours is not None and name.startswith(ours):
            return _prefix(layout, config) + theirs + name.removeprefix(ours)
    return name


def _ours(
    layout: HeadLayout, stored: Mapping[str, mx.array], target: Target
) -> Iterator[tuple[str, mx.array]]:
    """The tensors by our names, those of decoder layers in mlx-lm's form."""
    layers: dict[str, dict[str, mx.array]] = {}
    for name, tensor in stored.items():
        # The prefix in the layout that the name begins with; the whole name if there is none.
        theirs = next(start for start in (*layout.names, name) if name.startswith(start))
        ours = layout.names.get(theirs)
        if theirs not in layout.names:
            yield name, tensor
        elif ours is not None and ours.startswith("layers"):
            _, layer, inner_name = (ours + name.removeprefix(theirs)).split(".", 2)
            layers.setdefault(layer, {})[inner_name] = tensor
        elif ours is not None:
            yield ours + name.removeprefix(theirs), tensor
    for layer, tensors in layers.items():
        matrices = {inner_name: tensor for inner_name, tensor in tensors.items() if tensor.ndim > 1}
        vectors = {inner_name: tensor for inner_name, tensor in tensors.items() if tensor.ndim < 2}
        for inner_name, tensor in {**_sanitized(matrices, target), **vectors}.items():
            yield f"layers.{layer}.{inner_name}", tensor


def _sanitized(tensors: Mapping[str, mx.array], target: Target) -> dict[str, mx.array]:
    """A layer's matrices in mlx-lm's form: converted as if they were the target's last layer."""
    backbone = "backbone" if target.config["model_type"] == "nemotron_h" else "model"
    layer_name = f"layers.{target.num_layers - 1}."
    weights = {f"{backbone}.{layer_name}{name}": tensor for name, tensor in tensors.items()}
    model: Any = target.model
    return {
        name.partition(layer_name)[2]: tensor for name, tensor in model.sanitize(weights).items()
    }


def _centre(weights: dict[str, mx.array]) -> None:
    """Add one to the weights of norms, if they are stored minus one as in Qwen's own files."""
    norms = [name for name, tensor in weights.items() if tensor.ndim == 1 and "norm" in name]
    means = [weights[name].astype(mx.float32).mean() for name in norms]
    if norms and (mx.stack(means).mean() < _HALFWAY).item():
        weights |= {name: weights[name] + 1 for name in norms}
