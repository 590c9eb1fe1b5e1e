"""How a GGUF file stores the parameters of mlx-lm's models: their names, shapes and order.

llama.cpp's converter permutes, merges or changes some tensors; this undoes it.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from typing import Any

import numpy as np

Config = dict[str, Any]
Change = Callable[[np.ndarray, Config], np.ndarray]

# mlx-lm's names -> those that the gguf package knows.
_NAMES = (
    (r"^language_model\.", ""),
    (r"(mlp|block_sparse_moe)\.switch_mlp", "mlp.experts"),
    (r"linear_attn\.dt_bias", "linear_attn.dt_proj.bias"),
    (r"mixer\.dt_bias", "mixer.dt.bias"),
    ("e_score_correction_bias", "e_score_correction.bias"),
)
# Two parameters in one tensor: the axis along which they lie.
_SHARED = {"qwen3next": (r"in_proj_[ab]\.", 0), "gemma4": (r"switch_glu\.(gate|up)_proj\.", 1)}


def gguf_name(name: str, names: Mapping[str, str]) -> str:
    """The gguf package's name of a parameter of mlx-lm. `names`: a row's "names" in the table."""
    for ours, theirs in (*_NAMES, *names.items()):
        name = re.sub(ours, theirs, name)
    return name


def stored_shape(name: str, shape: tuple[int, ...], kind: str) -> tuple[int, ...]:
    """The shape of a parameter's tensor, which may also hold another parameter."""
    part, axis = _SHARED.get(kind, ("$^", 0))  # "$^" matches no name
    if not re.search(part, name):
        return shape
    return (*shape[:axis], 2 * shape[axis], *shape[axis + 1 :])


def find_change(name: str, config: Config, kind: str) -> Callable[[np.ndarray], np.ndarray] | None:
    """The function that turns a file's tensor into a parameter; None if they are the same."""
    for part, change in _CHANGES.get(kind, {}).items():
        if re.search(part, name):
            return lambda array: change(array, config)
    return None


def _by_halves(array: np.ndarray, heads: int) -> np.ndarray:
    """Undo llama.cpp's permutation of the rows [heads * head_dim, ...] of q and k.

    Its converter puts row i of a head's second half behind row i of the first. Whole rows move, so
    packed weights and their scales move alike.
    """
    pairs = array.reshape(heads, len(array) // heads // 2, 2, *array.shape[1:])
    return pairs.swapaxes(1, 2).reshape(array.shape)


def _by_key_head(
    array: np.ndarray, config: Config, axis: int = 0, after_keys: bool = False
) -> np.ndarray:
    """Undo llama.cpp's order of the value heads of linear attention.

    Its converter puts the first value head of each key head first, then the second of each.
    `after_keys`: queries and keys come before the values.
    """
    keys = config["linear_num_key_heads"]
    values = config["linear_num_value_heads"]
    start = 2 * keys * config["linear_key_head_dim"] if after_keys else 0
    array = np.moveaxis(array, axis, 0)
    moved = array[start:].reshape(values // keys, keys, -1, *array.shape[1:]).swapaxes(0, 1)
    moved = moved.reshape(-1, *array.shape[1:])
    return np.moveaxis(np.concatenate([array[:start], moved]), 0, axis)


def _of_key_heads(array: np.ndarray, config: Config, half: int) -> np.ndarray:
    """Half of the rows of each key head: 0 is Qwen3-Next's beta, 1 its alpha."""
    rows = array.reshape(config["linear_num_key_heads"], 2, -1, array.shape[-1])
    return rows[:, half].reshape(-1, array.shape[-1])


_PERMUTED: Mapping[str, Change] = {
    r"\.q_proj\.": lambda array, config: _by_halves(array, config["num_attention_heads"]),
    r"\.k_proj\.": lambda array, config: _by_halves(array, config["num_key_value_heads"]),
}
_PLUS_ONE: Mapping[str, Change] = {r"norm\.weight$": lambda array, config: array - 1}
_TILED: Mapping[str, Change] = {
    "in_proj_qkv|conv1d": lambda array, config: _by_key_head(array, config, after_keys=True),
    "in_proj_[zab]|dt_bias": _by_key_head,
    "A_log": lambda array, config: np.log(-_by_key_head(array, config)),
    r"linear_attn\.out_proj": lambda array, config: _by_key_head(array, config, axis=-1),
}
_A_LOG: Mapping[str, Change] = {"A_log": lambda array, config: np.log(-array)}
# What undoes a change of llama.cpp's converter, by parts of mlx-lm's names. It moves rows or
# columns, or computes where tensors are always floats.
_CHANGES = {
    "llama": _PERMUTED,
    "granite": _PERMUTED,
    "gemma2": _PLUS_ONE,
    "gemma3": _PLUS_ONE,
    "qwen3next": {
        r"in_proj_b\.": lambda array, config: _of_key_heads(array, config, 0),
        r"in_proj_a\.": lambda array, config: _of_key_heads(array, config, 1),
        **_A_LOG,
    },
    "qwen35": _TILED,
    "qwen35moe": _TILED,
    "gemma4": {
        r"switch_glu\.gate_proj\.": lambda array, config: np.split(array, 2, axis=1)[0],
        r"switch_glu\.up_proj\.": lambda array, config: np.split(array, 2, axis=1)[1],
    },
    "nemotron_h": _A_LOG,
    "nemotron_h_moe": _A_LOG,
}
