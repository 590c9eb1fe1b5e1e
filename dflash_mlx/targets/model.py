"""What requests need of an mlx-lm model: its parts, its taps and how it reads drafts."""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

import mlx.core as mx
import mlx.nn as nn

from ..errors import ConfigError, SettingsError, UnsupportedTreeError
from ..memory import compute
from ..threads import evaluate
from ..validation import ErrorWrapper
from .attention import attend_with, check_exact
from .caches import RecurrentCache, make_cache
from .mixers import record_recurrence
from .mla import use_absorbed_mla
from .overrides import Overrides
from .parts import MODEL_ERRORS, find_parts
from .taps import EMBEDDING, TapRecorder
from .tree_attention import rotate_rows, why_no_trees

if TYPE_CHECKING:
    from ..kernels.modules import Wiring


PIECE = 4  # layers of a verify that are handed to the device together


class TargetModel:
    """An mlx-lm model that verifies drafts.

    Attributes:
        model: the mlx-lm module.
        name: what it was loaded as.
        num_layers, hidden_size, vocab_size: its shape.
        layers: the layers in this process, in the order in which they run; one that runs twice is
            there twice. In a pipeline, other processes have the rest.
        owners: for every cache the layer that gets it; None for another module.
        parts: where the model has its other parts.
        why_no_trees: what keeps draft trees from being verified; None if they can be.
        has_rollback: whether rejected rows leave its caches without another forward.
        wiring: which layers run on our Metal kernels; None where none does.
        forward_lock: held by every forward. While another thread has it, modules have their own
            classes.
        prefilling: the overrides of a prefill's forwards.
        rotating: those of a tree's or a batch's rows, beside `verifying`.
        reading: the sessions whose rows the running verify reads.
        is_distributed: whether other processes run the same forwards.
        in_pieces: whether verifies are handed to the device `PIECE` layers at a time.

    Raises `ConfigError` for a model that cannot run.
    """

    is_distributed = False

    def __init__(self, model: nn.Module, name: str, wiring: Wiring | None) -> None:
        self.model, self.name, self.wiring = model, name, wiring
        self.forward_lock = threading.Lock()
        wrong = f"{name}: the model that config.json describes does not run"
        with ErrorWrapper(ConfigError, wrong, MODEL_ERRORS):
            self.parts = parts = find_parts(model, self.forward_lock)
        self.layers, self.num_layers = parts.layers, len(parts.layers)
        self.hidden_size: int = parts.embedded.shape[-1]
        self.vocab_size: int = parts.embedding.weight.shape[0]
        self._streams: int = parts.entered.shape[0]
        self.owners = parts.owners
        caches = make_cache(model, self.owners)
        self.has_rollback = all(cache.rolls_back for cache in caches)
        self.why_no_trees: str | None = "states that are rolled back by running rows again"
        if self.has_rollback:
            problems = (why_no_trees(*pair) for pair in parts.pairs(caches))
            self.why_no_trees = next(filter(None, problems), None)
        if wiring is not None and wiring.exact:
            check_exact(parts.pairs(caches))
        evaluate(model)
        # Where the CPU is the device, it has no time to gain by starting early.
        self.in_pieces = mx.default_device() != mx.Device(mx.cpu)
        self.reading: Sequence[Any] = ()
        self._starts_early = False  # whether the forward that runs may start before it is complete
        self._tapped: dict[tuple[int, ...], tuple[Overrides, TapRecorder]] = {}
        self.prefilling, self.rotating = (Overrides(self.forward_lock) for _ in range(2))
        self.last_logits_only(self.prefilling, lambda: slice(-1, None))
        rotate_rows(model, self.layers, self.rotating, lambda: self.reading[0].tree)
        self._verifying: tuple[Wiring | None, Overrides] | None = None

    @property
    def verifying(self) -> Overrides:
        """Has layers compute and record a verify's rows; made anew when the wiring changes."""
        if self._verifying is None or self._verifying[0] is not self.wiring:
            overrides, wiring = Overrides(self.forward_lock), self.wiring
            use_absorbed_mla(self.layers, overrides)
            if wiring is not None:
                attend_with(wiring, self.layers, overrides)
            kernels = wiring.kernels if wiring is not None and wiring.exact else None
            for layer, cache in self.pairs():
                if layer is not None and isinstance(cache, RecurrentCache):
                    record_recurrence(layer, overrides, kernels)
            self._verifying = wiring, overrides
        return self._verifying[1]

    def forward(
        self,
        ids: mx.array,
        cache: Sequence[Any] | None,
        tap_layers: tuple[int, ...],
        *sets: Overrides,
        reading: Sequence[Any] = (),
        starts_early: bool = False,
    ) -> tuple[mx.array, mx.array]:
        """One forward of the model: its logits, and the taps [N, S, K*D] of `tap_layers`.

        Args:
            ids: tokens [N, S].
            cache: the caches; None for whole sequences.
            tap_layers: those of a session, which has prepared them by `prepare`.
            sets: overrides of the forward.
            reading: the sessions whose rows these are, in a verify.
            starts_early: whether the first layers run while Python builds the others. Those of a
                pipelined step may not: they would copy keys and values that the last one still
                reads.
        """
        overrides, taps = self._tapped[tap_layers]
        with overrides.installed(*sets):
            self.reading, self._starts_early = reading, starts_early
            try:
                return self.model(ids, cache=cache), taps.take(ids.shape[1])
            finally:
                self.reading = ()  # keeps no request's caches alive
                taps.clear()  # nor the arrays of a forward that failed

    def prepare(self, tap_layers: tuple[int, ...]) -> None:
        """Make what `forward` needs to tap these layers, with the lock held.

        Layer -1 is the embedding's output.

        Raises `SettingsError` for a layer the model lacks, or that has several streams.
        """
        if tap_layers in self._tapped:
            return
        if tap_layers and self._streams > 1:
            raise SettingsError(f"{self.name} has {self._streams} streams, which cannot be tapped.")
        for layer in tap_layers:
            if not EMBEDDING <= layer < self.num_layers:
                raise SettingsError(
                    f"Layer {layer} cannot be tapped: {self.name} has {self.num_layers} layers."
                )
        overrides = Overrides(self.forward_lock)
        self._tapped[tap_layers] = overrides, self._recorder(tap_layers, overrides)
        self._hand_over(overrides)

    def _recorder(self, layers: Sequence[int], overrides: Overrides) -> TapRecorder:
        return TapRecorder(self.layers, layers, overrides)

    def pairs(self) -> list[tuple[nn.Module | None, Any]]:
        """The layers with new caches, as `ModelParts.pairs`."""
        return self.parts.pairs(make_cache(self.model, self.owners))

    @property
    def supports_trees(self) -> bool:
        """Whether draft trees can be verified; chains always can."""
        return self.why_no_trees is None

    def check_trees(self) -> None:
        """Raise `UnsupportedTreeError` where draft trees cannot be verified."""
        if self.why_no_trees is not None:
            raise UnsupportedTreeError(
                f"{self.name} has {self.why_no_trees}, which reads no draft trees: draft chains."
            )

    def _hand_over(self, overrides: Overrides) -> None:
        """Start computing every `PIECE` layers of a forward while Python builds the next ones.

        A GPU waits for Python otherwise, up to a third of a step without a drafter's network.
        """

        def start(_: Any, result: Any) -> None:
            if self._starts_early:
                compute(result[0] if isinstance(result, tuple) else result, wait=False)

        pieces = self.layers[PIECE - 1 : -1 : PIECE] if self.in_pieces else ()
        for layer in {id(layer): layer for layer in pieces}.values():
            overrides.watch(layer, start)

    def last_logits_only(self, overrides: Overrides, last: Callable[[], Any]) -> None:
        """Have the head compute a forward's `last` rows only while `overrides` is installed."""
        if self.parts.norm_runs_once:
            own = type(self.parts.norm).__call__
            overrides.replace(self.parts.norm, lambda norm, x: own(norm, x[:, last()]))
