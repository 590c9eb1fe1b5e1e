"""Where a model has its parts, found by watching one forward, whatever they are called.

The forward is built for two tokens and never computed. It shows which module reads the token ids,
in which order the layers run, which layer gets which cache, and what runs between the last layer
and the logits.
"""

from __future__ import annotations

import threading
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, TypeVar

import mlx.core as mx
import mlx.nn as nn

from ..subclassing import overridden
from .internals import make_prompt_cache

# What mlx-lm's models raise for a config, a cache or rows that they were not written for.
MODEL_ERRORS = (AttributeError, IndexError, KeyError, TypeError, ValueError)

T = TypeVar("T")
Call = tuple[Any, Any, Any]  # a module, its first argument and its result


@dataclass(frozen=True)
class ModelParts:
    """The parts of a model.

    Attributes:
        embedding: the module that reads token ids; it may also be the head.
        norm: the module before the head; None where there is none.
        norm_runs_once: whether it runs only there, not also between two loops over the layers.
        head: the output head; None if the embedding is also the head.
        layers: in the order in which they run. A layer that runs twice is there twice.
        layer_of_cache: for every cache the place in `layers` of the layer that gets it; None for
            another module.
        embedded, entered: two rows after the embedding, and as they enter the first layer; lazy.
    """

    embedding: Any
    norm: Any
    norm_runs_once: bool
    head: Any
    layers: list[nn.Module]
    layer_of_cache: list[int | None]
    embedded: mx.array
    entered: mx.array

    @property
    def owners(self) -> list[nn.Module | None]:
        """For every cache the layer that gets it."""
        return [None if place is None else self.layers[place] for place in self.layer_of_cache]

    def pairs(self, caches: Sequence[T]) -> list[tuple[nn.Module | None, T | None]]:
        """Every cache with its layer, then the layers that have no cache of their own."""
        owners = set(self.layer_of_cache)
        pairs: list[tuple[nn.Module | None, T | None]] = list(zip(self.owners, caches, strict=True))
        for place, layer in enumerate(self.layers):
            if place not in owners:
                pairs.append((layer, None))
        return pairs


def different(modules: Sequence[nn.Module]) -> list[nn.Module]:
    """Each module once, as layers may run twice and share parts."""
    return list({id(module): module for module in modules}.values())


def find_parts(model: Any) -> ModelParts:
    """Find the parts of an mlx-lm model.

    Raises what the model raises if it cannot run.
    """
    layers = list(model.layers)
    caches = make_prompt_cache(model)
    inside = {id(part) for layer in layers for part in layer.modules()}
    others = [part for part in model.modules() if part is not model and id(part) not in inside]
    calls: list[Call] = []
    # An argument's identity -> the place of the first layer that got it; some are caches.
    places_by_argument: dict[int, int] = {}
    ran: list[nn.Module] = []
    watched = [
        (layer, partial(_watched, calls=calls, ran=ran, places_by_argument=places_by_argument))
        for layer in different(layers)
    ]
    watched += [(module, partial(_watched, calls=calls)) for module in others]
    with overridden(watched):
        model(mx.zeros((1, 2), mx.int32), cache=caches)
    embedding_calls = [call for call in calls if hasattr(call[0], "as_linear")]
    embedding, _, embedded = embedding_calls[0]
    places = [place for place, call in enumerate(calls) if id(call[0]) in inside]
    entered = calls[places[0]][1] if places else embedded
    norm, head = _ending(calls[places[-1] + 1 :] if places else calls, embedded.shape[-1])
    layer_of_cache = [places_by_argument.get(id(cache)) for cache in caches]
    if not ran:  # the model calls its layers' parts itself; its caches are in the layers' order
        layer_of_cache = [number % len(layers) for number in range(len(caches))]
    return ModelParts(
        embedding=embedding,
        norm=norm,
        norm_runs_once=sum(module is norm for module, _, _ in calls) == 1,
        head=head,
        layers=ran or layers,
        layer_of_cache=layer_of_cache,
        embedded=embedded,
        entered=entered,
    )


def _watched(stock: Any, calls: list[Call], ran: Any = None, places_by_argument: Any = None) -> Any:
    """A module's call, recorded if it calls no other recorded module; a layer's also in `ran`.

    Other threads may run the model meanwhile, for another target. Theirs are not recorded.
    """
    watcher = threading.get_ident()

    def call(self: nn.Module, *args: Any, **named: Any) -> Any:
        if threading.get_ident() != watcher:
            return stock(self, *args, **named)
        before = len(calls)
        if ran is not None:
            place = len(ran)
            ran.append(self)
            for value in (*args, *named.values()):
                places_by_argument.setdefault(id(value), place)
        result = stock(self, *args, **named)
        if len(calls) == before or ran is not None:
            calls.append((self, args[0] if args else None, result))
        return result

    return call


def _ending(calls: list[Call], width: int) -> tuple[Any, Any]:
    """The norm and the head in the calls after the last layer; None for one that is not there."""
    modules = [module for module, x, _ in calls if isinstance(x, mx.array) and x.shape[-1] == width]
    head = None
    # A head's weight is a matrix, a norm's is a vector.
    if modules and getattr(modules[-1], "weight", mx.zeros(0)).ndim == 2:
        head = modules.pop()
    return modules[-1] if modules else None, head


def scale_between(embedded: mx.array, entered: mx.array) -> float | None:
    """The factor between the embeddings and what enters the first layer; None for 1 or no factor.

    Some models multiply them, others add positions or have several streams.
    """
    if embedded is entered or embedded.shape != entered.shape:
        return None
    before = embedded.astype(mx.float32)
    after = entered.astype(mx.float32)
    scale = (before * after).sum() / (before * before).sum()
    is_scale = mx.allclose(before * scale, after, rtol=0.02, atol=1e-6)
    return scale.item() if is_scale.item() and scale.item() != 1 else None  # type: ignore[return-value]
