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
    "hidden_size": 64,
    "num_hidden_layers": 3,
    "intermediate_size": 128,
    "vocab_size": 256,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "rms_norm_eps": 1e-6,
    "rope_theta": 10000.0,
    "tie_word_embeddings": False,
    "num_nextn_predict_layers": 1,
}
HEADS = ("qwen3_5", "qwen3_5_moe", "qwen3_next", "glm4_moe", "deepseek_v3", "mimo", "nemotron_h")
INDEXED = ("deepseek_v32", "glm_moe_dsa")
SHAPES = json.loads((Path(__file__).parents[1] / "data" / "mtp_heads.json").read_text())


def config_of(family: str) -> dict[str, Any]:
    config = copy.deepcopy(MIMO if family == "mimo" else CONFIGS[family])
    if family in ("deepseek_v3", "deepseek_v32"):
        config["rope_scaling"] = None
    return config


def shapes_of(family: str) -> dict[str, tuple[int, ...]]:
    """The shapes of a head's tensors by their published names.

    A `*` in the data stands for the number of each expert.
    """
    config = config_of(family)
    config = config.get("text_config", config)
    experts = range(config.get("num_experts") or config.get("n_routed_experts") or 1)
    shapes = {}
    for name, shape in SHAPES[family].items():
        for expert in experts:
            shapes[name.replace("*", str(expert))] = tuple(shape)
    return shapes


def head_weights(family: str, seed: int = 0) -> dict[str, np.ndarray]:
    """Random tensors of a head."""
    draws = np.random.default_rng(seed)
    weights = {}
    for name, shape in shapes_of(family).items():
        noise = draws.standard_normal(shape)
        value = noise / np.sqrt(shape[-1]) if len(shape) > 1 else 0.1 * noise
        is_norm = "norm" in name and name.endswith("weight")
        if is_norm and not family.startswith("qwen"):  # Qwen stores norms minus 1
            value = value + 1
        weights[name] = value.astype(np.float32)
    return weights


def save_pair(folder: Path, family: str, seed: int = 0) -> tuple[Path, str]:
    """Save a target with an MTP head: its folder, and the `draft` argument of `load`.

    That is "mtp" if the head is in the target's folder, else the folder of the head: mlx-lm drops
    DeepSeek-V3's head only as layer 61, and Qwen3-Next's only in unconverted files.
    """
    config = config_of(family)
    head = {name: mx.array(value) for name, value in head_weights(family, seed).items()}
    weights = dict(tree_flatten(model_of(config, seed, 77 + seed).parameters()))
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(json.dumps(config))
    tokenizer().save_pretrained(folder)
    drafter = "mtp"
    if family in ("deepseek_v3", "qwen3_next"):
        head_folder = folder / "head"
        head_folder.mkdir(exist_ok=True)
        (head_folder / "config.json").write_text(json.dumps({"model_type": f"{family}_mtp"}))
        mx.save_safetensors(str(head_folder / "mtp.safetensors"), head)
        drafter = str(head_folder)
    else:
        weights |= head
    mx.save_safetensors(str(folder / "model.safetensors"), weights)
    return folder, drafter
