"""Gemma 4's assistants: small decoders that read the target's own keys and values.

Each layer has queries only. It attends to the keys and values of the target's last layer of its
kind, full or sliding, that makes any. These are made here once more, from what enters that layer.
The input joins the embedding of the last token with the target's last hidden state, after the
final norm; drafted tokens have the assistant's own, projected to the target's width. All drafts of
a step are made at the position of the newest token that the target has read.

Parameter names are those of the published checkpoints. The layers are mlx-lm's.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import mlx.core as mx
import mlx.nn as nn
from mlx_lm.models import gemma4_text

from ..errors import ConfigError, IncompatibleDrafterError
from ..targets.caches import FullCache
from ..targets.internals import text_model
from ..validation import is_integer
from .networks import SLIDING
from .stepwise import StepwiseDrafter

if TYPE_CHECKING:
    from ..targets import Target

SIZES = ("backbone_hidden_size", "num_centroids", "centroid_intermediate_top_k")


class Gemma4Assistant(StepwiseDrafter, nn.Module):
    """The assistant of one target.

    Args:
        config: its config.json.
        target: a Gemma 4.

    Attributes:
        tap_layers: the layers before those whose keys and values it reads, and the last one.

    Raises: `ConfigError`, `IncompatibleDrafterError`.
    """

    drafts_add_rows = False  # drafted rows have no keys
    label = "Gemma 4 assistant"

    def __init__(self, config: Mapping[str, Any], target: Target) -> None:
        super().__init__()
        sizes = {"backbone_hidden_size": 1536, "num_centroids": 2048} | {**config}
        sizes.setdefault("centroid_intermediate_top_k", 32)
        shape = config.get("text_config")
        if not isinstance(shape, Mapping) or not all(is_integer(sizes[name], 1) for name in SIZES):
            raise ConfigError(f"The assistant's config needs a text_config and {', '.join(SIZES)}.")
        args = gemma4_text.ModelArgs.from_dict(
            {
                **shape,
                "num_kv_shared_layers": shape.get("num_hidden_layers"),
                "hidden_size_per_layer_input": 0,
            }
        )
        self._width = sizes["backbone_hidden_size"]
        self._window = args.sliding_window
        self._sources = _sources(args, target)
        before_sources = [index - 1 for index in self._sources.values()]
        self.tap_layers = (*before_sources, target.num_layers - 1)
        hidden = args.hidden_size
        self.vocab_size = args.vocab_size
        self.model: dict[str, Any] = {
            "embed_tokens": nn.Embedding(args.vocab_size, hidden),
            "layers": [
                gemma4_text.DecoderLayer(args, index) for index in range(args.num_hidden_layers)
            ],
            "norm": nn.RMSNorm(hidden, eps=args.rms_norm_eps),
        }
        self.pre_projection = nn.Linear(2 * self._width, hidden, bias=False)
        self.post_projection = nn.Linear(hidden, self._width, bias=False)
        if config.get("use_ordered_embeddings"):
            self._kept = sizes["centroid_intermediate_top_k"]
            self.masked_embedding: dict[str, Any] = {
                "centroids": nn.Linear(hidden, sizes["num_centroids"], bias=False),
                "token_ordering": mx.zeros((args.vocab_size,), mx.int64),
            }

    def make_cache(self) -> list[Any]:
        """Make empty caches for the keys and values of the target's layers that it reads."""
        return [FullCache() for _ in self._sources]

    def advance(
        self, features: mx.array, tokens: mx.array, cache: list[Any], target: Target
    ) -> mx.array:
        """Compute the normed hidden state [1, 1, D] of the last row.

        The features are taps [1, S, K*Dt], or those of a drafted token [1, 1, Dt]. The other
        arguments are those of `StepwiseDrafter`.
        """
        if features.shape[-1] > self._width:  # taps of new tokens, not a drafted token's feature
            taps = mx.split(features, len(self.tap_layers), axis=-1)
            for number, index in enumerate(self._sources.values()):
                layer_cache = cache[number]
                keys, values = _keys_values(target.layers[index], taps[number], layer_cache.offset)
                layer_cache.update_and_fetch(keys, values)
            features = target.parts.norm(taps[-1][:, -1:])
        embedding = target.embed(tokens[:, -1:])
        x = self.pre_projection(mx.concatenate([embedding, features], axis=-1))
        keys_values_by_kind = {
            kind: self._visible(kind, layer_cache)
            for kind, layer_cache in zip(self._sources, cache, strict=True)
        }
        for layer in self.model["layers"]:
            shared = keys_values_by_kind[layer.layer_type]
            x = layer(x, shared_kv=shared, offset=cache[0].offset - 1)[0]
        return self.model["norm"](x)

    def _visible(self, kind: str, cache: FullCache) -> tuple[mx.array, mx.array]:
        """The keys and values [1, KV, S, head_dim] that layers of a kind attend to."""
        first = max(0, cache.offset - self._window) if kind == SLIDING else 0
        keys: Any = cache.keys
        values: Any = cache.values
        return keys[:, :, first : cache.offset], values[:, :, first : cache.offset]

    def logits(self, hidden: mx.array, target: Target) -> mx.array:
        """Logits [1, S, V] of hidden states [1, S, D].

        With ordered embeddings, only the tokens of the best centroids get a logit; the others get
        minus infinity.
        """
        embedding = self.model["embed_tokens"]
        if "masked_embedding" not in self:
            return embedding.as_linear(hidden)
        scores = self.masked_embedding["centroids"](hidden)
        kept = self._kept
        clusters = self.masked_embedding["token_ordering"].reshape(scores.shape[-1], -1)
        ids = clusters[mx.argpartition(-scores, kept - 1, axis=-1)[..., :kept]].flatten(2)
        logits = (embedding(ids) @ hidden[..., None])[..., 0].astype(mx.float32)
        nothing = mx.full((*hidden.shape[:2], self.vocab_size), -mx.inf)
        return mx.put_along_axis(nothing, ids, logits, axis=-1)

    def feedback(self, hidden: mx.array) -> mx.array:
        """The features [1, 1, Dt] of the next slot."""
        return self.post_projection(hidden)

    def check_fits(self, target: Target) -> None:
        """Raise `IncompatibleDrafterError` unless the target is as wide, with as many tokens."""
        expected_sizes = (self._width, self.vocab_size)
        target_sizes = (target.hidden_size, target.vocab_size)
        if expected_sizes != target_sizes:
            raise IncompatibleDrafterError(
                "The assistant belongs to another target: its hidden_size and vocab_size are "
                f"{expected_sizes}, {target.name} has {target_sizes}."
            )


def _sources(args: gemma4_text.ModelArgs, target: Target) -> dict[str, int]:
    """Find the target's last layer of each kind that makes keys and values, by kind."""
    target_args = getattr(text_model(target.model), "args", None)
    if not isinstance(target_args, gemma4_text.ModelArgs) or len(target.layers) < 2:
        raise IncompatibleDrafterError(
            f"{target.name} is not a Gemma 4 model, which this assistant needs."
        )
    with_keys = len(target.layers) - target_args.num_kv_shared_layers
    last_layers = {kind: index for index, kind in enumerate(target_args.layer_types[:with_keys])}
    for index, kind in enumerate(args.layer_types):
        width = gemma4_text.Attention(args, index).head_dim
        has_layer = kind in last_layers
        if not has_layer or target.layers[last_layers[kind]].self_attn.head_dim != width:
            raise IncompatibleDrafterError(
                f"The assistant belongs to another target: {target.name} has no {kind} of width "
                f"{width}."
            )
    return {kind: last_layers[kind] for kind in sorted(set(args.layer_types))}


def _keys_values(layer: Any, x: mx.array, offset: int) -> tuple[mx.array, mx.array]:
    """Compute the keys and values [1, KV, S, head_dim] of a layer from its input x [1, S, D]."""
    attention = layer.self_attn
    shape = (*x.shape[:2], -1, attention.head_dim)
    x = layer.input_layernorm(x)
    keys = attention.k_proj(x).reshape(shape)
    values = keys if attention.use_k_eq_v else attention.v_proj(x).reshape(shape)
    keys = attention.rope(attention.k_norm(keys).transpose(0, 2, 1, 3), offset=offset)
    return keys, attention.v_norm(values).transpose(0, 2, 1, 3)
