"""Reading the outputs of chosen layers: what a drafter conditions on."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import mlx.core as mx
import mlx.nn as nn

from .overrides import Overrides


class Taps:
    """Records the outputs of some layers of one model, for one request.

    Args:
        layers: the model's decoder layers.
        indices: the layers to read, in the order the drafter expects them.
        overrides: where the recorders are added; they record while it is installed.
    """

    def __init__(
        self, layers: Sequence[nn.Module], indices: Sequence[int], overrides: Overrides
    ) -> None:
        self._indices = tuple(indices)
        self._outputs: dict[int, mx.array] = {}
        for index in sorted(set(indices)):
            overrides.watch(layers[index], self._recorder(index))

    def take(self, rows: int) -> mx.array:
        """The last forward's recorded outputs side by side, [N, rows, K*D]; [1, rows, 0] if K=0."""
        if not self._indices:
            return mx.zeros((1, rows, 0))
        outputs, self._outputs = self._outputs, {}
        return mx.concatenate([outputs[index] for index in self._indices], axis=-1)

    def _recorder(self, index: int) -> Callable[[Any, Any], None]:
        def record(_: Any, result: Any) -> None:
            self._outputs[index] = _hidden(result)

        return record


def _hidden(result: Any) -> mx.array:
    """The hidden states [N, S, D] in what a decoder layer returns."""
    if not isinstance(result, tuple):
        return result
    hidden = result[0]
    if hidden.ndim == 4:
        # DeepSeek-V4.1 carries several residual streams [N, S, hc, D] and the mix [N, S, hc] with
        # which the next reader, a layer or the final norm, sums them: record what that one reads.
        mix = result[1][..., None]
        return (mix * hidden.astype(mx.float32)).sum(axis=2).astype(hidden.dtype)
    return hidden  # Gemma 4 adds the keys and values that later layers share
