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
    """Raise `SettingsError` for a model whose kept rows run again after a rejected draft.

    That forward would be one of rank 0's alone: the others hear of a commit with the next message.
    """
    if not all(cache.rolls_back for cache in make_cache(model, find_parts(model).owners)):
        raise SettingsError(
            f"{name}: a {_type(model)} removes rejected drafts by running rows again, which "
            "several machines cannot do together; use one machine."
        )


def split_by_heads(name: str, model: Any, group: mx.distributed.Group) -> nn.Module | None:
    """Keep this rank's heads of every layer.

    Returns the output head before it was split, None if it was not. Raises `SettingsError` for a
    model that cannot be split so, or not into that many parts.
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
    before = [_heads(layer) for layer in model.layers]
    wrong = f"{name} cannot be split over {size} machines"
    if any(heads % size for one in before for heads in one[:1]):
        raise SettingsError(f"{wrong}: they do not divide its {before[0][0]} heads; {instead}.")
    with ErrorWrapper(SettingsError, wrong, SHARDING_ERRORS):
        model.shard(group)
    for was, layer in zip(before, model.layers, strict=True):
        for heads, now in zip(was, _heads(layer), strict=True):
            # Some families repeat key heads if there are fewer than machines.
            if now < 1 or (now * size != heads and not (now == 1 and size % heads == 0)):
                raise SettingsError(f"{wrong}: they do not divide {heads} heads; {instead}.")
    sliced = internals.own_head(text) is not head
    return head if sliced else None


def split_by_layers(name: str, model: Any, group: mx.distributed.Group) -> int:
    """Keep this rank's layers. Returns the number of layers of the whole model.

    Raises `SettingsError` for a model that cannot be split so, or not into that many parts.
    """
    why = _why_no_pipeline(model)
    if why is not None:
        instead = "leave --pipeline out" if hasattr(model, "shard") else "use one machine"
        raise SettingsError(f"{name}: {why}; {instead}.")
    backbone = internals.backbone(internals.text_model(model))
    layers = len(backbone.layers)
    size = group.size()
    wrong = f"{name} cannot be split over {size} machines"
    if layers < size:
        raise SettingsError(f"{wrong}: it has {layers} layers; use fewer machines.")
    with ErrorWrapper(SettingsError, wrong, SHARDING_ERRORS):
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
    """A layer's head counts, the queries' first."""
    attention = internals.attention_of(layer)
    mixer = internals.mixer_of(layer)
    if attention is not None:
        heads = [internals.query_heads(attention)]
        keys = internals.has_key_projection(attention)
        return heads + ([internals.key_heads(attention)] if keys else [])
    return [] if mixer is None else [mixer.num_v_heads, mixer.num_k_heads]
