"""The arithmetic of recurrent layers: a short convolution, and a state that every row overwrites.

Each class is one family of mlx-lm's layers, in its order of operations. Adding a family is adding
one here; `recurrent` verifies and rolls back all of them.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

import mlx.core as mx
import mlx.nn as nn

from ..kernels.delta_rule import DeltaInputs
from ..subclassing import stock_class
from .internals import (
    GATED_DELTA,
    MAMBA2,
    SHORT_CONVOLUTIONS,
    Qwen3NextGatedDeltaNet,
    compute_g,
    gated_delta_update,
    mixer_of,
    normalize_qk,
    sharding_group,
    ssm_step,
)

if TYPE_CHECKING:
    from ..kernels.modules import Kernels


class Projected(NamedTuple):
    """What a layer computes of its rows before it convolves them.

    Attributes:
        inputs: of the convolution [1, N, C].
        gates: further inputs of the recurrence, each [1, N, ...].
        output_gate: of the layer's output, [1, N, ...].
    """

    inputs: mx.array
    gates: tuple[mx.array, ...]
    output_gate: mx.array


class Recurrence:
    """One layer's arithmetic.

    Args:
        mixer: mlx-lm's module.
        kernels: our kernels that the recurrence runs on; None for mlx-lm's own.

    Attributes:
        window: rows that the convolution sees, a row's own included.
        channels: of the convolution.
        convolve: its outputs [B, n - window + 1, C] of inputs [B, n, C].
        has_state: whether its cache holds a state behind the convolution's inputs.
        as_prefill: whether `step` computes the same as the model's own prefill, bit for bit.
        kernels: as given.
    """

    has_state = True
    as_prefill = True

    def __init__(self, mixer: Any, kernels: Kernels | None = None) -> None:
        self.mixer = mixer
        self.kernels = kernels
        self.convolve = mixer.conv1d
        self.window = int(mixer.conv_kernel_size)
        self.channels = int(mixer.conv_dim)

    def project(self, x: mx.array) -> Projected:
        """Project the rows x [1, N, D]."""
        raise NotImplementedError

    def step(
        self,
        convolved: mx.array,
        gates: Sequence[mx.array],
        state: mx.array | None,
        parents: Sequence[int] | None = None,
    ) -> tuple[mx.array, mx.array | None]:
        """The recurrence's outputs [B, n, ...] of n rows one after another, and the state after.

        Args:
            convolved: the convolution's outputs [B, n, C].
            gates: the gates in `Projected`, [B, n, ...].
            state: the state before the first row; None at the start of a text.
            parents: of a tree's rows, which only our kernels take; None for a chain.
        """
        raise NotImplementedError

    def replay(
        self, convolved: mx.array, gates: Sequence[mx.array], state: mx.array | None
    ) -> mx.array | None:
        """The state after rows that have been verified, bit for bit what `step` returned."""
        return self.step(convolved, gates, state)[1]

    def output(self, out: mx.array, output_gate: mx.array) -> mx.array:
        """The layer's output [1, N, D] of the recurrence's."""
        raise NotImplementedError


class ShortConvolution(Recurrence):
    """LFM2's gated short convolution, without a state."""

    has_state = False

    def __init__(self, mixer: Any, kernels: Kernels | None = None) -> None:
        self.mixer = mixer
        self.kernels = kernels
        self.convolve = mixer.conv
        self.window = int(mixer.L_cache)
        self.channels = int(mixer.args.hidden_size)

    def project(self, x: mx.array) -> Projected:
        """Project the rows x [1, N, D]."""
        before, after, inputs = mx.split(self.mixer.in_proj(x), 3, axis=-1)
        return Projected(before * inputs, (), after)

    def step(
        self,
        convolved: mx.array,
        gates: Sequence[mx.array],
        state: mx.array | None,
        parents: Sequence[int] | None = None,
    ) -> tuple[mx.array, None]:
        """Return the convolution's outputs: there is no state."""
        return convolved, None

    def output(self, out: mx.array, output_gate: mx.array) -> mx.array:
        """Gate and project the recurrence's output."""
        result: mx.array = self.mixer.out_proj(output_gate * out)
        return result


class Mamba2(Recurrence):
    """The state-space layer of Nemotron-H, Granite 4 and Mamba-2.

    mlx-lm computes several rows in another form than a single row. Here each row is a step, so that
    drafted text equals plain text.
    """

    as_prefill = False

    def project(self, x: mx.array) -> Projected:
        """Project the rows x [1, N, D]."""
        mixer = self.mixer
        cuts = [mixer.intermediate_size, mixer.intermediate_size + mixer.conv_dim]
        gate, inputs, dt = mx.split(mixer.in_proj(x), cuts, axis=-1)
        return Projected(inputs, (dt,), gate)

    def step(
        self,
        convolved: mx.array,
        gates: Sequence[mx.array],
        state: mx.array | None,
        parents: Sequence[int] | None = None,
    ) -> tuple[mx.array, mx.array | None]:
        """Step through the rows; the state is [B, H, Dh, Ds]."""
        mixer = self.mixer
        groups = mixer.n_groups * mixer.ssm_state_size
        cuts = [mixer.intermediate_size, mixer.intermediate_size + groups]
        rows = (*mx.split(nn.silu(convolved), cuts, axis=-1), *gates)
        outputs = []
        for row in zip(*(mx.split(part, part.shape[1], axis=1) for part in rows), strict=True):
            x, b, c, dt = row
            out, state = ssm_step(mixer, x, b, c, dt, state)
            outputs.append(out)
        return mx.concatenate(outputs, axis=1), state

    def output(self, out: mx.array, output_gate: mx.array) -> mx.array:
        """Gate and project the recurrence's output."""
        result: mx.array = self.mixer.out_proj(self.mixer.norm(out, output_gate))
        return result


class GatedDelta(Recurrence):
    """Gated DeltaNet: Qwen3.5 and 3.6, and Qwen3-Next."""

    def project(self, x: mx.array) -> Projected:
        """Project the rows x [1, N, D] to gates a and b [1, N, Hv] and to z [1, N, Hv, Dv]."""
        mixer = self.mixer
        if isinstance(mixer, Qwen3NextGatedDeltaNet):
            q, k, v, z, b, a = mixer.fix_query_key_value_ordering(
                mixer.in_proj_qkvz(x), mixer.in_proj_ba(x)
            )
            inputs = mx.concatenate([q.flatten(2), k.flatten(2), v.flatten(2)], axis=-1)
            return Projected(inputs, (a, b), z)
        z = mixer.in_proj_z(x).reshape(*x.shape[:2], mixer.num_v_heads, mixer.head_v_dim)
        inputs = mixer.in_proj_qkv(x)
        b = mixer.in_proj_b(x)
        return Projected(inputs, (mixer.in_proj_a(x), b), z)

    def step(
        self,
        convolved: mx.array,
        gates: Sequence[mx.array],
        state: mx.array | None,
        parents: Sequence[int] | None = None,
    ) -> tuple[mx.array, mx.array | None]:
        """Step through the rows; the state is f32 [B, Hv, Dv, Dk]."""
        if self.kernels is not None:
            return self.kernels.delta.verify(*self._delta_inputs(convolved, gates, state), parents)
        mixer = self.mixer
        rows = self._heads(convolved)
        out, state = gated_delta_update(*rows, *gates, mixer.A_log, mixer.dt_bias, state)
        return out, state

    def replay(
        self, convolved: mx.array, gates: Sequence[mx.array], state: mx.array | None
    ) -> mx.array | None:
        """Step through kept rows again, for the state alone."""
        if self.kernels is not None:
            return self.kernels.delta.verify(*self._delta_inputs(convolved, gates, state))[1]
        mixer = self.mixer
        _, keys, values = self._heads(convolved)
        if state is not None and mx.default_device() == mx.Device(mx.cpu):
            return _replay_steps(state, keys, values, *self._decay(*gates))
        # One Metal kernel. Only the output depends on the queries, so the keys stand in for them.
        inputs = (keys, keys, values, *gates, mixer.A_log, mixer.dt_bias)
        return gated_delta_update(*inputs, state)[1]

    def output(self, out: mx.array, output_gate: mx.array) -> mx.array:
        """Gate and project the recurrence's output, and sum it over sharded heads."""
        mixer = self.mixer
        result: mx.array = mixer.out_proj(mixer.norm(out, output_gate).flatten(2))
        group = sharding_group(mixer)
        return result if group is None else mx.distributed.all_sum(result, group=group)

    def _delta_inputs(
        self, convolved: mx.array, gates: Sequence[mx.array], state: mx.array | None
    ) -> tuple[mx.array, DeltaInputs]:
        """The queries, and the other inputs of our kernels."""
        mixer = self.mixer
        queries, keys, values = self._heads(convolved)
        if state is None:
            state = mx.zeros((1, mixer.num_v_heads, mixer.head_v_dim, mixer.head_k_dim))
        return queries, DeltaInputs(keys, values, *self._decay(*gates), state)

    def _heads(self, convolved: mx.array) -> tuple[mx.array, mx.array, mx.array]:
        """Queries and keys [B, n, Hk, Dk] and values [B, n, Hv, Dv]."""
        mixer = self.mixer
        split = mx.split(nn.silu(convolved), [mixer.key_dim, 2 * mixer.key_dim], axis=-1)
        sizes = (mixer.head_k_dim, mixer.head_k_dim, mixer.head_v_dim)
        q, k, v = (
            part.reshape(*part.shape[:2], -1, size) for part, size in zip(split, sizes, strict=True)
        )
        return (*normalize_qk(q, k, inv_scale=mixer.head_k_dim**-0.5, eps=1e-6), v)

    def _decay(self, a: mx.array, b: mx.array) -> tuple[mx.array, mx.array]:
        """Decay and beta [B, n, Hv] of the projections a and b."""
        return compute_g(self.mixer.A_log, a, self.mixer.dt_bias), mx.sigmoid(b)


@mx.compile
def _replay_steps(
    state: mx.array, keys: mx.array, values: mx.array, decay: mx.array, beta: mx.array
) -> mx.array:
    """The delta rule without its output, compiled, one step per row: half of mlx-lm's own time.

    In each row the state [1, Hv, Dv, Dk] decays. The part of the value [Dv] that it does not
    return for the key [Dk] yet is added to it, weighted by beta.
    """
    rows = keys.shape[1]
    keys = mx.repeat(keys, values.shape[2] // keys.shape[2], axis=2)[..., None, :]
    steps = [keys, values[..., None], decay[..., None, None], beta[..., None, None]]
    for key, value, kept, weight in zip(*(mx.split(x, rows, axis=1) for x in steps), strict=True):
        state = state * kept[:, 0]
        recalled = (state * key[:, 0]).sum(axis=-1, keepdims=True)
        state = state + key[:, 0] * ((value[:, 0] - recalled) * weight[:, 0])
    return state


RECURRENCES: dict[type, type[Recurrence]] = {
    **dict.fromkeys(GATED_DELTA, GatedDelta),
    **dict.fromkeys(SHORT_CONVOLUTIONS, ShortConvolution),
    **dict.fromkeys(MAMBA2, Mamba2),
}


def recurrence_of(layer: nn.Module | None) -> Recurrence | None:
    """A decoder layer's recurrence; None where it has none, or one that is unknown here."""
    mixer = mixer_of(layer)
    return None if mixer is None else RECURRENCES[stock_class(mixer)](mixer)
