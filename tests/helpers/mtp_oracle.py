"""MTP heads in numpy, written from public code by someone who had not seen this package.

Sources: vllm/model_executor/models/{qwen3_5_mtp,deepseek_mtp,glm4_moe_mtp,mimo_mtp}.py and
vllm/v1/spec_decode; sglang's models/{qwen3_5_mtp,deepseek_nextn}.py; transformers' MtpModel and
MTPCandidateGenerator.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
from numpy_layers import attend, rms, rotate, sigmoid, softmax

F = np.float32
# Names by kind: the norms of embedding and feature, the projection of both, the layer's prefix, and
# the final norm.
NAMES = {
    "qwen": ("pre_fc_norm_embedding", "pre_fc_norm_hidden", "fc", "layers.0.", "norm"),
    "mimo": ("token_layernorm", "hidden_layernorm", "input_proj", "", "final_layernorm"),
    "deepseek": ("enorm", "hnorm", "eh_proj", "", "shared_head.norm"),
}


def frequencies(dims: int, theta: float) -> Any:
    return F(theta) ** (-np.arange(dims // 2, dtype=F) / (dims // 2))


class Head:
    """A head with the cache of one request."""

    def __init__(
        self,
        family: str,
        prefix: str,
        weights: Mapping[str, Any],
        config: Mapping[str, Any],
        embed: Any,
        lm_head: Any,
    ) -> None:
        kind = "deepseek"
        if family.startswith("qwen"):
            kind = "qwen"
        elif family == "mimo":
            kind = "mimo"
        self.enorm, self.hnorm, self.fuse, self.layer, self.final = NAMES[kind]
        self.kind = kind
        self.c = config
        self.embed = embed
        self.lm_head = lm_head
        self.w = {name.removeprefix(prefix): np.asarray(w, F) for name, w in weights.items()}
        self.keys: list[Any] = []
        self.values: list[Any] = []

    def draft(self, features: Any, tokens: Sequence[int], count: int) -> Any:
        """Add rows of features [T, D] and the token after each, then draft greedily.

        Returns the logits [count, V] of the drafts, whose rows are not kept in the cache.
        """
        hidden = self.rows(features, tokens)[-1:]
        kept = len(self.keys)
        rows = [self.normed(hidden) @ self.lm_head.T]
        while len(rows) < count:
            hidden = self.rows(self.normed(hidden), [int(rows[-1].argmax())])
            rows.append(self.normed(hidden) @ self.lm_head.T)
        del self.keys[kept:], self.values[kept:]
        return np.concatenate(rows)

    def normed(self, x: Any) -> Any:
        return self.norm(x, self.final)

    def norm(self, x: Any, name: str) -> Any:
        weight = self.w[f"{name}.weight"]
        if self.kind == "qwen":  # stores norms minus 1
            weight = weight + 1
        return rms(x, weight, self.c["rms_norm_eps"])

    def linear(self, x: Any, name: str) -> Any:
        return x @ self.w[f"{name}.weight"].T + self.w.get(f"{name}.bias", F(0))

    def rows(self, features: Any, tokens: Sequence[int]) -> Any:
        positions = np.arange(len(self.keys), len(self.keys) + len(tokens))
        pair = [self.norm(self.embed[list(tokens)], self.enorm), self.norm(features, self.hnorm)]
        if self.kind == "mimo":
            pair.reverse()
        x = self.linear(np.concatenate(pair, -1), self.fuse)
        is_latent = f"{self.layer}self_attn.kv_b_proj.weight" in self.w
        attention = self.latent_attention if is_latent else self.attention
        x = x + attention(self.norm(x, f"{self.layer}input_layernorm"), positions)
        return x + self.mlp(self.norm(x, f"{self.layer}post_attention_layernorm"))

    def attend(self, q: Any, k: Any, v: Any) -> Any:
        start = len(self.keys)
        self.keys.extend(k)
        self.values.extend(v)
        keys = np.stack(self.keys)
        values = np.stack(self.values)
        visible = np.arange(len(keys))[None] <= np.arange(start, start + len(q))[:, None]
        return attend(q, keys, values, visible, F(q.shape[-1] ** -0.5))

    def attention(self, x: Any, positions: Any) -> Any:
        c = self.c
        p = f"{self.layer}self_attn."
        heads = self.c["num_attention_heads"]
        size = c.get("head_dim") or c["hidden_size"] // heads
        rope = c.get("rope_parameters") or c
        q = self.linear(x, f"{p}q_proj")
        gate = None
        if self.kind == "qwen":  # per head [q ; gate]
            q, gate = np.split(q.reshape(len(x), heads, 2 * size), 2, axis=-1)
        q = q.reshape(len(x), heads, size)
        k = self.linear(x, f"{p}k_proj").reshape(len(x), -1, size)
        v = self.linear(x, f"{p}v_proj").reshape(len(x), -1, size)
        if f"{p}q_norm.weight" in self.w:
            q = self.norm(q, f"{p}q_norm")
            k = self.norm(k, f"{p}k_norm")
        dims = int(size * rope.get("partial_rotary_factor", 1))
        freqs = frequencies(dims, rope["rope_theta"])
        q = rotate(q, positions, freqs)
        k = rotate(k, positions, freqs)
        out = self.attend(q, k, v)
        if gate is not None:
            out = out * sigmoid(gate.reshape(out.shape))
        return self.linear(out, f"{p}o_proj")

    def latent_attention(self, x: Any, positions: Any) -> Any:
        """DeepSeek's MLA, expanded. The norms in it have eps 1e-6."""
        c = self.c
        p = f"{self.layer}self_attn."
        heads = self.c["num_attention_heads"]
        nope = c["qk_nope_head_dim"]
        rank = c["kv_lora_rank"]
        q = rms(self.linear(x, f"{p}q_a_proj"), self.w[f"{p}q_a_layernorm.weight"], 1e-6)
        q = self.linear(q, f"{p}q_b_proj").reshape(len(x), heads, -1)
        latent, rope_key = np.split(self.linear(x, f"{p}kv_a_proj_with_mqa"), [rank], axis=-1)
        latent = rms(latent, self.w[f"{p}kv_a_layernorm.weight"], 1e-6)
        both = self.linear(latent, f"{p}kv_b_proj").reshape(len(x), heads, -1)
        k, v = np.split(both, [nope], axis=-1)
        freqs = frequencies(c["qk_rope_head_dim"], c["rope_theta"])
        rotated_q = rotate(q[..., nope:], positions, freqs, pairs=True)
        rotated_k = rotate(rope_key[:, None], positions, freqs, pairs=True)
        q = np.concatenate([q[..., :nope], rotated_q], -1)
        k = np.concatenate([k, rotated_k.repeat(heads, 1)], -1)
        return self.linear(self.attend(q, k, v), f"{p}o_proj")

    def swiglu(self, x: Any, name: str) -> Any:
        gate = self.linear(x, f"{name}gate_proj")
        return self.linear(
            gate * sigmoid(gate) * self.linear(x, f"{name}up_proj"), f"{name}down_proj"
        )

    def mlp(self, x: Any) -> Any:
        p = f"{self.layer}mlp."
        if f"{p}gate.weight" not in self.w:
            return self.swiglu(x, p)
        chosen, weights = self.route(self.linear(x, f"{p}gate"))
        out = np.zeros_like(x)
        for row in range(len(x)):
            for expert, weight in zip(chosen[row], weights[row], strict=True):
                if f"{p}experts.gate_up_proj" in self.w:
                    both = self.w[f"{p}experts.gate_up_proj"][expert] @ x[row]
                    gate, up = np.split(both, 2)
                    output = self.w[f"{p}experts.down_proj"][expert] @ (gate * sigmoid(gate) * up)
                else:
                    output = self.swiglu(x[row][None], f"{p}experts.{expert}.")[0]
                out[row] += F(weight) * output
        if f"{p}shared_expert_gate.weight" in self.w:
            gate = sigmoid(self.linear(x, f"{p}shared_expert_gate"))
            return out + gate * self.swiglu(x, f"{p}shared_expert.")
        return out + self.swiglu(x, f"{p}shared_experts.")

    def route(self, logits: Any) -> Any:
        """Experts and their weights, from a softmax (Qwen) or a sigmoid.

        The bias of a sigmoid is used to choose experts, but not for their weights.
        """
        bias = self.w.get(f"{self.layer}mlp.gate.e_score_correction_bias")
        scores = softmax(logits) if bias is None else sigmoid(logits)
        choice = scores if bias is None else scores + bias
        chosen = np.argsort(-choice, -1, kind="stable")[:, : self.c["num_experts_per_tok"]]
        weights = np.take_along_axis(scores, chosen, -1)
        scale = self.c.get("routed_scaling_factor", 1.0)
        return chosen, weights / weights.sum(-1, keepdims=True) * F(scale)
