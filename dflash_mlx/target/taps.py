"""Reading the outputs of chosen layers, without touching the model's class or its parameters.

While a forward runs, each tapped layer's *instance* is given a subclass whose `__call__` also
records what it returns; afterwards it gets its own class back. Nothing is installed between
forwards, so an abandoned request leaves no trace, two requests with different taps never meet, and
parameter names, quantization and other models of the same class are untouched. (Wrapping entries
of `model.layers` instead would change parameter paths; patching a class would reach every model.)
A lock of the target's keeps the forwards of two threads apart; it is never held between forwards.
"""

from __future__ import annotations

import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import mlx.core as mx
import mlx.nn as nn


class Taps:
    """Records the outputs of some layers of one model, for one request."""

    def __init__(
        self, layers: Sequence[nn.Module], indices: Sequence[int], lock: threading.Lock
    ) -> None:
        self._layers, self._lock = [layers[index] for index in indices], lock
        self._outputs: list[mx.array | None] = [None] * len(self._layers)
        self._recorders = [
            _recorder(type(layer), self._outputs, slot) for slot, layer in enumerate(self._layers)
        ]

    @contextmanager
    def recording(self) -> Iterator[None]:
        """Install the recorders for the forwards run inside, and take them away afterwards."""
        with self._lock:
            classes = [type(layer) for layer in self._layers]
            try:
                for layer, recorder in zip(self._layers, self._recorders, strict=True):
                    layer.__class__ = recorder
                yield
            finally:
                for layer, original in zip(self._layers, classes, strict=True):
                    layer.__class__ = original

    def take(self, rows: int) -> mx.array:
        """The last forward's recorded outputs side by side, [N, rows, K*D]; [1, rows, 0] if K=0."""
        if not self._layers:
            return mx.zeros((1, rows, 0))
        outputs = [output for output in self._outputs if output is not None]
        self._outputs[:] = [None] * len(self._layers)
        return mx.concatenate(outputs, axis=-1)


def _recorder(cls: type, outputs: list[mx.array | None], slot: int) -> type:
    """A subclass of `cls` that stores what each call returns in `outputs[slot]`."""

    def record(self: nn.Module, *args: Any, **kwargs: Any) -> Any:
        result = cls.__call__(self, *args, **kwargs)
        # Some families' layers return a tuple that starts with the hidden states.
        outputs[slot] = result[0] if isinstance(result, tuple) else result
        return result

    return type(cls.__name__, (cls,), {"__call__": record})
