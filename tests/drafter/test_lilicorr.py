"""LiLiCorr: its head against NVIDIA's own reference scores, and what its drafts read."""

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
    config = DraftConfig.from_dict(LILICORR)
    head = LatticeHead(config)
    weights = []
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
    hidden = mx.linspace(-0.7, 0.9, 96).reshape(3, 32)
    newest = mx.linspace(-0.5, 0.4, 32)
    scores = np.array(head.pairs(embeddings[ids], log_probs, hidden, newest))
    assert np.abs(scores[0] - np.array(START)).max() < 2e-5  # one row for each predecessor
    assert np.abs(scores[1:] - np.array(PAIRS)).max() < 2e-5


def test_files_are_read_by_their_published_names(tmp_path):
    target, drafter = lilicorr(**CONVOLVED)
    (tmp_path / "config.json").write_text(json.dumps(lilicorr_config(target, **CONVOLVED)))
    weights = dict(tree_flatten(drafter.parameters()))
    stored = {f"model.{name}": value for name, value in weights.items()}
    mx.save_safetensors(str(tmp_path / "model.safetensors"), stored)
    loaded = dict(tree_flatten(read_drafter(Folder(tmp_path)).parameters()))
    assert loaded.keys() == weights.keys()
    assert all(mx.array_equal(loaded[name], value) for name, value in weights.items())


def test_drafts_read_the_newest_feature_also_when_none_waits():
    """In one pass with others, and after everything was read for a prefix cache."""
    target, drafter = lilicorr()
    taps = mx.random.normal((2, 1, 6, 2 * target.hidden_size))
    drafts = []
    for read in (False, True):
        sessions = [drafter.start(target) for _ in range(2)]
        for session, features in zip(sessions, taps, strict=True):
            session.extend(features)
            if read:
                session.rows(0, 6)
        both = draft_batch([BlockDraft(session, 3, 4) for session in sessions])
        drafts.append([proposal.tokens.tolist() for proposal in both])
    alone = drafter.start(target)
    alone.extend(taps[0])
    assert drafts[0] == drafts[1] and drafts[0][0] == alone.propose(3, 4).tokens.tolist()
    assert drafts[0][0] != drafts[0][1]
