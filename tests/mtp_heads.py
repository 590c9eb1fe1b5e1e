"""MTP heads with random weights, by their published tensor names and shapes.

Names and shapes are those of the indexes of Qwen3.5, Qwen3-Next, GLM-4.5, DeepSeek-V3, GLM-5, MiMo
and Nemotron-H.
"""

from __future__ import annotations

import copy
import json
from pathlib import Path
from typing import Any

import mlx.core as mx
import numpy as np
from families import CONFIGS, model_of
from mlx.utils import tree_flatten
from tinymodels import tokenizer

MIMO = {
    "model_type": "mimo",
    **{"hidden_size": 64, "num_hidden_layers": 3, "intermediate_size": 128, "vocab_size": 256},
    **{"num_attention_heads": 4, "num_key_value_heads": 2, "rms_norm_eps": 1e-6},
    **{"rope_theta": 10000.0, "tie_word_embeddings": False, "num_nextn_predict_layers": 1},
}
HEADS = ("qwen3_5", "qwen3_5_moe", "qwen3_next", "glm4_moe", "deepseek_v3", "mimo", "nemotron_h")
INDEXED = ("deepseek_v32", "glm_moe_dsa")


def config_of(family: str) -> dict[str, Any]:
    config = copy.deepcopy(MIMO if family == "mimo" else CONFIGS[family])
    if family in ("deepseek_v3", "deepseek_v32"):
        config["rope_scaling"] = None
    return config


class Shapes:
    """Collects the tensors of a head by their published names."""

    def __init__(self, config: dict[str, Any]) -> None:
        self.c = config.get("text_config", config)
        self.found: dict[str, tuple[int, ...]] = {}
        self.hidden = self.c["hidden_size"]

    def add(self, prefix: str, **shapes: tuple[int, ...]) -> None:
        for name, shape in shapes.items():
            self.found[prefix + name.replace("__", ".")] = shape

    def linear(self, prefix: str, width: int, **rows: int) -> None:
        self.add(prefix, **{f"{name}__weight": (count, width) for name, count in rows.items()})

    def norms(self, prefix: str, *names: str, width: int = 0) -> None:
        self.add(prefix, **{f"{name}__weight": (width or self.hidden,) for name in names})

    def mlp(self, prefix: str, inner: int) -> None:
        self.linear(prefix, self.hidden, gate_proj=inner, up_proj=inner)
        self.linear(prefix, inner, down_proj=self.hidden)

    def attention(self, prefix: str, gated: bool = False, bias: bool = False) -> None:
        c = self.c
        size = c.get("head_dim") or self.hidden // c["num_attention_heads"]
        rows = c["num_attention_heads"] * size, c["num_key_value_heads"] * size
        projections = {"q_proj": rows[0] * (1 + gated), "k_proj": rows[1], "v_proj": rows[1]}
        self.linear(prefix, self.hidden, **projections)
        self.linear(prefix, rows[0], o_proj=self.hidden)
        if bias:
            self.add(prefix, **{f"{name}__bias": (n,) for name, n in projections.items()})
        if gated or c.get("use_qk_norm"):
            self.norms(prefix, "q_norm", "k_norm", width=size)

    def latent(self, prefix: str) -> None:
        c, heads = self.c, self.c["num_attention_heads"]
        nope, rope, rank = c["qk_nope_head_dim"], c["qk_rope_head_dim"], c["kv_lora_rank"]
        self.linear(prefix, self.hidden, q_a_proj=c["q_lora_rank"], kv_a_proj_with_mqa=rank + rope)
        self.linear(prefix, c["q_lora_rank"], q_b_proj=heads * (nope + rope))
        self.linear(prefix, rank, kv_b_proj=heads * (nope + c["v_head_dim"]))
        self.linear(prefix, heads * c["v_head_dim"], o_proj=self.hidden)
        self.norms(prefix, "q_a_layernorm", width=c["q_lora_rank"])
        self.norms(prefix, "kv_a_layernorm", width=rank)
        if "index_topk" in c:
            prefix, size = f"{prefix}indexer.", c["index_head_dim"]
            self.linear(prefix, c["q_lora_rank"], wq_b=c["index_n_heads"] * size)
            self.linear(prefix, self.hidden, wk=size, weights_proj=c["index_n_heads"])
            self.add(prefix, k_norm__weight=(size,), k_norm__bias=(size,))

    def experts(self, prefix: str, shared: str, fused: bool = False, gated: bool = True) -> None:
        c, inner = self.c, self.c["moe_intermediate_size"]
        count = c.get("num_experts") or c["n_routed_experts"]
        self.linear(prefix, self.hidden, gate=count)
        if fused:
            self.add(
                f"{prefix}experts.",
                gate_up_proj=(count, 2 * inner, self.hidden),
                down_proj=(count, self.hidden, inner),
            )
        for expert in range(0 if fused else count):
            self.mlp(f"{prefix}experts.{expert}.", inner)
        self.mlp(f"{prefix}{shared}.", c.get("shared_expert_intermediate_size") or inner)
        if shared == "shared_expert":
            self.linear(prefix, self.hidden, shared_expert_gate=1)
        else:
            self.add(prefix, gate__e_score_correction_bias=(count,))
        if not gated:
            self.found = {n: s for n, s in self.found.items() if not n.endswith("gate_proj.weight")}


def shapes_of(family: str, config: dict[str, Any]) -> dict[str, tuple[int, ...]]:
    """The shapes of a head's tensors by their published names."""
    head, c = Shapes(config), config.get("text_config", config)
    wide, layers = 2 * head.hidden, c["num_hidden_layers"]
    if family.startswith("qwen"):
        head.norms("mtp.", "pre_fc_norm_embedding", "pre_fc_norm_hidden", "norm")
        head.linear("mtp.", wide, fc=head.hidden)
        prefix = "mtp.layers.0."
        head.attention(f"{prefix}self_attn.", gated=True)
        if c.get("num_experts"):
            head.experts(f"{prefix}mlp.", "shared_expert", fused=family == "qwen3_5_moe")
        else:
            head.mlp(f"{prefix}mlp.", c["intermediate_size"])
    elif family == "mimo":
        prefix = "model.mtp_layers.0."
        head.norms(prefix, "token_layernorm", "hidden_layernorm", "final_layernorm")
        head.linear(prefix, wide, input_proj=head.hidden)
        head.attention(f"{prefix}self_attn.", bias=True)
        head.mlp(f"{prefix}mlp.", c["intermediate_size"])
    elif family == "nemotron_h":
        head.norms("mtp.layers.0.", "enorm", "hnorm", "norm")
        head.linear("mtp.layers.0.", wide, eh_proj=head.hidden)
        head.attention("mtp.layers.0.mixer.")
        head.norms("mtp.layers.1.", "norm", "final_layernorm")
        head.experts("mtp.layers.1.mixer.", "shared_experts", gated=False)
        return head.found
    else:
        prefix = f"model.layers.{layers}."
        head.norms(prefix, "enorm", "hnorm", "shared_head.norm")
        head.linear(prefix, wide, eh_proj=head.hidden)
        head.linear(prefix, head.hidden, embed_tokens=c["vocab_size"])
        head.linear(prefix, head.hidden, shared_head__head=c["vocab_size"])
        if "kv_lora_rank" in c:
            head.latent(f"{prefix}self_attn.")
        else:
            head.attention(f"{prefix}self_attn.", bias=c["attention_bias"])
        head.experts(f"{prefix}mlp.", "shared_experts")
    head.norms(prefix, "input_layernorm", "post_attention_layernorm")
    return head.found


def head_weights(family: str, seed: int = 0) -> dict[str, np.ndarray]:
    """Random tensors of a head."""
    draws, weights = np.random.default_rng(seed), {}
    for name, shape in shapes_of(family, config_of(family)).items():
        noise = draws.standard_normal(shape)
        scaled = noise / np.sqrt(shape[-1]) if len(shape) > 1 else 0.1 * noise
        is_norm = "norm" in name and name.endswith("weight") and not family.startswith("qwen")
        weights[name] = (scaled + is_norm).astype(np.float32)
    return weights


def save_pair(folder: Path, family: str, seed: int = 0) -> tuple[Path, str]:
    """A target's folder, and the drafter: "mtp" for a head in it, or the head's own folder.

    mlx-lm drops DeepSeek-V3's head by the number 61, and Qwen3-Next's in unconverted files only.
    """
    config = config_of(family)
    head = {name: mx.array(value) for name, value in head_weights(family, seed).items()}
    weights = dict(tree_flatten(model_of(config, seed, 77 + seed).parameters()))
    apart = folder / "head" if family in ("deepseek_v3", "qwen3_next") else None
    (apart or folder).mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(json.dumps(config))
    if apart is not None:
        (apart / "config.json").write_text(json.dumps({"model_type": f"{family}_mtp"}))
        mx.save_safetensors(str(apart / "mtp.safetensors"), head)
    mx.save_safetensors(str(folder / "model.safetensors"), weights | ({} if apart else head))
    tokenizer().save_pretrained(folder)
    return folder, str(apart or "mtp")
