"""How mlx-lm's models run our code: the one interception, installed when a target is made.

Some module instances of the model get a subclass (`subclassing`). Each asks which forward of ours
its thread runs. With none it runs mlx-lm's own code, so whoever else calls the model notices
nothing. Otherwise

    decoder layers          show their inputs and results, for taps
    the norm before a head  reads the last rows only, where only their logits are asked for
    rotations               turn each row by its own position, in a tree and for many requests
    attention               calls our function, which runs kernels and separates the requests
    MLA, recurrences        run our own forward: `mla`, `mixers`

So no family needs a forward of its own. Prompts that are read alone run on mlx-lm's own code.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import TYPE_CHECKING, Any

import mlx.core as mx
import mlx.nn as nn

from ..memory import compute
from ..subclassing import Call, is_overridden, override, rebind_globals, stock_class
from . import mla
from .attention import attend_each, calls_attention
from .internals import (
    ATTENTION,
    QUERY_SCALE,
    DeepseekV3Attention,
    DeepseekV32Attention,
    attention_of,
    backbone,
    is_mla,
    scaled_dot_product_attention,
    text_model,
)
from .mixers import read_rows
from .model_parts import ModelParts, different
from .recurrences import Recurrence, recurrence_of
from .rope_tables import RopeTables
from .rows import AXES, PerRequest, Rows, Verified
from .taps import Taps
from .tree_attention import ropes

if TYPE_CHECKING:
    from ..kernels.modules import Kernels


@dataclass
class Forward:
    """A forward that runs, as the model's modules see it.

    Attributes:
        rows: what it reads; None for whole sequences, which run on mlx-lm's code.
        attend: the function that layers call in place of mlx-lm's attention.
        kernels: those that recurrences run on; None for mlx-lm's own code.
        last_only: whether only each request's last row has logits.
        tapped: the ids of the layers whose runs are recorded.
        dispatch_after: the ids of the layers after which the device starts with the graph so far.
        rope_tables: what the rotations of a traced step share; None where MLX has a kernel.
        runs: each tapped layer's inputs and results, run by run.
        verifies: whether layers may run our code: prompts that are read alone run mlx-lm's.
        attends: whether attention calls our function.
        rotates: whether rows do not follow one another.
    """

    rows: Rows | None
    attend: Call = scaled_dot_product_attention
    kernels: Kernels | None = None
    last_only: bool = False
    tapped: frozenset[int] = frozenset()
    dispatch_after: frozenset[int] = frozenset()
    rope_tables: RopeTables | None = None
    runs: dict[int, list[tuple[Any, Any]]] = field(default_factory=dict)
    verifies: bool = field(init=False)
    attends: bool = field(init=False)
    rotates: bool = field(init=False)

    def __post_init__(self) -> None:
        rows = self.rows
        shared = rows is not None and rows.is_shared
        self.verifies = rows is not None and (shared or not rows.is_prompt)
        self.attends = shared or (self.verifies and self.attend is not scaled_dot_product_attention)
        self.rotates = shared or (rows is not None and rows.tree is not None)

    def layer_ran(self, layer: nn.Module, x: Any, result: Any) -> None:
        """Record a run of a tapped layer, and have the device start if it is time."""
        if id(layer) in self.tapped:
            self.runs.setdefault(id(layer), []).append((x, result))
        if id(layer) in self.dispatch_after:
            compute(result[0] if isinstance(result, tuple) else result, wait=False)


class _Running(threading.local):
    """The forward that the calling thread runs."""

    forward: Forward | None = None


class Interception:
    """The intercepted modules of one model, which all of its targets share."""

    def __init__(self) -> None:
        self._running = _Running()

    @classmethod
    def of(cls, model: nn.Module, parts: ModelParts) -> Interception:
        """The interception of a model, with modules that the model has got since the last target.

        Args:
            model: an mlx-lm model.
            parts: of the model.
        """
        interception: Interception = vars(model).get("interception") or cls()
        interception._install(model, parts)
        object.__setattr__(model, "interception", interception)
        return interception

    def _install(self, model: nn.Module, parts: ModelParts) -> None:
        for layer in different(parts.layers):
            self._override(layer, self._layer)
            for rope in different(ropes(layer)):
                self._override(rope, self._rope)
            attention = attention_of(layer)
            if attention is not None:
                self._override_attention(attention, is_mla(layer))
            recurrence = recurrence_of(layer)
            if recurrence is not None:
                self._override(recurrence.mixer, self._mixer(type(recurrence)))
        if parts.norm_runs_once:
            self._override(parts.norm, self._norm)
        inner = backbone(text_model(model))
        model_globals = getattr(type(inner).__call__, "__globals__", {})
        if QUERY_SCALE in model_globals:
            self._override(inner, self._scaled(model_globals[QUERY_SCALE]))

    def _override(self, module: nn.Module, make: Callable[[Call], Call]) -> None:
        """Override a module, once."""
        if not is_overridden(module, by=self):
            override(module, make, by=self)

    def __deepcopy__(self, memo: object) -> Interception:
        """The same: a copy of the model has modules of the same classes, which ask this one."""
        return self

    def run(
        self,
        model: nn.Module,
        ids: mx.array,
        caches: Sequence[Any] | None,
        taps: Taps,
        forward: Forward,
    ) -> Verified:
        """Run a forward of the model in this thread.

        Args:
            model: the intercepted model.
            ids: tokens [N, S].
            caches: what the model gets; None for whole sequences.
            taps: the layers to tap.
            forward: what the model's modules are to do.

        Returns:
            The logits [N, S, V], of fewer rows if `forward.last_only`, and the taps [N, S, K*D].
        """
        forward.tapped = taps.tapped
        outer = self._running.forward
        self._running.forward = forward
        try:
            logits: Any = model(ids, cache=caches)
        finally:
            self._running.forward = outer
        return logits, taps.of(forward.runs, ids.shape[1])

    def _layer(self, stock: Call) -> Call:
        running = self._running

        def call(layer: nn.Module, x: Any, *args: Any, **settings: Any) -> Any:
            result = stock(layer, x, *args, **settings)
            forward = running.forward
            if forward is not None and (forward.tapped or forward.dispatch_after):
                forward.layer_ran(layer, x, result)
            return result

        return call

    def _norm(self, stock: Call) -> Call:
        running = self._running

        def call(norm: nn.Module, x: mx.array) -> Any:
            forward = running.forward
            if forward is not None and forward.last_only:
                assert forward.rows is not None
                x = forward.rows.last(x)
            return stock(norm, x)

        return call

    def _rope(self, stock: Call) -> Call:
        running = self._running

        def call(rope: nn.Module, x: mx.array, *args: Any, **settings: Any) -> Any:
            forward = running.forward
            if forward is not None and forward.rotates:
                return _rotate(partial(stock, rope), forward.rows, x, *args, **settings)
            if forward is not None and forward.rope_tables is not None:
                return forward.rope_tables.rotate(stock, rope, x, *args, **settings)
            return stock(rope, x, *args, **settings)

        return call

    def _scaled(self, scale: Call) -> Callable[[Call], Call]:
        """The call of a model that multiplies each row's query by a factor of its position."""
        running = self._running

        def by_position(*args: Any) -> Any:
            """The factors [N, 1] of consecutive positions, or of a tree's depths."""
            forward: Any = running.forward
            if forward is None or not forward.rotates:
                return scale(*args)
            if forward.rows.is_shared:
                raise TypeError("The model scales the queries of one request at a time.")
            return scale(*args)[forward.rows.tree.depths]

        return lambda stock: rebind_globals(stock, **{QUERY_SCALE: by_position})

    def _override_attention(self, attention: Any, latent: bool) -> None:
        kind = stock_class(attention)
        if kind is DeepseekV3Attention:
            self._override(attention, self._replaced_by(mla.dense))
        elif kind is DeepseekV32Attention:
            self._override(attention, self._replaced_by(mla.sparse))
            self._override(attention.indexer, self._indexer)
        elif calls_attention(attention) and not latent:
            running = self._running

            def attend(queries: mx.array, keys: Any, *args: Any, **named: Any) -> Any:
                forward: Any = running.forward
                if isinstance(keys, PerRequest):
                    return attend_each(forward.attend, queries, keys, *args, **named)
                return forward.attend(queries, keys, *args, **named)

            stock: Any = kind
            ours = rebind_globals(stock.__call__, **{ATTENTION: attend})
            self._override(attention, self._replaced_by(ours, flag="attends"))

    def _replaced_by(self, ours: Call, flag: str = "verifies") -> Callable[[Call], Call]:
        """A module that runs `ours` in place of its own code if the forward has a flag.

        Args:
            ours: the call.
            flag: an attribute of `Forward`.
        """
        running = self._running

        def make(stock: Call) -> Call:
            def call(module: nn.Module, *args: Any, **settings: Any) -> Any:
                forward = running.forward
                if forward is None or not getattr(forward, flag):
                    return stock(module, *args, **settings)
                return ours(module, *args, **settings)

            return call

        return make

    def _mixer(self, kind: type[Recurrence]) -> Callable[[Call], Call]:
        """A recurrent layer's mixer that reads the rows of one request or many."""
        running = self._running

        def ours(mixer: nn.Module, x: mx.array, mask: Any = None, cache: Any = None) -> mx.array:
            forward: Any = running.forward
            # One for each forward: the caches keep it until they commit, and another target of this
            # model may have other kernels.
            recurrence = kind(mixer, forward.kernels)
            return read_rows(recurrence, forward.rows, x, cache)

        return self._replaced_by(ours)

    def _indexer(self, stock: Call) -> Call:
        """An indexer of DeepSeek-V3.2 that reads many requests one after another."""
        ours = mla.indexer(stock)

        def call(indexer: nn.Module, x: mx.array, residual: Any, mask: Any, cache: Any) -> Any:
            read = ours if isinstance(mask, PerRequest) else stock
            return read(indexer, x, residual, mask, cache=cache)

        return call


def _rotate(stock: Call, rows: Any, x: mx.array, offset: Any = 0, **settings: Any) -> Any:
    """Have a rotation turn each row of x [B, H, N, D] by its own position."""
    if not rows.is_shared:
        positions = offset + rows.tree.depths
    elif isinstance(offset, mx.array) and offset.ndim == AXES:
        positions = offset.flatten()
    else:
        raise TypeError("The model does not rotate each row by its position.")
    # A rotation takes one position for each entry of the batch axis. Stacked requests are there
    # already; other rows are moved there and back.
    if len(x) > 1:
        return stock(x, offset=positions, **settings)
    return stock(x.swapaxes(0, -2), offset=positions, **settings).swapaxes(0, -2)
