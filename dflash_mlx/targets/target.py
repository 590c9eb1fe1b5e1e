"""The target: an mlx-lm model with its tokenizer, ready to verify drafts."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, cast

import mlx.core as mx
import mlx.nn as nn

from ..errors import SettingsError
from ..validation import text_config
from . import internals
from .model import TargetModel
from .parts import scale_between
from .session import TargetSession

if TYPE_CHECKING:
    from mlx_lm.tokenizer_utils import TokenizerWrapper

    from ..kernels.modules import Wiring


class Target(TargetModel):
    """An mlx-lm model with its tokenizer, ready to verify drafts. Its methods are the loop's.

    Attributes:
        tokenizer: mlx-lm's `TokenizerWrapper`.
        config: its config.json.
        context_length: tokens that it was made for.
        sampling_defaults: the publisher's sampling settings; `dm.generate` does not use them.

    Raises `ConfigError` for a model that cannot run.
    """

    def __init__(
        self,
        model: nn.Module,
        tokenizer: TokenizerWrapper,
        config: dict[str, Any],
        name: str,
        wiring: Wiring | None = None,
    ) -> None:
        super().__init__(model, name, wiring)
        self.tokenizer, self.config = tokenizer, config
        self.sampling_defaults: Mapping[str, Any] = {}
        self.context_length = int(text_config(config).get("max_position_embeddings") or 2**31)
        self._embedding, self._head = self.parts.embedding, self.parts.head
        self._embed_scale = internals.embed_scale(internals.backbone(internals.text_model(model)))
        if self._embed_scale is None and not internals.first_layer(model):
            self._embed_scale = scale_between(self.parts.embedded, self.parts.entered)

    def __repr__(self) -> str:
        """The name and the shape; MLX's own of `model` lists every layer."""
        return (
            f"Target({self.name!r}, num_layers={self.num_layers}, "
            f"hidden_size={self.hidden_size}, vocab_size={self.vocab_size})"
        )

    def embed(self, tokens: mx.array) -> mx.array:
        """Embeddings [N, S, D] of token ids [N, S], as the model feeds them to its first layer."""
        embeddings = self._embedding(tokens)
        return embeddings if self._embed_scale is None else embeddings * self._embed_scale

    def head(self, hidden: mx.array) -> mx.array:
        """Logits [N, S, V] of normed hidden states [N, S, D], through the model's own module.

        Without the model's soft cap: drafters are trained on the bare head.
        """
        return self._embedding.as_linear(hidden) if self._head is None else self._head(hidden)

    def head_rows(self, tokens: mx.array) -> mx.array:
        """The rows [N, D] of the head's matrix for these tokens [N]."""
        head: Any = self._embedding if self._head is None else self._head
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

    def features(
        self, tokens: mx.array, layers: Sequence[int], cache: Sequence[Any] | None = None
    ) -> tuple[mx.array, mx.array]:
        """Teacher-forced logits [N, S, V] and taps [N, S, K*D] of sequences [N, S].

        With a cache, the sequences go on with what it holds. Raises `SettingsError` for a layer
        that cannot be tapped.
        """
        with self.forward_lock:
            self.prepare(tuple(layers))
        return self.forward(tokens, cache, tuple(layers))

    def start(self, tap_layers: Sequence[int] = (), kv_bits: int | None = None) -> TargetSession:
        """Begin one request whose drafter reads the outputs of `tap_layers`.

        Args:
            tap_layers: the layers to read.
            kv_bits: 8 or 4 keeps keys and values quantized; None keeps them as they are.

        Raises `SettingsError` when the model's caches cannot be quantized.
        """
        with self.forward_lock:  # another thread's forward changes the modules' classes
            return TargetSession(self, tap_layers, kv_bits)

    def cache_bytes(
        self, tokens: int, kv_bits: int | None = None, layers: Sequence[int] | None = None
    ) -> int:
        """Bytes of a request's caches after this many tokens. Nothing is computed.

        `layers` are the numbers of the caches to count; None counts all.
        """
        return self.start((), kv_bits).nbytes_after(tokens, layers)

    def verify_batch(self, forward: Callable[..., Any], sessions: Any, proposals: Any) -> Any:
        """Run a `BatchVerifier`'s forward; a distributed target also runs it on the other ranks."""
        return forward(sessions, proposals)
