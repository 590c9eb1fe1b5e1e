"""Pairs of a target and a drafter, one for every kind of drafter."""

from __future__ import annotations

import functools
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import mlx.core as mx
from families import dspark_for, eagle3_for, family_target
from mlx.utils import tree_map
from mtp_heads import HEADS, INDEXED, save_pair
from tinymodels import random_drafter
from tinymodels import target as tiny_target

import dflash_mlx as dm
from dflash_mlx.drafter.config import DraftConfig
from dflash_mlx.drafter.draft_model import DraftModel
from dflash_mlx.drafter.gemma4_assistant import Gemma4Assistant
from dflash_mlx.drafter.lookup_drafter import CombinedDrafter, LookupDrafter
from dflash_mlx.drafter.networks import EMBEDDING, HEAD, network_for
from dflash_mlx.drafter.protocol import drafts_trees
from dflash_mlx.loading.load import load

Pair = tuple[dm.Target, Any]

LATTICE = {
    "candidate_topk": 3,
    "hidden_size": 8,
    "num_layers": 2,
    "num_heads": 2,
    "mlp_ratio": 2.0,
    "factor_dim": 8,
    "vector_eps": 1e-4,
    "logit_scale": 8.0,
}
LILICORR = {
    "architectures": ["LiLiCorrDraftModel"],
    "hidden_size": 32,
    "num_hidden_layers": 1,
    "intermediate_size": 32,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "head_dim": 16,
    "vocab_size": 16,
    "rms_norm_eps": 1e-5,
    "dflash_config": {
        "block_size": 4,
        "mask_token_id": 1,
        "target_layer_ids": [0, 2],
        **{f"lilicorr_{name}": value for name, value in LATTICE.items()},
    },
}
CONVOLVED = {"conv_kernel_size": 2, "conv_group_size": 8}
ASSISTANT = {
    "model_type": "gemma4_assistant",
    "backbone_hidden_size": 64,
    "text_config": {
        "hidden_size": 32,
        "num_hidden_layers": 4,
        "intermediate_size": 48,
        "num_attention_heads": 4,
        "head_dim": 32,
        "global_head_dim": 64,
        "vocab_size": 256,
        "sliding_window": 32,
        "layer_types": ["sliding_attention"] * 3 + ["full_attention"],
    },
    "num_centroids": 16,
    "centroid_intermediate_top_k": 4,
}
ORDERED = {"use_ordered_embeddings": True}
ROPE = {"rope_type": "proportional", "rope_theta": 1e6, "partial_rotary_factor": 0.25}
GEMMA4 = {
    "architectures": ["Gemma4DSparkModel"],
    "hidden_size": 64,
    "num_hidden_layers": 2,
    "intermediate_size": 96,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "num_global_key_value_heads": 1,
    "head_dim": 16,
    "global_head_dim": 32,
    "vocab_size": 256,
    "attention_k_eq_v": True,
    "hidden_activation": "gelu_pytorch_tanh",
    "rope_parameters": {"full_attention": ROPE},
    "layer_types": ["full_attention"] * 2,
    "final_logit_softcapping": 30.0,
    "target_layer_ids": [0, 2],
}
DSPARK = {"block_size": 6, "mask_token_id": 4, "markov_rank": 8, "enable_confidence_head": True}
NO_MARKOV = DSPARK | {"markov_rank": 0, "enable_confidence_head": False}
EAGLE = {"architectures": ["Gemma4Eagle3Model"], "num_hidden_layers": 1, "ttt_length": 7}
EAGLE |= {"layer_types": ["full_attention"]}


def noisy(network: Any, noise: float, seed: int) -> Any:
    """A network with random noise added to its weights, so that none is exactly 0 or 1."""
    mx.random.seed(seed)

    def add_noise(weight: mx.array) -> mx.array:
        return weight + noise * mx.random.normal(weight.shape)

    network.update(tree_map(add_noise, network.parameters()))
    return network


@functools.cache
def mtp(name: str) -> Pair:
    """A target and its MTP head, loaded from a folder as users do it."""
    with tempfile.TemporaryDirectory() as folder:
        model, draft = save_pair(Path(folder), name)
        return load(str(model), draft=draft)


def lilicorr_config(target: dm.Target, **changes: Any) -> dict[str, Any]:
    sizes = {"hidden_size": target.hidden_size, "vocab_size": target.vocab_size}
    return LILICORR | sizes | {"dflash_config": LILICORR["dflash_config"] | changes}


def lilicorr(**changes: Any) -> Pair:
    target = family_target("qwen3")
    config = DraftConfig.from_dict(lilicorr_config(target, **changes))
    return target, noisy(network_for(config)(config), 0.3, seed=4)


def assistant(name: str, **changes: Any) -> Pair:
    """A Gemma 4 target and an assistant with small queries, so that rounding is not magnified."""
    target = family_target(name)
    drafter = noisy(Gemma4Assistant(ASSISTANT | changes, target), 0.1, seed=5)
    for layer in drafter["model"]["layers"]:
        layer.self_attn.q_norm.weight *= 0.3
    if changes:
        drafter["masked_embedding"]["token_ordering"] = mx.random.permutation(mx.arange(256))
    return target, drafter


def gemma4(**changes: Any) -> Pair:
    """A drafter with Gemma 4's layers, an embedding and a head, as DeepSpec's drafters have."""
    config = DraftConfig.from_dict(GEMMA4 | changes)
    stored = (EMBEDDING, HEAD, "layers.0.self_attn.q_norm.weight")
    return family_target("gemma4_dense"), noisy(network_for(config)(config, stored), 0.1, seed=3)


def with_drafter(name: str, drafter_for: Callable[[dm.Target], Any]) -> Pair:
    target = family_target(name)
    return target, drafter_for(target)


PAIRS: dict[str, Callable[[], Pair]] = {
    "plain": lambda: (tiny_target(), None),
    "lookup": lambda: (tiny_target("gpt_oss"), LookupDrafter()),
    "DFlash": lambda: (tiny_target(), random_drafter()),
    "DFlash of windows": lambda: (tiny_target("sliding llama"), random_drafter()),
    "DFlash and lookup": lambda: (tiny_target("qwen3_moe"), CombinedDrafter(random_drafter())),
    "tiny": lambda: load("tiny", draft="tiny"),
    "tiny-dflash2": lambda: load("tiny", draft="tiny-dflash2"),
    "DSpark": lambda: with_drafter("qwen3", dspark_for),
    "EAGLE-3": lambda: with_drafter("qwen3", eagle3_for),
    "EAGLE-3 of a hybrid": lambda: with_drafter("qwen3_5", eagle3_for),
    "LiLiCorr": lilicorr,
    "LiLiCorr with convolutions": lambda: lilicorr(**CONVOLVED),
    **{f"MTP of {name}": functools.partial(mtp, name) for name in (*HEADS, *INDEXED)},
    "assistant": lambda: assistant("gemma4_dense"),
    "assistant of E4B": lambda: assistant("gemma4_E4B-like", **ORDERED),
    "Gemma 4 DSpark": lambda: gemma4(**DSPARK),
    "Gemma 4 EAGLE-3": lambda: gemma4(**EAGLE),
    "Gemma 4 DFlash": lambda: gemma4(**NO_MARKOV),
    "draft model": lambda: (family_target("gpt_oss"), DraftModel(family_target("gpt_oss", 1))),
    "draft model of others": lambda: (tiny_target(), DraftModel(tiny_target("llama"))),
}


@functools.cache
def pair(name: str) -> Pair:
    """A pair of `PAIRS`, shared by all tests.

    It has drafted before, so that an engine's thread finds all arrays computed.
    """
    target, drafter = PAIRS[name]()
    dm.generate(target, drafter, [1, 2, 3], max_tokens=8)
    if target.supports_trees and drafts_trees(drafter):
        dm.generate(target, drafter, [1, 2, 3], max_tokens=8, tree_budget=8)
    return target, drafter
