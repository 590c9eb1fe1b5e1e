"""The target model: its parts, and one request's forwards over its caches.

Weights are shared and never change; what a request changes lives in its `TargetSession`. This file
and its neighbours hold every touch of mlx-lm's model internals.
"""

from __future__ import annotations

import threading
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, Any

import mlx.core as mx
import mlx.nn as nn
from mlx_lm.models.cache import make_prompt_cache

from ..errors import ConfigError, SettingsError
from ..proposal import Proposal
from .rollback import rollback_for
from .taps import Taps

if TYPE_CHECKING:
    from mlx_lm.tokenizer_utils import TokenizerWrapper

PREFILL_STEP = 2048  # tokens per prefill forward, as in mlx-lm


class Target:
    """An mlx-lm model with its tokenizer, ready to verify drafts.

    Attributes:
        model: the mlx-lm module.
        tokenizer: mlx-lm's `TokenizerWrapper`.
        name: what it was loaded as.
        num_layers, hidden_size, vocab_size, context_length: its shape.

    Raises `ConfigError` for a family of another build, `UnsupportedCacheError` when its caches
    cannot be rolled back.
    """

    def __init__(
        self, model: nn.Module, tokenizer: TokenizerWrapper, config: dict[str, Any], name: str
    ) -> None:
        self.model, self.tokenizer, self.name = model, tokenizer, name
        text = getattr(model, "language_model", model)
        backbone = getattr(text, "model", None)
        if not (hasattr(backbone, "embed_tokens") and hasattr(backbone, "layers")):
            raise ConfigError(
                f"{name}: models of type {config.get('model_type')!r} are built in a way that this "
                "version does not know."
            )
        self._backbone: nn.Module = text.model
        self._forwards = threading.Lock()
        self._head: nn.Module | None = getattr(text, "lm_head", None)
        shape = config.get("text_config") or config
        self.num_layers = len(self._backbone.layers)
        self.hidden_size: int = shape["hidden_size"]
        self.vocab_size: int = shape["vocab_size"]
        self.context_length: int = shape.get("max_position_embeddings", 2**31)
        for cache in make_prompt_cache(model):
            rollback_for(cache)

    def embed(self, tokens: mx.array) -> mx.array:
        """Embeddings [N, S, D] of token ids [N, S], as the model feeds them to its first layer."""
        embeddings = self._backbone.embed_tokens(tokens)
        scale = getattr(self._backbone, "embed_scale", None)  # Gemma's, sqrt(D)
        return embeddings if scale is None else embeddings * scale

    def head(self, hidden: mx.array) -> mx.array:
        """Logits [N, S, V] of normed hidden states [N, S, D], through the model's own module.

        A soft cap of the model's is left out: drafters are trained on the bare head.
        """
        if self._head is not None:
            return self._head(hidden)
        return self._backbone.embed_tokens.as_linear(hidden)

    def tap(self, layers: Sequence[int]) -> Taps:
        """A recorder of these layers' outputs. Raises `SettingsError` for a layer it lacks."""
        for layer in layers:
            if not 0 <= layer < self.num_layers:
                raise SettingsError(f"Layer {layer} to tap: {self.name} has {self.num_layers}.")
        return Taps(self._backbone.layers, layers, self._forwards)

    def features(self, tokens: mx.array, layers: Sequence[int]) -> tuple[mx.array, mx.array]:
        """Teacher-forced logits [N, S, V] and taps [N, S, K*D] of whole sequences [N, S]."""
        taps = self.tap(layers)
        with taps.recording():
            logits = self.model(tokens)
        return logits, taps.take(tokens.shape[1])

    def start(self, tap_layers: Sequence[int] = ()) -> TargetSession:
        """Begin one request whose drafter reads the outputs of `tap_layers`."""
        return TargetSession(self, tap_layers)


class TargetSession:
    """One request's caches: prefill, then verify and commit in turn."""

    def __init__(self, target: Target, tap_layers: Sequence[int]) -> None:
        self._model = target.model
        self._taps = target.tap(tap_layers)
        self._cache = make_prompt_cache(target.model)
        self._rollback = [rollback_for(cache) for cache in self._cache]
        self._unsettled = 0  # rows of the last verify that commit has not decided about
        self.position = 0  # committed tokens in the caches

    def _forward(self, tokens: mx.array) -> tuple[mx.array, mx.array]:
        """Logits [1, N, V] and taps [1, N, K*D] of tokens [N] that follow what is cached."""
        with self._taps.recording():
            logits = self._model(tokens[None], cache=self._cache)
        return logits, self._taps.take(len(tokens))

    def prefill(self, tokens: Sequence[int]) -> Iterator[mx.array]:
        """Read the prompt in chunks and yield each chunk's taps, [1, S, K*D].

        The chunk's logits are never evaluated, so the vocabulary costs nothing here.
        """
        for start in range(0, len(tokens), PREFILL_STEP):
            chunk = mx.array(list(tokens[start : start + PREFILL_STEP]))
            _, taps = self._forward(chunk)
            mx.eval(taps, [cache.state for cache in self._cache])
            self.position += len(chunk)
            yield taps

    def verify(self, proposal: Proposal) -> tuple[mx.array, mx.array]:
        """One forward over the proposal: logits [N, V] after each row, and its taps [1, N, K*D].

        Lazy: nothing is evaluated yet. `commit` must follow before the next forward.
        Raises `SettingsError` for a tree: this version verifies chains.
        """
        if not proposal.is_chain:
            raise SettingsError("Draft trees are not supported yet: propose a chain.")
        self._unsettled = len(proposal)
        tokens = proposal.tokens
        logits, taps = self._forward(
            tokens if isinstance(tokens, mx.array) else mx.array(list(tokens))
        )
        return logits[0], taps

    def commit(self, kept: Sequence[int]) -> None:
        """Keep these rows of the last verify (a path from row 0) and remove the others."""
        rejected = self._unsettled - len(kept)
        if rejected:
            for cache, rollback in zip(self._cache, self._rollback, strict=True):
                rollback(cache, rejected)
        self.position += len(kept)
        self._unsettled = 0
