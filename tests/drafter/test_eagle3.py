"""EAGLE-3 drafters against a numpy oracle written from their authors' code."""

import functools
import json
from pathlib import Path
from types import SimpleNamespace

import mlx.core as mx
import numpy as np
import pytest
from numpy_layers import attend, rms, rotate, sigmoid

from dflash_mlx.drafter.stepwise import StepwiseSession
from dflash_mlx.loading.drafter_loader import read_drafter
from dflash_mlx.loading.folder import Folder
from dflash_mlx.sampling import Sampler

# EAGLE-3 in f32 numpy, written from its authors' public code by someone who did not see ours.
#
# Sources: SafeAILab/EAGLE eagle/model/cnets.py; vllm-project/speculators models/eagle3;
# sgl-project/sglang srt/models/llama_eagle3.py; vllm-project/vllm models/llama_eagle3.py.
#
# Row i pairs the features of token i with the embedding of token i + 1, at position i. The residual
# stream begins with the fused features, or with their norm (`norm_before_residual`). Drafted rows
# take the network's own hidden state, before the final norm unless `norm_output` is set, and never
# stay in the cache.

F = np.float32
SHAPES = json.loads((Path(__file__).parents[1] / "data" / "eagle3_heads.json").read_text())


class Oracle:
    """An EAGLE-3 head: weights by their published names, and the fields of a flat config."""

    def __init__(self, weights, config):
        self.w = {
            name.removeprefix("model.").replace("midlayer.", "layers.0."): np.asarray(value)
            for name, value in weights.items()
        }
        self.c = config
        self.heads = config["num_attention_heads"]
        self.kv = config["num_key_value_heads"]
        self.dim = config["head_dim"]
        exponents = np.arange(0, self.dim, 2, dtype=F) / self.dim
        self.inv_freq = (1.0 / config["rope_theta"] ** exponents).astype(F)
        self.window = config.get("sliding_window")
        self.depth = config["num_hidden_layers"]
        no_rows = np.zeros((0, self.kv, self.dim), F)
        self.cache = [(no_rows, no_rows) for _ in range(self.depth)]  # (keys, values) by layer

    def linear(self, x, name):
        return x @ self.w[name + ".weight"].T

    def norm(self, x, name):
        return rms(x, self.w[name + ".weight"], self.c["rms_norm_eps"])

    def fuse(self, taps):
        """taps [S, 3*Dt] (low, mid, high) -> [S, D]"""
        if self.c.get("fc_norm"):
            parts = np.split(taps, 3, -1)
            normed = [self.norm(part, f"fc_norm.{index}") for index, part in enumerate(parts)]
            taps = np.concatenate(normed, -1)
        if self.c.get("norm_before_fc"):
            taps = self.norm(taps, "input_norm")
        return self.linear(taps, "fc")

    def attend(self, x, layer, positions):
        p = f"layers.{layer}.self_attn."
        q = self.linear(x, p + "q_proj").reshape(len(x), self.heads, self.dim)
        k = self.linear(x, p + "k_proj").reshape(len(x), self.kv, self.dim)
        v = self.linear(x, p + "v_proj").reshape(len(x), self.kv, self.dim)
        if p + "q_norm.weight" in self.w:
            q = self.norm(q, p + "q_norm")
            k = self.norm(k, p + "k_norm")
        q = rotate(q, positions, self.inv_freq)
        k = rotate(k, positions, self.inv_freq)
        keys, values = self.cache[layer]
        first = len(keys)
        keys = np.concatenate([keys, k])
        values = np.concatenate([values, v])
        self.cache[layer] = (keys, values)
        row = np.arange(len(x))[:, None] + first
        col = np.arange(len(keys))[None]
        visible = col <= row
        if self.window:
            visible &= row - col < self.window
        out = attend(q, keys, values, visible, self.dim**-0.5)
        return self.linear(out, p + "o_proj")

    def mlp(self, x, layer):
        p = f"layers.{layer}.mlp."
        gate = self.linear(x, p + "gate_proj")
        return self.linear(gate * sigmoid(gate) * self.linear(x, p + "up_proj"), p + "down_proj")

    def rows(self, features, tokens):
        """Hidden states before the final norm, of features [S, D] and the tokens [S] after them."""
        positions = len(self.cache[0][0]) + np.arange(len(tokens))
        embeddings = self.norm(
            self.w["embed_tokens.weight"][np.asarray(tokens)], "layers.0.input_layernorm"
        )
        normed = self.norm(features, "layers.0.hidden_norm")
        h = normed if self.c.get("norm_before_residual") else features
        for layer in range(self.depth):
            p = f"layers.{layer}."
            x = np.concatenate([embeddings, normed], -1)
            if layer:
                x = self.norm(h, p + "input_layernorm")
            h = h + self.attend(x, layer, positions)
            h = h + self.mlp(self.norm(h, p + "post_attention_layernorm"), layer)
        return h

    def extend(self, next_tokens, taps):
        """Commit S rows: taps [S, 3*Dt] and the token after each; the last one is the anchor."""
        self.last = self.rows(self.fuse(taps), next_tokens)[-1:]

    def draft(self, count):
        """Target ids [count] and logits [count, DV] of a greedy chain; restores the cache."""
        kept = list(self.cache)
        hidden = self.last
        ids = []
        logits = []
        for slot in range(count):
            logits.append(self.linear(self.norm(hidden, "norm"), "lm_head")[0])
            best = int(logits[-1].argmax())
            offset = int(self.w["d2t"][best]) if "d2t" in self.w else 0
            ids.append(best + offset)
            if slot + 1 < count:
                hidden_rows = self.norm(hidden, "norm") if self.c.get("norm_output") else hidden
                hidden = self.rows(hidden_rows, ids[-1:])
        self.cache = kept
        return ids, np.stack(logits)


def random_weights(kind, config, seed):
    """Random tensors by their published names, with the shapes of `data/eagle3_heads.json`."""
    rng = np.random.default_rng(seed)
    w = {}
    for name, shape in SHAPES[kind].items():
        noise = rng.standard_normal(shape)
        if len(shape) == 1:  # a norm
            value = 1 + 0.2 * noise
        else:
            scale = 4 if "embed" in name else 1
            value = noise * scale / np.sqrt(shape[-1])
        w[name] = value.astype(F)
    vocabulary = config["vocab_size"]
    drafted = config["draft_vocab_size"]
    if drafted < vocabulary:
        ids = np.sort(rng.choice(vocabulary, drafted, replace=False))
        w |= {"d2t": ids - np.arange(drafted), "t2d": np.isin(np.arange(vocabulary), ids)}
    return w


LAYER = {
    "hidden_size": 32,
    "num_hidden_layers": 1,
    "intermediate_size": 48,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "vocab_size": 64,
    "rms_norm_eps": 1e-5,
    "rope_theta": 10000.0,
}
SGLANG = LAYER | {"architectures": ["LlamaForCausalLMEagle3"], "draft_vocab_size": 40}
SPECULATORS = {
    "speculators_model_type": "eagle3",
    "architectures": ["Eagle3Speculator"],
    "draft_vocab_size": 40,
    "eagle_aux_hidden_state_layer_ids": [2, 6, 9],
    "transformer_layer_config": LAYER,
}
PUBLISHED = {
    "authors": SGLANG | {"architectures": ["LlamaForCausalLM"]},
    "sglang": SGLANG | {"fc_norm": True, "norm_output": True},
    "wide": SGLANG | {"target_hidden_size": 24, "draft_vocab_size": 64},
    "speculators": SPECULATORS | {"norm_before_residual": True},
    "deep": SPECULATORS
    | {
        "norm_before_fc": True,
        "transformer_layer_config": LAYER
        | {"num_hidden_layers": 2, "layer_types": ["sliding_attention"] * 2, "sliding_window": 5},
    },
}
# The number of tokens drafted after each step, and the rows that the step commits.
STEPS = [(3, [0, 1, 2, 3, 4]), (5, [0, 2, 3]), (4, [0]), (2, [0, 1]), (6, [0, 1, 4])]


class RecordingSampler(Sampler):
    """A greedy sampler that records the logits of the latest draft."""

    def draft_scores(self, logits, before=None):
        if before is None:  # the first token of a draft
            self.logits = []
        self.logits.append(np.array(logits[0]))
        return super().draft_scores(logits, before)


@functools.cache
def published(kind):
    """A published config, the same with its layer's fields at the root, and random tensors."""
    config = PUBLISHED[kind]
    flat = config.get("transformer_layer_config", {}) | config
    return config, flat, random_weights(kind, flat, seed=len(kind))


def load(folder, kind):
    config, _, weights = published(kind)
    (folder / "config.json").write_text(json.dumps(config))
    stored = {name: mx.array(value) for name, value in weights.items()}
    mx.save_safetensors(str(folder / "model.safetensors"), stored)
    return read_drafter(Folder(folder), num_layers=12)


def run(drafter, kind):
    """Our (drafts, logits) of every step, and the oracle's; most steps reject some rows."""
    _, flat, weights = published(kind)
    oracle = Oracle(weights, flat)
    rng = np.random.default_rng(1)
    sampler = RecordingSampler()
    session = StepwiseSession(drafter, SimpleNamespace(), sampler)
    width = 3 * flat.get("target_hidden_size", flat["hidden_size"])
    ours = []
    theirs = []
    anchor = None
    for drafts, kept in STEPS:
        rows = rng.standard_normal((max(kept) + 2, width)).astype(np.float32)
        tokens = rng.integers(0, 64, len(kept) + 1).tolist()
        if anchor is not None:
            tokens[0] = anchor
        anchor = tokens[-1]
        session.extend(mx.array(rows)[None], kept, tokens[:-1])
        drafted = session.propose(anchor, drafts + 1).tokens.tolist()
        ours.append((drafted[1:], np.stack(sampler.logits)))
        oracle.extend(tokens[1:], rows[kept])
        theirs.append(oracle.draft(drafts))
    return ours, theirs


@pytest.mark.parametrize("kind", PUBLISHED)
def test_drafts_are_those_of_the_authors_code_over_ragged_steps(kind, tmp_path):
    drafter = load(tmp_path, kind)
    for (ours, logits), (theirs, expected) in zip(*run(drafter, kind), strict=True):
        assert ours == theirs
        assert np.abs(np.array(drafter.to_draft_vocab(mx.array(logits))) - expected).max() < 1e-4
    if "eagle_aux_hidden_state_layer_ids" in PUBLISHED[kind]:  # counts layers from 1
        assert drafter.tap_layers == (1, 5, 8)
