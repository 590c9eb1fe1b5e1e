"""Gemma 4's assistant in numpy, written from public code by somebody who had not seen this package.

Sources: transformers' gemma4_assistant, gemma4 and SinglePositionMultiTokenCandidateGenerator;
vllm/model_executor/models/gemma4_mtp.py and vllm/v1/spec_decode/gemma4.py.

The target has read n tokens; the one after them is the anchor. Where the two disagree:

- Position of the queries: vLLM n - 1, that of the hidden state; transformers n. Here a parameter.
- Keys in the window: vLLM the newest `sliding_window`; transformers' mask lets one more through.
- Rows of keys: vLLM n; transformers n + 1, which after a rejection has a rejected token's row.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

F = np.float32
ROPE = {  # transformers' defaults: theta, and the share of the pairs that turn
    "sliding_attention": (10_000.0, 1.0),
    "full_attention": (1_000_000.0, 0.25),
}


def rms(x, weight, eps):
    return x / np.sqrt(np.mean(x * x, axis=-1, keepdims=True, dtype=F) + F(eps)) * weight


def gelu(x):
    return F(0.5) * x * (F(1) + np.tanh(F(np.sqrt(2 / np.pi)) * (x + F(0.044715) * x**3)))


def rotate(x, position, theta, share):  # x [heads, dim]
    half = x.shape[-1] // 2
    turned = int(share * half)
    angle = np.zeros(half)
    angle[:turned] = position * theta ** (-np.arange(turned) / half)
    cos, sin, a, b = np.cos(angle).astype(F), np.sin(angle).astype(F), x[:, :half], x[:, half:]
    return np.concatenate([a * cos - b * sin, b * cos + a * sin], axis=-1)


def attend(queries, keys, values):
    """Queries [heads, dim] over keys and values [KV, S, dim], unscaled."""
    group, out = len(queries) // len(keys), []
    for head, query in enumerate(queries):
        scores = keys[head // group] @ query
        weights = np.exp(scores - scores.max())
        out.append(weights / weights.sum() @ values[head // group])
    return np.concatenate(out)


class Assistant:
    """Weights by their published names, the config, and the target's embedding, unscaled."""

    def __init__(
        self,
        weights: Mapping[str, np.ndarray],
        config: Mapping[str, Any],
        embedding: np.ndarray,
        *,
        swapped: bool = False,  # a planted mistake: [hidden, embedding]
    ) -> None:
        self.w, self.config, self.embedding, self.swapped = weights, config, embedding, swapped
        self.text, self.eps = config["text_config"], config["text_config"].get("rms_norm_eps", 1e-6)

    def norm(self, name, x):
        return rms(x, self.w[f"{name}.weight"], self.eps)

    def layer(self, at, x, shared, position):
        name, kind = f"model.layers.{at}.", self.text["layer_types"][at]
        keys, values = shared[kind]
        if kind == "sliding_attention":
            keys, values = (each[:, -self.text["sliding_window"] :] for each in (keys, values))
        heads = self.text["num_attention_heads"]
        queries = self.w[f"{name}self_attn.q_proj.weight"] @ self.norm(f"{name}input_layernorm", x)
        queries = self.norm(f"{name}self_attn.q_norm", queries.reshape(heads, -1))
        out = attend(rotate(queries, position, *ROPE[kind]), keys, values)
        out = self.w[f"{name}self_attn.o_proj.weight"] @ out
        x = x + self.norm(f"{name}post_attention_layernorm", out)
        out = self.norm(f"{name}pre_feedforward_layernorm", x)
        gate, up, down = (self.w[f"{name}mlp.{one}_proj.weight"] for one in ("gate", "up", "down"))
        out = down @ (gelu(gate @ out) * (up @ out))
        x = x + self.norm(f"{name}post_feedforward_layernorm", out)
        return x * self.w[f"{name}layer_scalar"]

    def logits(self, x):
        table = self.w["model.embed_tokens.weight"]
        if not self.config.get("use_ordered_embeddings"):
            return table @ x
        best = np.argsort(-(self.w["masked_embedding.centroids.weight"] @ x))
        clusters = self.w["masked_embedding.token_ordering"].reshape(len(best), -1)
        ids = clusters[best[: self.config["centroid_intermediate_top_k"]]].flatten()
        logits = np.full(len(table), -np.inf, F)
        logits[ids] = table[ids] @ x
        return logits

    def draft(
        self,
        anchor: int,
        hidden: np.ndarray,
        shared: Mapping[str, Sequence[np.ndarray]],
        count: int,
        position: int,
    ) -> tuple[list[int], np.ndarray]:
        """Greedy drafts and their logits [count, V]; keys and values are [KV, S, dim] by kind."""
        drafts, rows = [anchor], []
        for _ in range(count):
            embedded = self.embedding[drafts[-1]] * F(self.config["backbone_hidden_size"] ** 0.5)
            both = [hidden, embedded] if self.swapped else [embedded, hidden]
            x = self.w["pre_projection.weight"] @ np.concatenate(both)
            for at in range(len(self.text["layer_types"])):
                x = self.layer(at, x, shared, position)
            x = self.norm("model.norm", x)
            hidden = self.w["post_projection.weight"] @ x
            rows.append(self.logits(x))
            drafts.append(int(rows[-1].argmax()))
        return drafts[1:], np.stack(rows)
