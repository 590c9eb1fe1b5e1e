"""The target: an mlx-lm model with its tokenizer, and the one forward that reads tokens."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from functools import cached_property, partial
from typing import TYPE_CHECKING, Any, Literal, cast

import mlx.core as mx
import mlx.nn as nn

from ..errors import ConfigError, SettingsError, UnsupportedTreeError
from ..memory import compute
from ..proposal import Proposal
from ..threads import clean_up_at_end, evaluate
from ..validation import ErrorWrapper, text_config
from . import caches, internals
from .attention import attention_function, check_exact
from .caches import make_cache
from .intercept import Forward, Interception
from .kv_slots import KVSlots
from .model_parts import MODEL_ERRORS, find_parts, scale_between
from .rows import Rows, SharedForward, Verified
from .session import TargetSession
from .sharing import find_sharing
from .span import Span
from .taps import EMBEDDING, Taps
from .traced import TracedSteps
from .tree_attention import why_no_trees

if TYPE_CHECKING:
    from mlx_lm.tokenizer_utils import TokenizerWrapper

    from ..kernels.modules import KernelPlan

DISPATCH_EVERY = 4  # layers of a verification that are handed to the device together


class Target:
    """An mlx-lm model with its tokenizer, ready to verify drafts.

    Attributes:
        model: the mlx-lm module.
        name: what it was loaded as.
        tokenizer: mlx-lm's `TokenizerWrapper`.
        config: its config.json.
        context_length: tokens that it was made for.
        sampling_defaults: the publisher's sampling settings; `dm.generate` does not use them.
        num_layers, hidden_size, vocab_size: its shape.
        layers: the layers in this process, in the order in which they run; one that runs twice is
            there twice. In a pipeline, other processes have the rest.
        parts: where the model has its other parts.
        why_no_trees: what keeps draft trees from being verified; None if they can be.
        has_rollback: whether rejected rows leave its caches without another forward.
        kernel_plan: which layers run on our Metal kernels; None where none does.
        is_distributed: whether other processes run the same forwards.
        steps: the traced forwards of its steps.
        dispatches_early: whether the device starts with a verification's first layers while Python
            builds the others, `DISPATCH_EVERY` layers at a time.

    Raises `ConfigError` for a model that cannot run.
    """

    is_distributed = False

    def __init__(
        self,
        model: nn.Module,
        tokenizer: TokenizerWrapper,
        config: dict[str, Any],
        name: str,
        kernel_plan: KernelPlan | None = None,
    ) -> None:
        self.model = model
        self.name = name
        self.tokenizer = tokenizer
        self.config = config
        self.sampling_defaults: Mapping[str, Any] = {}
        self.context_length = int(text_config(config).get("max_position_embeddings") or 2**31)
        error_prefix = f"{name}: the model that config.json describes does not run"
        with ErrorWrapper(ConfigError, error_prefix, MODEL_ERRORS):
            parts = find_parts(model)
        self.parts = parts
        self.layers = parts.layers
        self.num_layers = len(parts.layers)
        self.hidden_size: int = parts.embedded.shape[-1]
        self.vocab_size: int = parts.embedding.weight.shape[0]
        self._streams: int = parts.entered.shape[0]
        pairs = self.pairs()
        self.has_rollback = all(cache.rolls_back for _, cache in pairs if cache is not None)
        self.why_no_trees: str | None = "states that are rolled back by running rows again"
        if self.has_rollback:
            problems = (why_no_trees(layer, cache) for layer, cache in pairs)
            self.why_no_trees = next(filter(None, problems), None)
        if kernel_plan is not None and kernel_plan.exact:
            check_exact(pairs)
        self._interception = Interception.of(model, parts)
        # Where the CPU is the device, it has no time to gain by starting early.
        self.dispatches_early = mx.default_device() != mx.Device(mx.cpu)
        self.kernel_plan = kernel_plan
        self._embed_scale = internals.embed_scale(internals.backbone(internals.text_model(model)))
        if self._embed_scale is None and not internals.first_layer(model):
            self._embed_scale = scale_between(parts.embedded, parts.entered)
        evaluate(model)
        self._dispatch_after = frozenset(
            id(layer) for layer in self.layers[DISPATCH_EVERY - 1 : -1 : DISPATCH_EVERY]
        )
        self._taps: dict[tuple[int, ...], Taps] = {}

    def __repr__(self) -> str:
        """The name and the shape; MLX's own of `model` lists every layer."""
        return (
            f"Target({self.name!r}, num_layers={self.num_layers}, "
            f"hidden_size={self.hidden_size}, vocab_size={self.vocab_size})"
        )

    def embed(self, tokens: mx.array) -> mx.array:
        """Embeddings [N, S, D] of token ids [N, S], as the model feeds them to its first layer."""
        embeddings = self.parts.embedding(tokens)
        return embeddings if self._embed_scale is None else embeddings * self._embed_scale

    def head(self, hidden: mx.array) -> mx.array:
        """Logits [N, S, V] of normed hidden states [N, S, D], through the model's own module.

        Without the model's soft cap: drafters are trained on the bare head.
        """
        head = self.parts.head
        return self.parts.embedding.as_linear(hidden) if head is None else head(hidden)

    def head_rows(self, tokens: mx.array) -> mx.array:
        """The rows [N, D] of the head's matrix for these tokens [N]."""
        head: Any = self.parts.embedding if self.parts.head is None else self.parts.head
        if isinstance(head, nn.QuantizedLinear | nn.QuantizedEmbedding):
            biases = None if head.biases is None else head.biases[tokens]
            packed = (head.weight[tokens], head.scales[tokens], biases)
            return mx.dequantize(*packed, head.group_size, head.bits, head.mode)
        return head.weight[tokens]

    def norm_weight(self) -> mx.array:
        """The weight [D] of the norm before the head.

        Raises `SettingsError` for a model that does not end with one norm.
        """
        if self.parts.norm is None:
            raise SettingsError(f"{self.name} does not end with a norm of its own.")
        return cast(mx.array, self.parts.norm.weight)

    @property
    def kernel_plan(self) -> KernelPlan | None:
        """Which layers run on our Metal kernels; None where none does."""
        return self._kernel_plan

    @kernel_plan.setter
    def kernel_plan(self, kernel_plan: KernelPlan | None) -> None:
        self._kernel_plan = kernel_plan
        kernels = kernel_plan.kernels if kernel_plan is not None and kernel_plan.exact else None
        self._forward = partial(Forward, attend=attention_function(kernel_plan), kernels=kernels)
        self.steps = TracedSteps(partial(self._interception.run, self.model), self._forward)
        if self.dispatches_early:
            self.steps.why_not = "replayed steps were never timed on a GPU"
        elif kernel_plan is not None and not kernel_plan.kernels.on_device:
            self.steps.why_not = "the kernels are emulated"
        vars(self).pop("sharing", None)

    @cached_property
    def sharing(self) -> SharedForward | None:
        """What several requests share in a forward; None if each one has its own.

        Forwards are built for two new requests and never computed.
        """
        exact = self.kernel_plan is not None and self.kernel_plan.exact
        last_rows = self.parts.norm_runs_once and not self.is_distributed
        sharing = find_sharing(self.pairs(), exact, last_rows)
        # Without a rollback, kept rows run again, request by request.
        if sharing is None or not self.has_rollback:
            return None
        if not self._can_share(sharing, [Proposal([0, 0]), Proposal([0])]):
            return None
        if sharing.stacks and not self._can_share(sharing, [Proposal([0])] * 2, cached_tokens=1):
            return replace(sharing, stacks=False)
        return sharing

    def _can_share(
        self, sharing: SharedForward, proposals: Sequence[Proposal], cached_tokens: int = 0
    ) -> bool:
        """Whether a forward of these can be built, for requests that hold so many tokens."""
        sessions = [self.start() for _ in proposals]
        pairs = zip(sessions, proposals, strict=True)
        try:
            if cached_tokens:
                for session in sessions:
                    session.dry_run(cached_tokens)
            spans = [Span(session, proposal) for session, proposal in pairs]
            self.run_together(Rows(spans, slots=KVSlots(sharing.slot_layers)), sharing)
        except MODEL_ERRORS:
            return False
        return True

    @property
    def why_not_replayed(self) -> str | None:
        """What keeps steps from being replayed from traces; None if nothing is known to."""
        if self.steps.why_not is None and not self.start().can_trace:
            return "a trace cannot have its kind of caches"
        return self.steps.why_not

    @property
    def supports_trees(self) -> bool:
        """Whether draft trees can be verified; chains always can."""
        return self.why_no_trees is None

    def pairs(self) -> list[tuple[nn.Module | None, Any]]:
        """The layers with new caches, as `ModelParts.pairs`."""
        return self.parts.pairs(make_cache(self.model, self.parts.owners))

    def start(self, tap_layers: Sequence[int] = (), kv_bits: int | None = None) -> TargetSession:
        """Begin one request whose drafter reads the outputs of `tap_layers`.

        Args:
            tap_layers: the layers to read; -1 is the embedding's output.
            kv_bits: 8 or 4 keeps keys and values quantized; None keeps them as they are.

        Raises `SettingsError` for a layer that cannot be tapped, and when the model's caches cannot
        be quantized.
        """
        self._find_taps(tuple(tap_layers))
        return TargetSession(self, tap_layers, kv_bits)

    def cache_bytes(
        self, tokens: int, kv_bits: int | None = None, layers: Sequence[int] | None = None
    ) -> int:
        """Bytes of a request's caches after this many tokens. Nothing is computed.

        `layers` are the numbers of the caches to count; None counts all.
        """
        return self.start((), kv_bits).nbytes_after(tokens, layers)

    def check(self, proposal: Proposal) -> None:
        """Raise what `forward` raises for a proposal that this target cannot read."""
        most = None if self.kernel_plan is None else self.kernel_plan.widest
        if most is not None and len(proposal) > most:
            raise SettingsError(
                f"exact: at most {most} rows are verified at once; load the model with "
                'kernels="off" (--kernels off) for more.'
            )
        if not proposal.is_chain:
            self.check_trees()

    def check_rows(self, rows: Rows) -> None:
        """Raise what `forward` raises for rows that it cannot read."""
        rows.check_sessions()
        if not rows.is_prompt:
            for span in rows.spans:
                self.check(span.proposal)

    def check_trees(self) -> None:
        """Raise `UnsupportedTreeError` where draft trees cannot be verified."""
        if self.why_no_trees is not None:
            raise UnsupportedTreeError(
                f"{self.name} has {self.why_no_trees}, which cannot verify draft trees: draft "
                "chains."
            )

    def forward(self, rows: Rows, logits: Literal["all", "last"] = "all") -> Verified:
        """Read rows of one request or of many. Each session must commit its rows afterwards.

        One forward of the model, or several: in exact decoding a forward takes at most
        `KernelPlan.widest` rows, and some models read one request at a time. Whatever shares a
        forward, every request gets the same results.

        Args:
            rows: to verify, or of prompts. All requests have the same `tap_layers`.
            logits: "all" of the rows, or only each request's "last".

        Returns:
            The logits [R, V] after the rows, or [n, V] after each request's last row, and the rows'
            taps [1, R, K*D]. Nothing is evaluated.

        Raises, before anything has changed, `UnsupportedTreeError` for a tree that this target
        cannot read, and `SettingsError` for more rows of a request than exact verification takes,
        for requests with other `tap_layers`, for a session that is there twice, and for one whose
        last forward was not committed.
        """
        self.check_rows(rows)
        sharing = self.sharing if rows.is_shared else None
        results = [
            self.run_together(part, sharing, logits)
            for part in self._split_by_forward(rows, sharing)
        ]
        if len(results) == 1:
            return results[0]
        all_logits = mx.concatenate([part_logits for part_logits, _ in results])
        return all_logits, mx.concatenate([taps for _, taps in results], axis=1)

    def read(self, spans: Sequence[Span]) -> list[tuple[mx.array | None, mx.array]]:
        """Read tokens of prompts in one forward, and compute what the caches hold then.

        Args:
            spans: the tokens of each request; of one, unless `sharing.reads_prompts`.

        Returns, for each request, the logits [1, V] after its prompt, None if the prompt goes on,
        and the taps [1, S, K*D], which may still be lazy.
        """
        logits, taps = self.forward(Rows(spans, is_prompt=True), logits="last")
        ends = [
            logits[number : number + 1] if span.ends_prompt else None
            for number, span in enumerate(spans)
        ]
        held = [caches.arrays_of_all(span.session.cache) for span in spans]
        compute(held, [end for end in ends if end is not None])
        for span in spans:
            span.session.advance(len(span))
        mx.clear_cache()
        return [
            (end, taps[:, span.first : span.end]) for end, span in zip(ends, spans, strict=True)
        ]

    def features(
        self, tokens: mx.array, layers: Sequence[int], cache: Sequence[Any] | None = None
    ) -> Verified:
        """Teacher-forced logits [N, S, V] and taps [N, S, K*D] of sequences [N, S].

        With a cache, the sequences go on with what it holds. Raises `SettingsError` for a layer
        that cannot be tapped.
        """
        clean_up_at_end()
        taps = self._find_taps(tuple(layers))
        return self._interception.run(self.model, tokens, cache, taps, Forward(rows=None))

    def run_together(
        self, rows: Rows, sharing: SharedForward | None, logits: Literal["all", "last"] = "all"
    ) -> Verified:
        """One forward of this process's model over rows that can share it, as `forward`."""
        rows.arrange(sharing)
        for span in rows.spans:
            span.session.begin(span, all_kept=rows.is_prompt)
        ids = rows.tokens(self.vocab_size).reshape(rows.shape)
        taps = self._find_taps(rows.tap_layers)
        clean_up_at_end()
        verified = None if self.is_distributed else self.steps.replay(rows, ids, taps)
        all_logits, tapped = verified or self._run(rows, ids, taps, logits)
        for span in rows.spans:
            self._check_mask(span)
        tapped = tapped.reshape(1, len(rows), tapped.shape[-1])
        if logits == "last":
            all_logits = rows.last(all_logits)  # for models whose norm was not told to read those
        return all_logits.flatten(0, 1), tapped

    def _run(
        self, rows: Rows, ids: mx.array, taps: Taps, logits: Literal["all", "last"]
    ) -> Verified:
        """The model's logits [n, W, V] of rows with ids [n, W], and their taps [n, W, K*D]."""
        starts_early = self.dispatches_early and rows.starts_early
        forward = self._forward(
            rows,
            last_only=logits == "last",
            dispatch_after=self._dispatch_after if starts_early else frozenset(),
        )
        return self._interception.run(self.model, ids, rows.caches(), taps, forward)

    def _split_by_forward(self, rows: Rows, sharing: SharedForward | None) -> Iterator[Rows]:
        """The rows in as many parts as the model needs forwards. No request's rows are split."""
        if not rows.is_shared:
            yield rows
            return
        widths = [len(span) for span in rows.spans]
        most = None if self.kernel_plan is None else self.kernel_plan.widest
        first = 0
        for end in range(1, len(widths) + 1):
            must_end = sharing is None or end == len(widths)
            if must_end or (most is not None and sum(widths[first : end + 1]) > most):
                whole = first == 0 and end == len(widths)
                yield rows if whole else rows.part(first, end)
                first = end

    def _check_mask(self, span: Span) -> None:
        """Raise `UnsupportedTreeError` if a model has not asked for the mask of a tree."""
        if not span.is_chain and not span.mask_was_read and not span.session.needs_no_masks:
            raise UnsupportedTreeError("The target makes masks of its own: draft chains for it.")

    def _find_taps(self, tap_layers: tuple[int, ...]) -> Taps:
        """The taps of these layers. Raises `SettingsError` for a layer that cannot be tapped."""
        taps = self._taps.get(tap_layers)
        if taps is None:
            if tap_layers and self._streams > 1:
                raise SettingsError(
                    f"{self.name} has {self._streams} streams, which cannot be tapped."
                )
            for layer in tap_layers:
                if not EMBEDDING <= layer < self.num_layers:
                    raise SettingsError(
                        f"Layer {layer} cannot be tapped: {self.name} has {self.num_layers} layers."
                    )
            taps = self._make_taps(tap_layers)
            self._taps[tap_layers] = taps
        return taps

    def _make_taps(self, tap_layers: Sequence[int]) -> Taps:
        return Taps(self.layers, tap_layers)
