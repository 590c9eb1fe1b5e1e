"""Reduce a model to this rank's part with mlx-lm's own functions: heads or layers."""

from __future__ import annotations

from typing import Any

import mlx.core as mx
import mlx.nn as nn

from ..errors import SettingsError
from ..targets import internals
from ..targets.caches import make_cache
from ..targets.model_parts import find_parts
from ..validation import ErrorWrapper

# What mlx-lm's `shard` and `pipeline` raise for sizes that do not divide, and for unknown layers.
SHARDING_ERRORS = (ValueError, TypeError, AttributeError, ZeroDivisionError, NotImplementedError)


def check_rollback(name: str, model: Any) -> None:
    """Raise `SettingsError` for a model that runs kept rows again after a rejected draft.

    Only rank 0 would run that forward, because the others learn of a commit with the next message.
    """
    if not all(cache.rolls_back for cache in make_cache(model, find_parts(model).owners)):
        raise SettingsError(
            f"{name}: a {_type(model)} removes rejected drafts by running rows again, which "
            "several machines cannot do together; use one machine."
        )


def split_by_heads(name: str, model: Any, group: mx.distributed.Group) -> nn.Module | None:
    """Keep this rank's heads of every layer.

    Returns the output head before it was split, None if it was not. Raises `SettingsError` if
    mlx-lm cannot split the model's heads, or not over this many machines.
    """
    by_layers = _why_no_pipeline(model) is None
    instead = "use fewer machines" + (" or --pipeline" if by_layers else "")
    if not hasattr(model, "shard"):
        raise SettingsError(
            f"{name}: mlx-lm does not split the heads of a {_type(model)} over machines; "
            f"{'split its layers with --pipeline' if by_layers else 'use one machine'}."
        )
    text = internals.text_model(model)
    size = group.size()
    head = internals.own_head(text)
    whole_heads = [_heads(layer) for layer in model.layers]
    error_prefix = f"{name} cannot be split over {size} machines"
    for heads in whole_heads:
        if heads and heads[0] % size != 0:
            raise SettingsError(
                f"{error_prefix}: they do not divide its {heads[0]} heads; {instead}."
            )
    with ErrorWrapper(SettingsError, error_prefix, SHARDING_ERRORS):
        model.shard(group)
    for layer, whole_counts in zip(model.layers, whole_heads, strict=True):
        for whole_count, count in zip(whole_counts, _heads(layer), strict=True):
            is_divided = count > 0 and count * size == whole_count
            # Some families repeat key heads if there are fewer than machines.
            is_repeated = count == 1 and size % whole_count == 0
            if not (is_divided or is_repeated):
                raise SettingsError(
                    f"{error_prefix}: they do not divide {whole_count} heads; {instead}."
                )
    sliced = internals.own_head(text) is not head
    return head if sliced else None


def split_by_layers(name: str, model: Any, group: mx.distributed.Group) -> int:
    """Keep this rank's layers. Returns the number of layers of the whole model.

    Raises `SettingsError` if mlx-lm cannot split its layers, or not over this many machines.
    """
    why = _why_no_pipeline(model)
    if why is not None:
        instead = "leave --pipeline out" if hasattr(model, "shard") else "use one machine"
        raise SettingsError(f"{name}: {why}; {instead}.")
    backbone = internals.backbone(internals.text_model(model))
    layers = len(backbone.layers)
    size = group.size()
    error_prefix = f"{name} cannot be split over {size} machines"
    if layers < size:
        raise SettingsError(f"{error_prefix}: it has {layers} layers; use fewer machines.")
    with ErrorWrapper(SettingsError, error_prefix, SHARDING_ERRORS):
        backbone.pipeline(group)
    return layers


def _why_no_pipeline(model: Any) -> str | None:
    """Why a model's layers cannot be split over machines; None if they can."""
    if not internals.has_pipeline(internals.backbone(internals.text_model(model))):
        return f"mlx-lm does not split the layers of a {_type(model)} over machines"
    return None


def _type(model: Any) -> str:
    return str(getattr(model, "model_type", type(model).__module__))


def _heads(layer: nn.Module) -> list[int]:
    """How many heads a layer has: of queries and keys, or a mixer's of values and keys."""
    attention = internals.attention_of(layer)
    if attention is not None:
        heads = [internals.query_heads(attention)]
        if internals.has_key_projection(attention):
            heads.append(internals.key_heads(attention))
        return heads
    mixer = internals.mixer_of(layer)
    return [] if mixer is None else [mixer.num_v_heads, mixer.num_k_heads]
