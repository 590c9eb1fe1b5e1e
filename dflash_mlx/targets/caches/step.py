"""Caches inside a traced step: what they hold comes in as arrays and goes out as arrays.

A trace must not depend on how many tokens a text has. So the offset is an array, rows are written
at it, and the layers attend to a fixed number of keys, of which a mask hides those that are not
there yet. Hidden keys have a weight of exactly zero, so that they change no bit.
"""

from __future__ import annotations

from typing import Any

import mlx.core as mx

from .base import Contents
from .kv import FullCache, KeysAndValues, QuantizedCache
from .recurrent import RecurrentCache


class StepRows(KeysAndValues):
    """The first base of a cache with a row per token in a traced step.

    Attributes:
        offset: the position of the step's first row, [1] int32.
        attended: keys that the layers attend to.
        mask_was_read: whether the model has asked for the mask.
    """

    offset: Any
    attended: int
    mask_was_read = False

    def make_mask(
        self, N: int, return_array: bool = False, window_size: int | None = None
    ) -> mx.array:
        """Which keys each of the next N rows sees, [N, attended] bool."""
        self.mask_was_read = True
        rows = (self.offset + mx.arange(N))[:, None]
        keys = mx.arange(self.attended)[None]
        seen = keys <= rows
        return seen if window_size is None else seen & (rows - keys < window_size)

    def written(self, held: mx.array, new: mx.array) -> mx.array:
        """The rows [1, H, capacity, D] with new ones [1, H, N, D] at the offset."""
        return mx.slice_update(held, new, self.offset, axes=(2,))


class FullStep(StepRows, FullCache):
    """A `FullCache` in a traced step."""

    def update_and_fetch(self, keys: mx.array, values: mx.array) -> tuple[Any, Any]:
        """Write keys and values [1, H, N, D]; returns those that the layers attend to."""
        self.keys = self.written(self.keys, keys)
        self.values = self.written(self.values, values)
        self.offset = self.offset + keys.shape[2]
        return self.keys[..., : self.attended, :], self.values[..., : self.attended, :]


class QuantizedStep(StepRows, QuantizedCache):
    """A `QuantizedCache` in a traced step."""

    def update_and_fetch(self, keys: mx.array, values: mx.array) -> tuple[Any, Any]:
        """Write keys and values [1, H, N, D]; returns those that the layers attend to, in parts."""
        self.keys = self._with(self.keys, keys)
        self.values = self._with(self.values, values)
        self.offset = self.offset + keys.shape[2]
        return self._attended(self.keys), self._attended(self.values)

    def _with(self, held: Any, new: mx.array) -> tuple[mx.array, ...]:
        parts = mx.quantize(new, group_size=self.group_size, bits=self.bits)
        return tuple(self.written(*pair) for pair in zip(held, parts, strict=True))

    def _attended(self, held: Any) -> tuple[mx.array, ...]:
        return tuple(part[..., : self.attended, :] for part in held)


# The exact type decides: a subclass may hold something else.
STEPS: dict[type, type] = {
    FullCache: FullStep,
    QuantizedCache: QuantizedStep,
    RecurrentCache: RecurrentCache,
}


def step_cache(cache: Any, contents: Contents, offset: mx.array, attended: int) -> Any:
    """The form in which a traced step has a cache.

    Args:
        cache: of a kind in `STEPS`; it stays as it is.
        contents: what stands for its contents, shaped as its `contents()`.
        offset: the position of the first row, [1] int32.
        attended: keys that the layers attend to.
    """
    kind: Any = STEPS[type(cache)]
    made = kind.__new__(kind)
    vars(made).update(vars(cache))
    if isinstance(made, RecurrentCache):
        made.cache = list(contents)
        return made
    vars(made).update(offset=offset, attended=attended)
    made.keys, made.values = contents
    return made
