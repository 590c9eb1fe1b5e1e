"""All that this package touches in mlx-lm's models and that mlx-lm does not promise.

Kinds of caches and layers, functions that are private, the names that layers give to their parts,
and what is set or written inside of a cache: whoever needs one asks here, in place of spelling it.
tests/test_mlx_lm.py tries each against the mlx-lm that is installed; after an update that moved
something it fails there, under the name that it has here. (The layers that have kernels of ours are
named in `kernels`, below this package. What a forward of ours reads of the layer that it stands
for, as `mla` does, it reads itself, under the layer's names; the tests list them.)
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import mlx.core as mx
import mlx.nn as nn
from mlx_lm.models.base import scaled_dot_product_attention
from mlx_lm.models.cache import (
    ArraysCache,
    CacheList,
    KVCache,
    QuantizedKVCache,
    RotatingKVCache,
    make_prompt_cache,
)
from mlx_lm.models.deepseek_v3 import DeepseekV3Attention
from mlx_lm.models.deepseek_v32 import DeepseekV32Attention
from mlx_lm.models.deepseek_v41 import LayerCache, _window_indices
from mlx_lm.models.deepseek_v41 import _apply_rope as apply_rope
from mlx_lm.models.deepseek_v41 import _fake_quant_fp4 as fake_quant_fp4
from mlx_lm.models.gated_delta import compute_g, gated_delta_update, normalize_qk
from mlx_lm.models.qwen3_5 import GatedDeltaNet
from mlx_lm.models.qwen3_next import Qwen3NextGatedDeltaNet
from mlx_lm.utils import _get_classes as classes_of

__all__ = [
    "ArraysCache",
    "CacheList",
    "DeepseekV32Attention",
    "DeepseekV3Attention",
    "GatedDeltaNet",
    "KVCache",
    "LayerCache",
    "Qwen3NextGatedDeltaNet",
    "QuantizedKVCache",
    "RotatingKVCache",
    "apply_rope",
    "classes_of",
    "compute_g",
    "fake_quant_fp4",
    "gated_delta_update",
    "make_prompt_cache",
    "normalize_qk",
    "scaled_dot_product_attention",
]

# The names by which layers call what a verify gives them another function for.
ATTENTION = scaled_dot_product_attention.__name__
RECURRENCE = gated_delta_update.__name__

# Rotations whose angle depends on a row's own position alone, and which take one for each row.
ROPES = {"RoPE", "Llama3RoPE", "YarnRoPE", "SuScaledRoPE", "ProportionalRoPE"}

BACKBONE = ("embed_tokens", "layers", "norm")  # the parts of `backbone`


# A model and its layers


def text_model(model: nn.Module) -> Any:
    """The model that writes, in one that also sees images; else the model itself."""
    return getattr(model, "language_model", model)


def backbone(text: nn.Module) -> Any:
    """The part with the layers, between embedding and head; None where there is none."""
    return getattr(text, "model", None)


def own_layers(backbone: Any) -> list[nn.Module]:
    """The layers that are in this process: all, or those of its stage in a pipeline."""
    return list(getattr(backbone, "pipeline_layers", backbone.layers))


def first_layer(backbone: Any) -> int:
    """The number of the first of them."""
    return int(getattr(backbone, "start_idx", 0))


def has_pipeline(backbone: Any) -> bool:
    """Whether mlx-lm splits its layers over machines."""
    return hasattr(backbone, "pipeline")


def own_head(text: nn.Module) -> Any:
    """The output head; None where the embedding is the head too."""
    return getattr(text, "lm_head", None)


def embed_scale(backbone: nn.Module) -> float | None:
    """What embeddings are multiplied by before the first layer: sqrt(D) in Gemma's models."""
    return getattr(backbone, "embed_scale", None)


def attention_of(layer: nn.Module | None) -> Any:
    """A decoder layer's attention; None where it has a recurrence in its place."""
    return getattr(layer, "self_attn", None)


def mixer_of(layer: nn.Module | None) -> Any:
    """A decoder layer's Gated DeltaNet, or another recurrence; None where it has attention."""
    return getattr(layer, "linear_attn", None)


def has_key_projection(attention: nn.Module) -> bool:
    """Whether keys are projected per head, so that `head_size` and `key_heads` can be told."""
    return hasattr(attention, "k_proj")


def key_heads(attention: nn.Module) -> int:
    """Heads of keys; every family spells it differently."""
    names = ("n_kv_heads", "num_key_value_heads", "num_kv_heads")
    return int(next(getattr(attention, name) for name in names if hasattr(attention, name)))


def query_heads(attention: nn.Module) -> int:
    """Heads of queries."""
    names = ("n_heads", "num_attention_heads", "num_heads")
    return int(next(getattr(attention, name) for name in names if hasattr(attention, name)))


def head_size(attention: Any) -> int:
    """Numbers in one head's key, by the projection: there the families agree."""
    return int(attention.k_proj.weight.shape[0]) // key_heads(attention)


def has_sinks(attention: nn.Module) -> bool:
    """Whether its softmax has sinks, as gpt-oss's."""
    return "sinks" in attention


def is_mla(layer: nn.Module | None) -> bool:
    """Whether a decoder layer's cache holds latents, which only MLA can read."""
    return hasattr(attention_of(layer), "kv_lora_rank")


def sharding_group(mixer: Any) -> Any:
    """The machines that have the other heads of a Gated DeltaNet; None where this has them all."""
    return getattr(mixer, "sharding_group", None)


def has_indexer(attention: nn.Module) -> bool:
    """Whether MLA has an indexer, which picks what each query sees (DeepSeek-V3.2, GLM-5)."""
    return type(attention) is DeepseekV32Attention


def compression(attention: Any) -> int:
    """Rows that a DeepSeek-V4.1 layer pools into an entry; 0 for one that reads another's."""
    compressor = getattr(attention, "compressor", None)
    return 0 if compressor is None else int(compressor.ratio)


# Caches


def fields(cache: Any) -> dict[str, Any]:
    """What a cache consists of, by name: arrays, trees of them, positions. It is not a copy."""
    return vars(cache)


def end_of_ring(cache: RotatingKVCache) -> int:
    """Where the next row of a sliding window would be written."""
    return cache._idx


def cut_ring(cache: RotatingKVCache, rejected: int) -> None:
    """Forget the last rows of a sliding window whose rows are in temporal order."""
    end = cache._idx - rejected
    cache.keys, cache.values = cache.keys[..., :end, :], cache.values[..., :end, :]
    cache._idx = end
    cache.offset -= rejected


def in_temporal_order(cache: RotatingKVCache, rows: mx.array) -> mx.array:
    """A sliding window's rows [1, H, max_size, D] by position, as a step of one row left them."""
    return cache._temporal_order(rows)


def window_of(cache: RotatingKVCache) -> tuple[mx.array, mx.array]:
    """A sliding window's keys and values [1, H, N, D], by position, without what it has passed."""
    rows = cache._temporal_order(cache.keys), cache._temporal_order(cache.values)
    passed = rows[0].shape[2] - cache.max_size
    keys, values = (cache._trim(passed, x) if passed > 0 else x for x in rows)
    return keys, values


def fill_window(cache: RotatingKVCache, position: int, keys: mx.array, values: mx.array) -> None:
    """Make a sliding window the one of a position; its rows are as `window_of` gives them."""
    cache.keys, cache.values, cache.offset, cache._idx = keys, values, position, keys.shape[2]


def mask_of(cache: Any, rows: int, **settings: Any) -> Any:
    """The mask of the next rows that a model would get from this cache; None for none."""
    return cache.make_mask(rows, **settings)


def hook(
    cache: Any, make_mask: Callable[..., mx.array], update_and_fetch: Callable[..., Any]
) -> None:
    """Have a model ask these functions in place of this one cache's methods, until `unhook`."""
    cache.make_mask, cache.update_and_fetch = make_mask, update_and_fetch


def unhook(cache: Any) -> None:
    """Give a cache its methods back."""
    del cache.make_mask, cache.update_and_fetch


def watch_window(cache: LayerCache, seen: Callable[[mx.array], None]) -> None:
    """Have `seen` also get the rows [1, S, D] that enter a layer's window, for good."""
    update_window = cache.update_window

    def update_and_tell(rows: mx.array) -> mx.array:
        seen(rows)
        return update_window(rows)

    cache.update_window = update_and_tell


def window_indices(cache: LayerCache, rows: int) -> mx.array:
    """The rows [rows, W] of its window, older ones first, that each of the next rows sees."""
    held = 0 if cache.window is None else cache.window.shape[1]
    return _window_indices(previous=held, length=rows, window=cache.window_size)
