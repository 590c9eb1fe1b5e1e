"""LiLiCorr: its head against NVIDIA's own reference scores, its text against plain text."""

import json

import mlx.core as mx
import numpy as np
import pytest
from families import check_drafted_text, random_model, random_prompt, target_of
from mlx.utils import tree_flatten, tree_unflatten

from dflash_mlx.drafter.batch import BlockDraft, draft_batch
from dflash_mlx.drafter.config import DraftConfig
from dflash_mlx.drafter.lilicorr import LatticeHead
from dflash_mlx.drafter.networks import network_for
from dflash_mlx.loading.drafters import read_drafter
from dflash_mlx.loading.folder import Folder

HEAD = {
    "candidate_topk": 3,
    "hidden_size": 8,
    "num_layers": 2,
    "num_heads": 2,
    "mlp_ratio": 2.0,
    "factor_dim": 8,
    "vector_eps": 1e-4,
    "logit_scale": 8.0,
}
CONFIG = {
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
        **{f"lilicorr_{name}": value for name, value in HEAD.items()},
    },
}
# Names in TensorRT-LLM's test, which draws each parameter from its own name -> published names.
NAMED = {"feature_norm.": "feature_mlp.0.", "feature_mlp.up_proj.": "feature_mlp.1."}
NAMED |= {"feature_mlp.down_proj.": "feature_mlp.3."}
NAMED |= {f"layers.{n}.mlp.up_proj.": f"layers.{n}.mlp.0." for n in range(2)}
NAMED |= {f"layers.{n}.mlp.down_proj.": f"layers.{n}.mlp.2." for n in range(2)}
START = [-2.00565147, -2.00631571, -2.01010752]
PAIRS = [
    [
        [1.16437435, 1.16812551, 1.15701485],
        [1.16656375, 1.17030466, 1.15921211],
        [1.17068172, 1.17445230, 1.16334319],
    ],
    [
        [1.14806044, 1.14459574, 1.12698877],
        [1.14481199, 1.14134955, 1.12373281],
        [1.14475155, 1.14125943, 1.12357390],
    ],
]


def test_the_heads_scores_are_the_frozen_ones_of_nvidias_reference():
    config = DraftConfig.from_dict(CONFIG)
    head, weights = LatticeHead(config), []
    for name, value in tree_flatten(head.parameters()):
        theirs = name
        for drawn, published in NAMED.items():
            theirs = theirs.replace(published, drawn)
        values = np.arange(value.size, dtype=np.float32).reshape(value.shape)
        values = np.sin(values * 0.17 + sum(theirs.encode()) * 0.013) * 0.2
        weights.append((name, mx.array(values.astype(np.float32))))
    head.update(tree_unflatten(weights))
    embeddings = mx.linspace(-1.2, 1.3, 512).reshape(16, 32)
    ids = mx.array([[2, 5, 9], [6, 3, 1], [4, 7, 8]])
    log_probs = mx.array([[-0.4, -1.5, -3.0], [-0.6, -1.7, -2.7], [-0.2, -2.1, -3.4]])
    hidden, newest = mx.linspace(-0.7, 0.9, 96).reshape(3, 32), mx.linspace(-0.5, 0.4, 32)
    found = np.array(head.pairs(embeddings[ids], log_probs, hidden, newest))
    assert np.abs(found[0] - np.array(START)).max() < 2e-5  # one row for each predecessor
    assert np.abs(found[1:] - np.array(PAIRS)).max() < 2e-5


def drafter_for(target, **changes):
    raw = CONFIG | {"hidden_size": target.hidden_size, "vocab_size": target.vocab_size}
    raw["dflash_config"] = CONFIG["dflash_config"] | changes
    config = DraftConfig.from_dict(raw)
    mx.random.seed(4)
    drafter = network_for(config)(config)
    noise = [
        (n, w + 0.3 * mx.random.normal(w.shape)) for n, w in tree_flatten(drafter.parameters())
    ]
    drafter.update(tree_unflatten(noise))
    return raw, drafter


@pytest.mark.parametrize("changes", [{}, {"conv_kernel_size": 2, "conv_group_size": 8}])
@pytest.mark.parametrize("temperature", [0.0, 0.8])
def test_text_is_plain_text_in_chains_trees_and_batches(temperature, changes, tmp_path):
    target = target_of(random_model("qwen3"), "qwen3")
    raw, drafter = drafter_for(target, **changes)
    (tmp_path / "config.json").write_text(json.dumps(raw))
    weights = {f"model.{name}": value for name, value in tree_flatten(drafter.parameters())}
    mx.save_safetensors(str(tmp_path / "model.safetensors"), weights)
    drafter = read_drafter(Folder(tmp_path))
    settings = {"max_tokens": 8, "temperature": temperature}
    settings |= {"seed": 0} if temperature else {}
    prompts = [random_prompt(9 + number, number) for number in range(3)]
    check_drafted_text(target, drafter, prompts, **settings)


def test_drafts_read_the_newest_feature_also_when_none_waits():
    """In one pass with others, and after everything was read for a prefix cache."""
    target = target_of(random_model("qwen3"), "qwen3")
    _, drafter = drafter_for(target)
    taps = mx.random.normal((2, 1, 6, 2 * target.hidden_size))
    drafts = []
    for read in (False, True):
        sessions = [drafter.start(target) for _ in range(2)]
        for session, own in zip(sessions, taps, strict=True):
            session.extend(own)
            if read:
                session.rows(0, 6)
        both = draft_batch([BlockDraft(session, 3, 4) for session in sessions])
        drafts.append([one.tokens.tolist() for one in both])
    alone = drafter.start(target)
    alone.extend(taps[0])
    assert drafts[0] == drafts[1] and drafts[0][0] == alone.propose(3, 4).tokens.tolist()
    assert drafts[0][0] != drafts[0][1]
