"""The target model: its parts, and one request's forwards over its caches.

Weights are shared and never change; what a request changes lives in its `TargetSession`. This file
and its neighbours hold every touch of mlx-lm's model internals.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager
from itertools import zip_longest
from typing import TYPE_CHECKING, Any, cast

import mlx.core as mx
import mlx.nn as nn
from mlx.utils import tree_flatten

from ..errors import ConfigError, SettingsError, UnsupportedTreeError
from ..proposal import Proposal
from ..threads import evaluate
from ..validation import text_config
from . import caches, internals
from .caches import Arrays, Checkpoint, make_cache
from .mla import absorb
from .overrides import Overrides
from .recurrent import RecurrentTape
from .rollback import rollbacks_for
from .rows import RowRollback
from .segment import Segment
from .taps import EMBEDDING, Taps
from .tree_attention import TreeReader, why_no_trees

if TYPE_CHECKING:
    from mlx_lm.tokenizer_utils import TokenizerWrapper

    from ..kernels.modules import Wiring

PREFILL_STEP = 2048  # tokens per prefill forward, as in mlx-lm
LAST_STEP = 64  # tokens at most of its last forward, whose logits are asked for


class Target:
    """An mlx-lm model with its tokenizer, ready to verify drafts.

    Attributes:
        model: the mlx-lm module.
        tokenizer: mlx-lm's `TokenizerWrapper`.
        config: its config.json.
        name: what it was loaded as.
        num_layers, hidden_size, vocab_size, context_length: its shape.
        layers: those that are in this process; of a pipeline, others are elsewhere.
        wiring: which layers run on our Metal kernels; None where none does.

    Raises `UnsupportedCacheError` when its caches cannot be rolled back, and `ConfigError` when
    its parts are not where mlx-lm's models have them.
    """

    def __init__(
        self,
        model: nn.Module,
        tokenizer: TokenizerWrapper,
        config: dict[str, Any],
        name: str,
        wiring: Wiring | None = None,
    ) -> None:
        self.model, self.tokenizer, self.name = model, tokenizer, name
        self.config, self.wiring = config, wiring
        self._text = internals.text_model(model)
        self._backbone = internals.backbone(self._text)
        for part in internals.BACKBONE:
            if not hasattr(self._backbone, part):
                raise ConfigError(
                    f"{name}: model_type {config.get('model_type')!r} is a model without "
                    f"model.{part}, which this version cannot draft for."
                )
        self.num_layers = len(self._backbone.layers)
        self.layers = internals.own_layers(self._backbone)
        self.hidden_size: int = self._backbone.norm.weight.shape[0]
        self.vocab_size: int = self._backbone.embed_tokens.weight.shape[0]
        shape = text_config(config)
        self.context_length = int(shape.get("max_position_embeddings") or 2**31)
        self._forwards = threading.Lock()
        caches = make_cache(model)
        rollbacks = rollbacks_for(caches, self.layers, self.overrides())
        problems = (why_no_trees(*of) for of in zip_longest(self.layers, rollbacks))
        self._why_no_trees = next(filter(None, problems), None)
        if wiring is not None and wiring.exact:
            from .attention import check_exact

            check_exact(self.layers, caches)
        evaluate(model)

    def __repr__(self) -> str:
        """A line: the name and the shape; MLX's own of `model` has every layer."""
        return (
            f"Target({self.name!r}, num_layers={self.num_layers}, "
            f"hidden_size={self.hidden_size}, vocab_size={self.vocab_size})"
        )

    @property
    def supports_trees(self) -> bool:
        """Whether draft trees can be verified; chains always can."""
        return self._why_no_trees is None

    def check_trees(self) -> None:
        """Raise `UnsupportedTreeError` where draft trees cannot be verified."""
        if self._why_no_trees is not None:
            raise UnsupportedTreeError(
                f"{self.name} has {self._why_no_trees}, which reads no draft trees: draft chains."
            )

    def embed(self, tokens: mx.array) -> mx.array:
        """Embeddings [N, S, D] of token ids [N, S], as the model feeds them to its first layer."""
        embeddings = self._backbone.embed_tokens(tokens)
        scale = internals.embed_scale(self._backbone)
        return embeddings if scale is None else embeddings * scale

    def head(self, hidden: mx.array) -> mx.array:
        """Logits [N, S, V] of normed hidden states [N, S, D], through the model's own module.

        A soft cap of the model's is left out: drafters are trained on the bare head.
        """
        head = internals.own_head(self._text)
        return head(hidden) if head else self._backbone.embed_tokens.as_linear(hidden)

    def head_rows(self, tokens: mx.array) -> mx.array:
        """The rows of the head's matrix [N, D] that make the logits of these tokens [N]."""
        head: Any = getattr(self._text, "lm_head", None) or self._backbone.embed_tokens
        if isinstance(head, nn.QuantizedLinear | nn.QuantizedEmbedding):
            biases = None if head.biases is None else head.biases[tokens]
            packed = (head.weight[tokens], head.scales[tokens], biases)
            return mx.dequantize(*packed, head.group_size, head.bits, head.mode)
        return head.weight[tokens]

    def norm_weight(self) -> mx.array:
        """The weight [D] of the norm before the head."""
        return cast(mx.array, self._backbone.norm.weight)

    def features(self, tokens: mx.array, layers: Sequence[int]) -> tuple[mx.array, mx.array]:
        """Teacher-forced logits [N, S, V] and taps [N, S, K*D] of whole sequences [N, S]."""
        overrides = self.overrides()
        with self.forward_lock:
            taps = self.tap(layers, overrides)
        with overrides.installed():
            logits = self.model(tokens)
        return logits, taps.take(tokens.shape[1])

    @property
    def forward_lock(self) -> AbstractContextManager[Any]:
        """No forward runs inside: every module is of its own class."""
        return self._forwards

    def overrides(self) -> Overrides:
        """An empty set of overrides of this model's modules; two never run at the same time."""
        return Overrides(self._forwards)

    def tap(self, layers: Sequence[int], overrides: Overrides) -> Taps:
        """A recorder of these layers' outputs, which works while `overrides` is installed.

        Layer -1 stands for the embedding's output.

        Raises `SettingsError` for a layer the model lacks.
        """
        for layer in layers:
            if not EMBEDDING <= layer < self.num_layers:
                raise SettingsError(f"Layer {layer} to tap: {self.name} has {self.num_layers}.")
        return self._recorder(layers, overrides)

    def _recorder(self, layers: Sequence[int], overrides: Overrides) -> Taps:
        return Taps(self.layers, layers, overrides)

    def read_last_row(self, overrides: Overrides) -> None:
        """Have the head read a forward's last row alone while `overrides` is installed."""
        norm = self._backbone.norm
        own = type(norm).__call__
        overrides.replace(norm, lambda norm, x: own(norm, x[:, -1:]))

    def start(self, tap_layers: Sequence[int] = (), kv_bits: int | None = None) -> TargetSession:
        """Begin one request whose drafter reads the outputs of `tap_layers`.

        Args:
            tap_layers: the layers to read.
            kv_bits: 8 or 4 keeps keys and values quantized; None keeps them as they are.

        Raises `SettingsError` when the model's caches cannot be quantized.
        """
        with self.forward_lock:  # another thread's would have modules of other classes
            return TargetSession(self, self.layers, tap_layers, kv_bits)

    def cache_bytes(self, tokens: int, kv_bits: int | None = None) -> int:
        """Bytes of a request's caches after so many tokens. Nothing is computed."""
        session = self.start((), kv_bits)
        session.expect(tokens)
        return session.bytes

    def verify_batch(self, forward: Callable[..., Any], sessions: Any, proposals: Any) -> Any:
        """Run a `BatchVerifier`'s forward; a distributed target also runs it on the other ranks."""
        return forward(sessions, proposals)


class TargetSession:
    """One request's caches: prefill, then verify and commit in turn.

    Attributes:
        can_pipeline: whether the next forward may start before its token is known. False for caches
            with windows or states, which could not forget that token again.
        position: committed tokens in the caches.
        intact: False while a forward changes the caches, and after one that failed.
    """

    def __init__(
        self,
        target: Target,
        layers: list[nn.Module],
        tap_layers: Sequence[int],
        kv_bits: int | None,
    ) -> None:
        self._target, self._model, self.tap_layers = target, target.model, tuple(tap_layers)
        self._prefill, self._verify = target.overrides(), target.overrides()
        self._prefill_taps = target.tap(tap_layers, self._prefill)
        target.read_last_row(self._prefill)
        self._verify_taps = target.tap(tap_layers, self._verify)
        self._cache = make_cache(target.model, layers, kv_bits)
        # What one forward may leave lazy for the next; an indexer's keys, for one, are not always
        # read, and windows and states are cut anew.
        self._lazy = [cache for cache in self._cache if not caches.is_read_whole(cache)]
        self.can_pipeline = not self._lazy
        self._rollback = rollbacks_for(self._cache, layers, self._verify)
        # Rows are there or not, so these alone have something to do in every round.
        self._recording = [way for way in self._rollback if not isinstance(way, RowRollback)]
        absorb(layers, self._verify)
        self._widest: int | None = None  # rows of a verify
        if target.wiring is not None:
            from .attention import attend_with

            attend_with(target.wiring, layers, self._verify)
            self._widest = target.wiring.widest
            for rollback in self._rollback if target.wiring.exact else ():
                if isinstance(rollback, RecurrentTape):
                    rollback.compute_with(target.wiring.kernels, self._verify)
        self._tree_reader: TreeReader | None = None  # made for the first tree
        self._layers, self.kv_bits = layers, kv_bits
        self._unsettled = 0  # rows of the last verify that commit has not decided about
        self.position, self.intact = 0, True

    def prefill(
        self,
        tokens: Sequence[int],
        stops: Sequence[int] = (),
        step: Callable[[], int] = lambda: PREFILL_STEP,
    ) -> Iterator[tuple[mx.array | None, mx.array]]:
        """Read a prompt, forward by forward: logits and taps [1, S, K*D].

        The last forward's logits [1, V] are those after its last row, which the head alone sees;
        the others' are None. What only logits need, the last layer's MLP for one, is computed for
        the rows of the last forward, so that one is short; a short prompt needs no other.
        Caches and logits are computed, taps may not be.

        Args:
            tokens: the prompt's.
            stops: positions at which a forward ends.
            step: says how many tokens the next forward may have.
        """
        last_begins = max(0, len(tokens) - LAST_STEP)
        borders = sorted({last_begins, *(at - self.position for at in stops), len(tokens)})
        end = 0
        while end < len(tokens):
            start = end
            end = min(start + step(), next(border for border in borders if border > start))
            yield self.read(tokens[start:end], end == len(tokens))

    def read(self, tokens: Sequence[int], last: bool) -> tuple[mx.array | None, mx.array]:
        """One forward of `prefill`, its last one or not."""
        self.intact = False
        with self._prefill.installed():
            logits = self._model(mx.array([list(tokens)]), cache=self._cache)[0, -1:]
        taps = self._prefill_taps.take(len(tokens))
        mx.eval([cache.state for cache in self._cache], [logits] if last else [])
        self.position += len(tokens)
        self.intact = True
        return logits if last else None, taps

    def verify(self, proposal: Proposal) -> tuple[mx.array, mx.array]:
        """One forward over the proposal: logits [N, V] after each row, and its taps [1, N, K*D].

        Lazy: nothing is evaluated yet. `commit` must follow before the next forward.
        Raises `UnsupportedTreeError` for a tree that this target cannot read, and `SettingsError`
        for more rows than exact verification takes.
        """
        reader = self._reader_of(proposal)
        self.begin(proposal)
        of = self._verify
        with of.installed() if reader is None else reader.installed(proposal, of):
            ids = proposal.array(self._target.vocab_size)
            logits = self._model(ids[None], cache=self._cache)
        return logits.squeeze(0), self._verify_taps.take(len(proposal))

    def segment(self, proposal: Proposal) -> Segment:
        """What a forward over the proposal needs of this request. Raises as `verify` does."""
        reader = self._reader_of(proposal)
        entries = [*self._verify.entries, *(reader.overrides.entries if reader else ())]
        rows = proposal, proposal.array(self._target.vocab_size), self.position
        return Segment(*rows, self._cache, self._rollback, entries, reader)

    def _reader_of(self, proposal: Proposal) -> TreeReader | None:
        """What reads the proposal, where that is a tree. Raises as `verify` does."""
        if self._widest is not None and len(proposal) > self._widest:
            raise SettingsError(
                f"exact: at most {self._widest} rows are verified at once; load the model with "
                "exact=False (--no-exact) for more."
            )
        return None if proposal.is_chain else self._reader()

    def begin(self, proposal: Proposal) -> None:
        """The forward over the proposal is next, whoever runs it; then `commit` follows."""
        self.intact, self._unsettled = False, len(proposal)
        for rollback in self._recording:
            rollback.begin()

    def expect(self, tokens: int) -> None:
        """Have caches of the shapes that they have after so many tokens, and compute nothing."""
        for start in range(0, tokens, PREFILL_STEP):
            chunk = mx.zeros((1, min(PREFILL_STEP, tokens - start)), mx.int32)
            with self._prefill.installed():
                self._model(chunk, cache=self._cache)

    @property
    def bytes(self) -> int:
        """Of the caches."""
        leaves = tree_flatten([caches.arrays(cache) for cache in self._cache])
        return sum(leaf.nbytes for _, leaf in leaves if isinstance(leaf, mx.array))

    def commit(self, kept: Sequence[int]) -> None:
        """Keep these rows of the last verify (a path from row 0) and remove the others."""
        moved = kept[-1] >= len(kept)  # a path with rejected rows in between
        if moved:
            self._reader().move(kept)
        rejected = self._unsettled - len(kept)
        for rollback in self._rollback if rejected else self._recording:
            rollback.keep(len(kept), rejected)
        self.position += len(kept)
        self.intact, self._unsettled = True, 0
        # Leave nothing lazy in the caches: the next forward may be another thread's.
        if lazy := self._cache if moved else self._lazy:
            mx.async_eval([caches.arrays(cache) for cache in lazy])

    @property
    def can_trim(self) -> bool:
        """Whether `trim_to` can go back to any position, or only `rewind` to a checkpoint."""
        return all(map(caches.can_trim, self._cache))

    def trim_to(self, position: int) -> None:
        """Forget all tokens from a position on."""
        for cache in self._cache:
            caches.trim(cache, self.position - position)
        self.position = position

    def checkpoint(self) -> Checkpoint:
        """This state, to come back to. It holds what cannot be cut: windows and states."""
        return caches.checkpoint(self._cache, self.position)

    def rewind(self, checkpoint: Checkpoint) -> None:
        """Forget all tokens since the checkpoint."""
        caches.rewind(self._cache, self.position, checkpoint)
        self.position = checkpoint.position

    def rows(self, start: int, end: int) -> Arrays:
        """What belongs to the tokens from `start` to `end`, by name: slices, to be copied."""
        return caches.rows_of_all(self._cache, self._layers, start, end)

    def state(self) -> Arrays:
        """The rest: what is good at this position alone, by name."""
        return caches.state_of_all(self._cache)

    def restore(self, position: int, rows: Sequence[Arrays], state: Arrays, room: int) -> None:
        """Begin with `position` tokens that other sessions have read.

        Args:
            rows: from `rows`, stretch after stretch, up to the position.
            state: from `state` at the position.
            room: tokens that are about to follow.
        """
        caches.restore_all(self._cache, position, rows, state, room)
        self.position = position
        # Leave nothing lazy in the caches: the next forward may be another thread's.
        mx.async_eval([caches.arrays(cache) for cache in self._cache])

    def _reader(self) -> TreeReader:
        """What reads this request's trees. Raises `UnsupportedTreeError`."""
        if self._tree_reader is None:
            self._target.check_trees()
            of = (self._layers, self._cache, self._rollback, self._target.overrides())
            with self._target.forward_lock:  # as in `start`
                self._tree_reader = TreeReader(*of)
        return self._tree_reader
