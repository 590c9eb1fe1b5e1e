"""Everything in mlx-lm's models that this package uses and mlx-lm does not promise.

Kinds of caches and layers, private functions, the names of layers' parts, and cache fields that are
read or written. The rest of the package asks here. tests/targets/test_mlx_lm.py tries each of them
against the installed mlx-lm; when an update moves something, it fails under the name used here.
(The layers with kernels are named in `kernels`. A forward of ours, such as `mla`, reads its layer's
parts by their own names; the tests list those.)
"""

from __future__ import annotations

from typing import Any

import mlx.core as mx
import mlx.nn as nn
from mlx_lm.models import lfm2, lfm2_moe
from mlx_lm.models.base import scaled_dot_product_attention as scaled_dot_product_attention
from mlx_lm.models.cache import ArraysCache as ArraysCache
from mlx_lm.models.cache import CacheList as CacheList
from mlx_lm.models.cache import ChunkedKVCache as ChunkedKVCache
from mlx_lm.models.cache import KVCache as KVCache
from mlx_lm.models.cache import QuantizedKVCache as QuantizedKVCache
from mlx_lm.models.cache import RotatingKVCache as RotatingKVCache
from mlx_lm.models.cache import make_prompt_cache as make_prompt_cache
from mlx_lm.models.deepseek_v3 import DeepseekV3Attention as DeepseekV3Attention
from mlx_lm.models.deepseek_v32 import DeepseekV32Attention as DeepseekV32Attention
from mlx_lm.models.gated_delta import compute_g as compute_g
from mlx_lm.models.gated_delta import gated_delta_update as gated_delta_update
from mlx_lm.models.gated_delta import normalize_qk as normalize_qk
from mlx_lm.models.granitemoehybrid import GraniteMoeHybridMamba2Mixer
from mlx_lm.models.mamba2 import Mamba2Block
from mlx_lm.models.nemotron_h import NemotronHAttention, NemotronHMamba2Mixer
from mlx_lm.models.qwen3_5 import GatedDeltaNet as GatedDeltaNet
from mlx_lm.models.qwen3_next import Qwen3NextGatedDeltaNet as Qwen3NextGatedDeltaNet
from mlx_lm.models.rope_utils import SuScaledRoPE as SuScaledRoPE
from mlx_lm.utils import _get_classes as classes_of

from ..subclassing import stock_class

__all__ = ["classes_of"]

# The global name by which layers call attention.
ATTENTION = scaled_dot_product_attention.__name__

# The global name by which models compute a factor for each row's query, as Llama 4 has it.
QUERY_SCALE = "_get_llama_4_attn_scale"

# Rotations whose angle depends on a row's position only, and which take a position per row.
ROPES = {"RoPE", "Llama3RoPE", "YarnRoPE", "SuScaledRoPE", "ProportionalRoPE", "NoPE"} | {
    "DeepseekV2YarnRotaryEmbedding",
    "DynamicNTKAlphaRoPE",
}

# Modules of models whose attention may do without a rotation: positions do not enter it at all.
NOPE = {"afmoe", "exaone4", "exaone_moe", "llama4_text", "muse_glimmer", "nemotron_h", "smollm3"}

# Modules of models whose attention masks by itself, whatever mask it gets.
OWN_MASKS = {"phi3small"}

# Recurrences that `recurrences` knows, and the names under which layers have them.
GATED_DELTA = (GatedDeltaNet, Qwen3NextGatedDeltaNet)
SHORT_CONVOLUTIONS = (lfm2.ShortConv, lfm2_moe.ShortConv)
MAMBA2 = (NemotronHMamba2Mixer, GraniteMoeHybridMamba2Mixer, Mamba2Block)
MIXERS = ("linear_attn", "conv", "mamba", "mixer")

# A model and its layers


def text_model(model: nn.Module) -> Any:
    """The language model in a vision-language model; else the model itself."""
    return getattr(model, "language_model", model)


def backbone(text: nn.Module) -> Any:
    """The part with embedding, layers and norm; None where there is none."""
    return getattr(text, "model", None)


def own_class(layer: nn.Module) -> Any:
    """mlx-lm's class of a layer that may run on our kernels."""
    return next(cls for cls in type(layer).__mro__ if cls.__module__.startswith("mlx_lm."))


def first_layer(model: nn.Module) -> int:
    """The number of the first layer in this process."""
    return int(getattr(backbone(text_model(model)), "start_idx", 0))


def has_pipeline(backbone: Any) -> bool:
    """Whether mlx-lm splits its layers over machines."""
    return hasattr(backbone, "pipeline")


def own_head(text: nn.Module) -> Any:
    """The output head; None if the embedding is also the head."""
    return getattr(text, "lm_head", None)


def embed_scale(backbone: nn.Module) -> float | None:
    """The factor of embeddings before the first layer: sqrt(D) in Gemma's models."""
    return getattr(backbone, "embed_scale", None)


def attention_of(layer: nn.Module | None) -> Any:
    """A decoder layer's attention; None where it has a recurrence instead."""
    mixer = getattr(layer, "mixer", None)
    if mixer is not None and stock_class(mixer) is NemotronHAttention:
        return mixer
    return getattr(layer, "self_attn", None)


def mixer_of(layer: nn.Module | None) -> Any:
    """A decoder layer's recurrence; None where it has none that is known here."""
    known = (*GATED_DELTA, *SHORT_CONVOLUTIONS, *MAMBA2)
    for name in MIXERS:
        mixer = getattr(layer, name, None)
        if mixer is not None and stock_class(mixer) in known:
            return mixer
    return None


def ssm_step(
    mixer: Any, x: mx.array, b: mx.array, c: mx.array, dt: mx.array, state: mx.array | None
) -> tuple[mx.array, mx.array]:
    """One row of a Mamba-2 layer's recurrence by its own code: the output [B, 1, C], the state."""
    cache = ArraysCache(2)  # the convolution's inputs, which `_ssm` does not read, and the state
    cache[1] = state
    out = mixer._ssm(x, b, c, dt, cache, None)
    return out, cache[1]


def uses_no_positions(layer: nn.Module) -> bool:
    """Whether the layer uses no positional encoding (NoPE), rather than one we did not find."""
    return stock_class(layer).__module__.rpartition(".")[2] in NOPE


def masks_itself(layer: nn.Module | None) -> bool:
    """Whether a decoder layer's attention does not follow the mask that it gets."""
    return layer is not None and stock_class(layer).__module__.rpartition(".")[2] in OWN_MASKS


def has_key_projection(attention: nn.Module) -> bool:
    """Whether keys are projected per head, so that `head_size` and `key_heads` are known."""
    return hasattr(attention, "k_proj")


def key_heads(attention: nn.Module) -> int:
    """Heads of keys; families name it differently."""
    names = ("n_kv_heads", "num_key_value_heads", "num_kv_heads")
    return int(next(getattr(attention, name) for name in names if hasattr(attention, name)))


def query_heads(attention: nn.Module) -> int:
    """Heads of queries."""
    names = ("n_heads", "num_attention_heads", "num_heads")
    return int(next(getattr(attention, name) for name in names if hasattr(attention, name)))


def head_size(attention: Any) -> int:
    """Numbers in one head's key, from the projection's shape."""
    projection = getattr(attention.k_proj, "linear", attention.k_proj)  # inside of an adapter
    return int(projection.weight.shape[0]) // key_heads(attention)


def has_sinks(attention: nn.Module) -> bool:
    """Whether its softmax has sinks, as in gpt-oss."""
    return "sinks" in attention


def is_mla(layer: nn.Module | None) -> bool:
    """Whether a decoder layer's attention is MLA, whose cache holds latents."""
    return hasattr(attention_of(layer), "kv_lora_rank")


def sharding_group(mixer: Any) -> Any:
    """The group that shares a Gated DeltaNet's heads; None where this process has all."""
    return getattr(mixer, "sharding_group", None)


def rescale_longrope(rope: SuScaledRoPE, ratio: mx.array, amplitude: float) -> None:
    """Multiply a LongRoPE's periods [dims / 2] by a ratio, and set the factor of queries and keys.

    mlx-lm's class keeps the periods of its long factors.
    """
    rope._freqs = rope._freqs * ratio
    rope._scale = amplitude


def modules_of(model: nn.Module) -> set[str]:
    """The names of mlx-lm's modules whose code computes a model: those of its parts' classes."""
    names = {base.__module__ for part in model.modules() for base in type(part).__mro__}
    return {name.rpartition(".")[2] for name in names if name.startswith("mlx_lm.models.")}


# Caches


def mask_of(cache: Any, rows: int, **settings: Any) -> Any:
    """The mask that a model gets from this cache for the next rows; None for none."""
    return cache.make_mask(rows, **settings)
