"""DFlash2, and the parts that every drafter shares with it, against a slow float64 reference."""

import dataclasses
import json
from pathlib import Path
from types import SimpleNamespace

import mlx.core as mx
import numpy as np
import pytest
import reference
from mlx.utils import tree_flatten, tree_map_with_path

import dflash_mlx as dm
from dflash_mlx.drafter.candidates import DraftScores, top_candidates
from dflash_mlx.drafter.config import DraftConfig
from dflash_mlx.drafter.networks import EMBEDDING, HEAD, network_for
from dflash_mlx.errors import SettingsError, WeightsError
from dflash_mlx.loading.drafter_fields import inspect_drafter

CONVOLVED = {"conv_kernel_size": 2, "conv_group_size": 8, "selector_rank": 8, "selector_top_k": 5}
SHAPE = {
    "hidden_size": 32,
    "num_hidden_layers": 2,
    "intermediate_size": 48,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "vocab_size": 67,
    "block_size": 6,
    "rope_theta": 10000.0,
    "num_target_layers": 6,
}


def raw_config(dflash2=True, nested=(), **fields):
    """A config.json of either architecture; `nested` goes into dflash_config."""
    inner = {"mask_token_id": 2, "target_layer_ids": [0, 3]}
    return {
        "architectures": ["DFlash2DraftModel" if dflash2 else "DFlashDraftModel"],
        **SHAPE,
        "dflash_config": inner | (CONVOLVED if dflash2 else {}) | dict(nested),
        **fields,
    }


def random_weight(name, old):
    """Weights large enough for an error in any term to show: norms near 1, biases far from 0."""
    if name == "d2t":  # a reduced vocabulary: some tokens, scattered over all
        kept = np.random.default_rng(0).permutation(SHAPE["vocab_size"])[: len(old)]
        return mx.array(np.sort(kept) - np.arange(len(old)))
    noise = mx.random.normal(old.shape)
    if "norm" in name:
        return 1 + 0.2 * noise
    if name.endswith("proj.bias") or "base_kernel" in name:
        return 0.5 * noise
    if "codebook" in name:
        return noise
    scale = 2 if "markov_w" in name else 1
    return scale * noise / old.shape[-1] ** 0.5


def expected_hidden(drafter, context, block, weights=None):
    """The slow reference's hidden states for a context [1, S, K*D] and a block [1, B, D]."""
    config = dataclasses.asdict(drafter.config)
    weights = weights or dict(tree_flatten(drafter.parameters()))
    return reference.forward(config, weights, np.array(context[0]), np.array(block[0]))


def build(config, seed=0, parts=()):
    """A drafter with random weights."""
    mx.random.seed(seed)
    resolved = DraftConfig.from_dict(config)
    drafter = network_for(resolved)(resolved, parts)
    drafter.update(tree_map_with_path(random_weight, drafter.parameters()))
    return drafter


def make_target(config, seed=9):
    """The parts of a target that a drafter uses."""
    mx.random.seed(seed)
    vocabulary = config["vocab_size"]
    hidden = config["hidden_size"]
    embedding = mx.random.normal((vocabulary, hidden))
    head = mx.random.normal((vocabulary, hidden))
    return SimpleNamespace(
        embed=lambda tokens: embedding[tokens],
        head=lambda hidden: hidden @ head.T,
        hidden_size=hidden,
        vocab_size=vocabulary,
        num_layers=config["num_target_layers"],
        layers=[object() for _ in range(config["num_target_layers"])],
    )


def drafts(drafter, hidden, anchor, target):
    """The greedy chain from the hidden states [1, L, D] of the draft positions."""
    scores = drafter.to_full_vocab(drafter.logits(hidden, target)[0])
    [tokens] = drafter.choose([DraftScores(scores, 1.0, hidden[0], mx.array(anchor))])
    return tokens.tolist()


def distance(a, b):
    """The largest difference of two arrays' elements."""
    return float(np.abs(np.asarray(a, np.float64) - np.asarray(b, np.float64)).max())


SLIDING = {"layer_types": ["sliding_attention", "full_attention"], "sliding_window": 7}
YARN = {"rope_type": "yarn", "factor": 16.0, "original_max_position_embeddings": 64}
CASES = {
    "plain": raw_config(),
    "biases": raw_config(attention_bias=True),
    "one head of keys": raw_config(num_key_value_heads=1),
    "kernel 3": raw_config(nested={"conv_kernel_size": 3}),
    "kernel longer than the block": raw_config(nested={"conv_kernel_size": 9}),
    "one channel a group, kernel 1": raw_config(
        nested={"conv_group_size": 1, "conv_kernel_size": 1}
    ),
    "sliding, causal": raw_config(**SLIDING),
    "sliding, both ways": raw_config(**SLIDING, is_causal=False),
    "window shorter than a step": raw_config(**SLIDING | {"sliding_window": 3}, is_causal=False),
    "window shorter than a step, causal": raw_config(**SLIDING | {"sliding_window": 3}),
    "window of one": raw_config(**SLIDING | {"sliding_window": 1}),
    "causal everywhere": raw_config(is_causal=True),
    "linear rope": raw_config(rope_scaling={"rope_type": "linear", "factor": 4.0}),
    "yarn": raw_config(rope_scaling=YARN),
    "yarn, not truncated": raw_config(rope_scaling=YARN | {"truncate": False}),
    "yarn, attention factor": raw_config(rope_scaling=YARN | {"attention_factor": 1.3}),
    "DFlash": raw_config(dflash2=False, **SLIDING, attention_bias=True, num_key_value_heads=1),
    "everything": raw_config(
        nested={"conv_kernel_size": 3, "conv_group_size": 16},
        **SLIDING | {"sliding_window": 4},
        is_causal=False,
        attention_bias=True,
        num_key_value_heads=1,
        rope_scaling=YARN,
    ),
}


@pytest.mark.parametrize("config", CASES.values(), ids=list(CASES))
def test_hidden_states_equal_the_references_over_ragged_steps(config):
    """Steps add 0 to 20 features to the cache and read blocks of 2 to 6 rows."""
    drafter = build(config)
    context = mx.random.normal((1, 40, 2 * 32))
    cache = drafter.make_cache()
    position = 0
    for step, rows in zip((1, 6, 0, 11, 2, 20), (6, 6, 4, 2, 6, 6), strict=True):
        taps = context[:, position : position + step]
        position = position + step
        block = mx.random.normal((1, rows, 32))
        expected = expected_hidden(drafter, context[:, :position], block)
        assert distance(drafter(block, taps, cache)[0], expected) < 2e-5


@pytest.mark.parametrize("top", [1, 5, 67])
def test_the_selector_picks_the_tokens_of_the_reference(top):
    config = raw_config(nested={"selector_top_k": top})
    drafter = build(config)
    target = make_target(config)
    fields = dataclasses.asdict(drafter.config)
    weights = dict(tree_flatten(drafter.parameters()))
    for seed in range(20):
        mx.random.seed(seed)
        hidden = mx.random.normal((1, 5, 32)) / 4
        logits = np.array(drafter.logits(hidden, target)[0], np.float64)
        states = np.array(hidden[0], np.float64)
        expected = reference.walk(fields, weights, states, logits, seed)
        assert drafts(drafter, hidden, seed, target) == expected


@pytest.mark.parametrize("vocabulary", [40, 512 * 5, 512 * 7, 512 * 7 + 1, 9000])
def test_top_candidates_are_the_highest(vocabulary):
    """The search goes in chunks of 512 tokens: whole chunks, and a ragged last one."""
    mx.random.seed(vocabulary)
    logits = mx.random.normal((3, vocabulary))
    expected = np.sort(np.argsort(-np.array(logits), axis=-1)[:, :5], axis=-1)
    assert np.array_equal(np.sort(np.array(top_candidates(logits, 5)), axis=-1), expected)


def save(folder, drafter, config):
    (folder / "config.json").write_text(json.dumps(config))
    weights = dict(tree_flatten(drafter.parameters()))
    mx.save_safetensors(str(folder / "model.safetensors"), weights)
    return str(folder)


def decisions(folder):
    """What inspecting a drafter's folder says: (value, source) by field."""
    return {item.field: (item.value, item.source) for item in inspect_drafter(Path(folder))}


@pytest.mark.parametrize("stored", [(), (EMBEDDING,), (HEAD,)])
@pytest.mark.parametrize("tied", [False, True])
def test_an_embedding_or_head_in_the_checkpoint_replaces_the_targets(tmp_path, stored, tied):
    """A tied head is the drafter's embedding, if the checkpoint has one."""
    config = raw_config(tie_word_embeddings=tied)
    written = build(config, parts=stored)
    drafter = dm.load_drafter(save(tmp_path, written, config))
    target = make_target(config)
    tokens = mx.array([[3, 4]])
    has_embedding = EMBEDDING in stored
    embedding = target.embed(mx.arange(SHAPE["vocab_size"]))
    embedding_source = ("the target's", "no tensor embed_tokens.weight")
    if has_embedding:
        embedding = written.embed_tokens.weight
        embedding_source = ("its own", "tensor embed_tokens.weight")
    head = target.head
    head_source = "the target's"
    if HEAD in stored:
        head = written.lm_head
        head_source = "its own"
    elif has_embedding and tied:
        head = written.embed_tokens.as_linear
        head_source = "its own embedding"
    assert mx.array_equal(drafter.embed(tokens, target), embedding[tokens])
    hidden = mx.random.normal((1, 2, 32))
    assert mx.allclose(drafter.logits(hidden, target), head(hidden), atol=1e-5)

    inspected = decisions(tmp_path)
    assert inspected["network"] == ("DFlash2", "architectures")
    assert inspected["block_size"] == (6, "block_size")
    assert inspected["embedding"] == embedding_source
    assert inspected["head"][0] == head_source


def test_errors_name_unknown_missing_and_misshapen_tensors(tmp_path):
    config = raw_config()
    drafter = build(config)
    drafter.d2t = mx.zeros((SHAPE["vocab_size"],))
    with pytest.raises(WeightsError, match="d2t has no place"):
        dm.load_drafter(save(tmp_path, drafter, config))
    del drafter.d2t
    with pytest.raises(WeightsError, match="layers.0.self_attn.k_proj.bias is missing"):
        dm.load_drafter(save(tmp_path, drafter, config | {"attention_bias": True}))
    with pytest.raises(WeightsError, match=r"_conv\..* is .* and not "):
        dm.load_drafter(save(tmp_path, drafter, raw_config(nested={"conv_kernel_size": 3})))


WIDE = {"hidden_size": 128, "intermediate_size": 192, "head_dim": 32}


@pytest.mark.parametrize("bits", [4, 8])
def test_a_quantized_drafter_computes_with_its_rounded_weights(tmp_path, bits):
    config = raw_config(**WIDE, **SLIDING)
    written = build(config)
    drafter = dm.load_drafter(save(tmp_path, written, config), bits=bits)
    unrounded = dict(tree_flatten(written.parameters()))
    rounded = dict(unrounded)
    for name, module in drafter.named_modules():
        if "scales" in module:
            rounded[f"{name}.weight"] = mx.dequantize(
                module.weight, module.scales, module.biases, group_size=64, bits=bits
            )
    context = mx.random.normal((1, 12, 256))
    block = mx.random.normal((1, 6, 128))
    hidden = drafter(block, context, drafter.make_cache())[0]
    assert distance(hidden, expected_hidden(drafter, context, block, rounded)) < 1e-4
    assert distance(hidden, expected_hidden(drafter, context, block, unrounded)) > 1e-3


@pytest.mark.parametrize("bits", [4, 8])
def test_a_checkpoint_of_quantized_weights_is_loaded_without_quantizing_again(tmp_path, bits):
    config = raw_config(**WIDE)
    written = build(config)
    (tmp_path / "plain").mkdir()
    (tmp_path / "stored").mkdir()
    quantized = dm.load_drafter(save(tmp_path / "plain", written, config), bits=bits)
    quantized_config = config | {"quantization": {"group_size": 64, "bits": bits}}
    path = save(tmp_path / "stored", quantized, quantized_config)
    drafter = dm.load_drafter(path)
    context = mx.random.normal((1, 12, 256))
    block = mx.random.normal((1, 6, 128))
    expected = quantized(block, context, quantized.make_cache())
    hidden = drafter(block, context, drafter.make_cache())
    assert distance(hidden, expected) < 1e-4  # on a CPU, a loaded drafter computes in floats
    assert decisions(path)["quantization"][1] == "quantization"
    with pytest.raises(SettingsError, match="quantized already"):
        dm.load_drafter(path, bits=4)
