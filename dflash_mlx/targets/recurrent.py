"""Taking rejected rows out of a Gated DeltaNet layer, whose state has no rows to remove.

The layer's cache is the last inputs of a short convolution and one state matrix per head, which
every row overwrites. Keeping the state after each row would cost a whole state per row; instead a
*tape* keeps what entered the recurrence (the convolution's input and output and two gates: a few
kilobytes a row), and the commit replays the recurrence alone, over the kept rows, from the state
before the verify. Projections, attention and MLPs are not run again, old states are held by
reference and never copied, and nothing here depends on the length of the context.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

import mlx.core as mx
import mlx.nn as nn

from ..kernels.shapes import DeltaShape, dtype_of
from .internals import (
    RECURRENCE,
    ArraysCache,
    GatedDeltaNet,
    Qwen3NextGatedDeltaNet,
    compute_g,
    gated_delta_update,
    mixer_of,
    normalize_qk,
)
from .overrides import Overrides, rebound
from .recurrent_tree import delta_gates, first_state, mix
from .tree import Tree

if TYPE_CHECKING:
    from ..kernels.modules import Kernels


class RecurrentTape:
    """One Gated DeltaNet layer's inputs to its recurrence, for one request.

    Args:
        cache: the layer's cache: convolution inputs [1, kernel - 1, C] and, in f32, the state
            [1, Hv, Dv, Dk].
        mixer: its `GatedDeltaNet` (Qwen3.5, 3.6) or `Qwen3NextGatedDeltaNet`.
        overrides: where the recorders are added.
    """

    def __init__(self, cache: ArraysCache, mixer: nn.Module, overrides: Overrides) -> None:
        self._cache, self._mixer = cache, mixer
        self._state: mx.array | None = None
        self._inputs: mx.array  # of the convolution, [1, kernel - 1 + S, C]
        self._mixed: mx.array  # what it made of them, [1, S, C]
        self._gates: dict[str, mx.array] = {}  # a: decay, b: beta; each [1, S, Hv]
        self.kernels: Kernels | None = None  # what the recurrence runs on; None for mlx-lm's own
        overrides.watch(mixer.conv1d, self._record_convolution)
        if isinstance(mixer, Qwen3NextGatedDeltaNet):
            overrides.watch(mixer.in_proj_ba, self._record_both_gates)
        else:
            overrides.watch(mixer.in_proj_a, lambda _, a: self._gates.update(a=a))
            overrides.watch(mixer.in_proj_b, lambda _, b: self._gates.update(b=b))

    def begin(self) -> None:
        """Hold on to the state that a verify is about to replace."""
        self._state = self._cache[1]

    def record(self, inputs: mx.array, mixed: mx.array, a: mx.array, b: mx.array) -> None:
        """Take what entered the recurrence in a forward that tells it.

        Args:
            inputs, mixed: the convolution's, [1, kernel - 1 + S, C], and its outputs [1, S, C].
            a, b: what decay and beta are made of, [1, S, Hv].
        """
        self._inputs, self._mixed, self._gates = inputs, mixed, {"a": a, "b": b}

    def keep(self, kept: int, rejected: int) -> None:
        """Set the cache to what it is after the first `kept` rows of the verify."""
        if not rejected:
            return
        mixer, rows = self._mixer, slice(0, kept)
        self._cache[0] = self._inputs[:, kept : kept + mixer.conv_kernel_size - 1]
        mixed = nn.silu(self._mixed[:, rows])
        keys, values = mx.split(mixed[..., mixer.key_dim :], [mixer.key_dim], axis=-1)
        keys = keys.reshape(1, kept, mixer.num_k_heads, mixer.head_k_dim)
        _, keys = normalize_qk(keys, keys, inv_scale=mixer.head_k_dim**-0.5, eps=1e-6)
        values = values.reshape(1, kept, mixer.num_v_heads, mixer.head_v_dim)
        self._cache[1] = self._replay(keys, values, *(self._gates[g][:, rows] for g in "ab"))

    def compute_with(self, kernels: Kernels, overrides: Overrides) -> None:
        """Have the recurrence and its replay run on our kernels, in chains and in trees.

        The mixer runs its own code with the recurrence's name bound to ours, as in `attention`.
        """
        self.kernels = kernels
        call = rebound(type(self._mixer).__call__, **{RECURRENCE: self._update})
        overrides.replace(self._mixer, call)

    def branch(self, overrides: Overrides, tree: Callable[[], Tree]) -> None:
        """Have the mixer read the tree that `tree` gives, and the tape record what enters it."""

        def call(mixer: nn.Module, x: mx.array, mask: Any = None, cache: Any = None) -> mx.array:
            output, inputs, mixed = mix(mixer, x, cache, tree(), self.kernels)
            self._record_convolution(inputs, mixed)
            return output

        overrides.replace(self._mixer, call)

    def move(self, kept: Sequence[int]) -> None:
        """Put what was recorded of a path in a tree where a chain's would be."""
        path, past = mx.array(list(kept)), self._mixer.conv_kernel_size - 1
        new = self._inputs[:, past:][:, path]
        self._inputs = mx.concatenate([self._inputs[:, :past], new], axis=1)
        self._mixed = self._mixed[:, path]
        self._gates = {name: gate[:, path] for name, gate in self._gates.items()}

    def _replay(self, keys: mx.array, values: mx.array, a: mx.array, b: mx.array) -> mx.array:
        """The state after the rows of keys [1, n, Hk, Dk], values [1, n, Hv, Dv], gates [1, n, Hv].

        Bit for bit what mlx-lm computes for these rows.
        """
        mixer = self._mixer
        if self.kernels is not None:
            gates = delta_gates(mixer, a, b)
            state = first_state(values, keys) if self._state is None else self._state
            rows = mx.arange(keys.shape[1])
            return self.kernels.delta_replay(keys, values, *gates, state, rows, rows.size)
        if self._state is not None and mx.default_device() == mx.Device(mx.cpu):
            decay = compute_g(mixer.A_log, a, mixer.dt_bias)
            return _replay_steps(self._state, keys, values, decay, mx.sigmoid(b))
        # One Metal kernel; the keys stand in for the queries, which shape the output alone.
        inputs = (a, b, mixer.A_log, mixer.dt_bias)
        return gated_delta_update(keys, keys, values, *inputs, self._state)[1]

    def _update(
        self,
        q: mx.array,
        k: mx.array,
        v: mx.array,
        a: mx.array,
        b: mx.array,
        A_log: mx.array,
        dt_bias: mx.array,
        state: mx.array | None = None,
        mask: None = None,
        use_kernel: bool = True,
    ) -> tuple[mx.array, mx.array | None]:
        """What stands for mlx-lm's `gated_delta_update` in a chain; there is never a mask."""
        assert self.kernels is not None
        state = first_state(v, k) if state is None else state
        return self.kernels.delta(q, k, v, *delta_gates(self._mixer, a, b), state)

    def _record_convolution(self, inputs: mx.array, outputs: mx.array) -> None:
        self._inputs, self._mixed = inputs, outputs

    def _record_both_gates(self, _: Any, gates: mx.array) -> None:
        """Qwen3-Next projects both gates at once, [b, a] per key head."""
        heads = self._mixer.num_k_heads
        grouped = gates.reshape(*gates.shape[:2], heads, -1)
        b, a = mx.split(grouped, 2, axis=-1)
        self._gates.update(a=a.flatten(2), b=b.flatten(2))


@mx.compile
def _replay_steps(
    state: mx.array, keys: mx.array, values: mx.array, decay: mx.array, beta: mx.array
) -> mx.array:
    """The delta rule without its output, one step per row, compiled: half of mlx-lm's own time.

    Row by row the state [1, Hv, Dv, Dk] decays, and the part of the value [Dv] that it does not
    yet give back for the key [Dk] is added to it, weighted by beta.
    """
    rows = keys.shape[1]
    keys = mx.repeat(keys, values.shape[2] // keys.shape[2], axis=2)[..., None, :]
    steps = [keys, values[..., None], decay[..., None, None], beta[..., None, None]]
    for key, value, kept, weight in zip(*(mx.split(x, rows, axis=1) for x in steps), strict=True):
        state = state * kept[:, 0]
        recalled = (state * key[:, 0]).sum(axis=-1, keepdims=True)
        state = state + key[:, 0] * ((value[:, 0] - recalled) * weight[:, 0])
    return state


def has_tape(layer: nn.Module) -> bool:
    """Whether a decoder layer's recurrence is one that `RecurrentTape` can replay."""
    return type(mixer_of(layer)) in (GatedDeltaNet, Qwen3NextGatedDeltaNet)


def delta_shape(layer: nn.Module) -> DeltaShape | None:
    """What a layer's recurrence asks of our kernels; None for a layer without one."""
    if not has_tape(layer):
        return None
    mixer = mixer_of(layer)
    heads = mixer.num_k_heads, mixer.num_v_heads
    return DeltaShape(*heads, mixer.head_k_dim, mixer.head_v_dim, dtype_of(mixer.out_proj))
