"""EAGLE-3 drafters against an oracle of their authors' code."""

import functools
import json
from types import SimpleNamespace

import mlx.core as mx
import numpy as np
import pytest
from eagle3_oracle import Eagle3 as Oracle
from eagle3_oracle import random_weights

from dflash_mlx.drafter.session import FeatureSession
from dflash_mlx.loading.drafters import read_drafter
from dflash_mlx.loading.folder import Folder
from dflash_mlx.sampling import Sampler

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
STEPS = [(3, [0, 1, 2, 3, 4]), (5, [0, 2, 3]), (4, [0]), (2, [0, 1]), (6, [0, 1, 4])]


class RecordingSampler(Sampler):
    """Greedy, and remembers the logits that it was shown."""

    def draft_scores(self, logits, before=None):
        self.seen = [] if before is None else self.seen
        self.seen.append(np.array(logits[0]))
        return super().draft_scores(logits, before)


@functools.cache
def published(kind):
    """A config, its layer's fields among it, and tensors."""
    config = PUBLISHED[kind]
    flat = config.get("transformer_layer_config", {}) | config
    return config, flat, random_weights(kind, flat, len(kind))


def load(folder, kind):
    config, _, weights = published(kind)
    (folder / "config.json").write_text(json.dumps(config))
    stored = {name: mx.array(value) for name, value in weights.items()}
    mx.save_safetensors(str(folder / "model.safetensors"), stored)
    return read_drafter(Folder(folder), num_layers=12)


def run(drafter, kind):
    """Ragged steps with rejected rows -> (drafts, logits) of every step, ours and the oracle's."""
    _, flat, weights = published(kind)
    oracle, rng = Oracle(weights, flat), np.random.default_rng(1)
    sampler = RecordingSampler()
    session = FeatureSession(drafter, SimpleNamespace(), sampler)
    width = 3 * flat.get("target_hidden_size", flat["hidden_size"])
    ours, theirs, anchor = [], [], None
    for drafts, kept in STEPS:
        rows = rng.standard_normal((max(kept) + 2, width)).astype(np.float32)
        tokens = rng.integers(0, 64, len(kept) + 1).tolist()
        tokens[0] = tokens[0] if anchor is None else anchor
        anchor = tokens[-1]
        session.extend(mx.array(rows)[None], kept, tokens[:-1])
        found = session.propose(anchor, drafts + 1).tokens.tolist()
        ours.append((found[1:], np.stack(sampler.seen)))
        oracle.extend(tokens[1:], rows[kept])
        theirs.append(oracle.draft(drafts))
    return ours, theirs


@pytest.mark.parametrize("kind", PUBLISHED)
def test_drafts_are_those_of_the_authors_code_over_ragged_steps(kind, tmp_path):
    drafter = load(tmp_path, kind)
    for (ours, logits), (theirs, expected) in zip(*run(drafter, kind), strict=True):
        assert ours == theirs
        assert np.abs(np.array(drafter.narrow(mx.array(logits))) - expected).max() < 1e-4
    assert drafter.tap_layers == (
        (1, 5, 8) if "spec" in kind or kind == "deep" else drafter.tap_layers
    )
