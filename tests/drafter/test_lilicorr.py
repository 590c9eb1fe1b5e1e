"""LiLiCorr: its head against the scores in NVIDIA's test, its checkpoints, and its drafts."""

import json

import mlx.core as mx
import numpy as np
from mlx.utils import tree_flatten, tree_unflatten
from pairs import CONVOLVED, LILICORR, lilicorr, lilicorr_config

from dflash_mlx.drafter.batched_drafts import BlockDraft, draft_batch
from dflash_mlx.drafter.config import DraftConfig
from dflash_mlx.drafter.lilicorr import LatticeHead
from dflash_mlx.loading.drafter_loader import read_drafter
from dflash_mlx.loading.folder import Folder

# Prefixes of parameters in TensorRT-LLM's test, and in published checkpoints. The test generates
# each parameter's values from its name.
PUBLISHED_PREFIXES = {
    "feature_norm.": "feature_mlp.0.",
    "feature_mlp.up_proj.": "feature_mlp.1.",
    "feature_mlp.down_proj.": "feature_mlp.3.",
    "layers.0.mlp.up_proj.": "layers.0.mlp.0.",
    "layers.0.mlp.down_proj.": "layers.0.mlp.2.",
    "layers.1.mlp.up_proj.": "layers.1.mlp.0.",
    "layers.1.mlp.down_proj.": "layers.1.mlp.2.",
}
# The scores in that test: of the first position's candidates, and of pairs of candidates.
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


def test_the_heads_scores_are_those_in_nvidias_test():
    """Weights and inputs follow the formulas of that test, in TensorRT-LLM."""
    config = DraftConfig.from_dict(LILICORR)
    head = LatticeHead(config)
    weights = []
    for name, value in tree_flatten(head.parameters()):
        name_in_test = name
        for prefix_in_test, published in PUBLISHED_PREFIXES.items():
            name_in_test = name_in_test.replace(published, prefix_in_test)
        indices = np.arange(value.size, dtype=np.float32).reshape(value.shape)
        values = np.sin(indices * 0.17 + sum(name_in_test.encode()) * 0.013) * 0.2
        weights.append((name, mx.array(values.astype(np.float32))))
    head.update(tree_unflatten(weights))
    embeddings = mx.linspace(-1.2, 1.3, 512).reshape(16, 32)
    ids = mx.array([[2, 5, 9], [6, 3, 1], [4, 7, 8]])
    log_probs = mx.array([[-0.4, -1.5, -3.0], [-0.6, -1.7, -2.7], [-0.2, -2.1, -3.4]])
    hidden = mx.linspace(-0.7, 0.9, 96).reshape(3, 32)
    newest = mx.linspace(-0.5, 0.4, 32)
    scores = np.array(head.pairs(embeddings[ids], log_probs, hidden, newest))
    assert np.abs(scores[0] - np.array(START)).max() < 2e-5  # one row for each predecessor
    assert np.abs(scores[1:] - np.array(PAIRS)).max() < 2e-5


def test_checkpoints_are_read_by_their_published_names(tmp_path):
    target, drafter = lilicorr(**CONVOLVED)
    (tmp_path / "config.json").write_text(json.dumps(lilicorr_config(target, **CONVOLVED)))
    weights = dict(tree_flatten(drafter.parameters()))
    stored = {f"model.{name}": value for name, value in weights.items()}
    mx.save_safetensors(str(tmp_path / "model.safetensors"), stored)
    loaded = dict(tree_flatten(read_drafter(Folder(tmp_path)).parameters()))
    assert loaded.keys() == weights.keys()
    assert all(mx.array_equal(loaded[name], value) for name, value in weights.items())


def test_a_draft_uses_the_newest_feature_whether_or_not_it_was_read_before():
    """Storing rows in a prefix cache reads all features; the draft after it must be the same."""
    target, drafter = lilicorr()
    taps = mx.random.normal((2, 1, 6, 2 * target.hidden_size))
    drafts = []
    for stores_rows in (False, True):
        sessions = [drafter.start(target) for _ in range(2)]
        for session, features in zip(sessions, taps, strict=True):
            session.extend(features)
            if stores_rows:
                session.rows(0, 6)
        proposals = draft_batch([BlockDraft(session, 3, 4) for session in sessions])
        drafts.append([proposal.tokens.tolist() for proposal in proposals])
    unread_drafts, read_drafts = drafts
    assert read_drafts == unread_drafts
    alone = drafter.start(target)
    alone.extend(taps[0])
    assert unread_drafts[0] == alone.propose(3, 4).tokens.tolist()
    assert unread_drafts[0] != unread_drafts[1], "drafts do not depend on the features"
