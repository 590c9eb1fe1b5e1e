"""A model -> this rank's shard of it, by mlx-lm's own means."""

from __future__ import annotations

from typing import Any

import mlx.core as mx
import mlx.nn as nn

from ..errors import SettingsError
from ..foreign import Foreign
from ..target import internals


def split_by_heads(name: str, model: Any, group: mx.distributed.Group) -> nn.Module | None:
    """Leave this rank its heads of every layer; the head before it was sliced, if it was.

    Raises `SettingsError` for a model that cannot be split so, or not so often.
    """
    if not hasattr(model, "shard"):
        raise SettingsError(
            f"{name}: mlx-lm does not split the heads of a {_type(model)} over machines: use one."
        )
    text, size = internals.text_model(model), group.size()
    head, before = internals.own_head(text), [_heads(layer) for layer in model.layers]
    wrong = f"{name} cannot be split over {size} machines"
    if any(heads % size for one in before for heads in one[:1]):
        raise SettingsError(f"{wrong}: they do not divide its {before[0][0]} heads.")
    with Foreign(SettingsError, wrong):
        model.shard(group)
    for was, layer in zip(before, model.layers, strict=True):
        for heads, now in zip(was, _heads(layer), strict=True):
            # Some families repeat keys where there are fewer heads of them than machines.
            if now < 1 or (now * size != heads and not (now == 1 and size % heads == 0)):
                raise SettingsError(f"{wrong}: they do not divide {heads} heads.")
    sliced = internals.own_head(text) is not head
    return head if sliced else None


def _type(model: Any) -> str:
    return str(getattr(model, "model_type", type(model).__module__))


def _heads(layer: nn.Module) -> list[int]:
    """A layer's numbers of heads, the queries' first."""
    attention, mixer = internals.attention_of(layer), internals.mixer_of(layer)
    if attention is not None:
        heads = [internals.query_heads(attention)]
        keys = internals.has_key_projection(attention)
        return heads + ([internals.key_heads(attention)] if keys else [])
    return [] if mixer is None else [mixer.num_v_heads, mixer.num_k_heads]
