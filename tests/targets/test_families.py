"""Every target family: caches are right after commits, and embeddings, head and taps are too."""

import random
import sys

import mlx.core as mx
import mlx.nn as nn
import pytest
from families import (
    CONFIGS,
    FAMILIES,
    PROMPTS,
    family_target,
    plain_tokens,
    random_model,
    random_prompt,
    target_of,
)
from oracle import Oracle

import dflash_mlx as dm
from dflash_mlx.subclassing import overridden
from dflash_mlx.targets.taps import EMBEDDING

pytestmark = pytest.mark.by_family

# In these families mlx-lm itself rounds a forward of several rows and one-row steps differently:
# a ring buffer holds its rows in another order, and MLA and Mamba-2 take another code path.
ROUNDED = {"gpt_oss", "kimi_k25", "deepseek_v3", "glm_moe_dsa", "deepseek_v32", "nemotron_h"} | {
    family for family in FAMILIES if family.startswith("gemma4")
}
# MLX's reference BLAS sums every row alike; Accelerate and Metal choose kernels by the row count.
EXACT = sys.platform == "linux" and mx.default_device() == mx.Device(mx.cpu)


both_seeds = pytest.mark.parametrize(
    ("family", "seed"), [(family, seed) for family in FAMILIES for seed in PROMPTS]
)


@both_seeds
def test_after_any_commits_the_logits_are_those_of_a_fresh_model(family, seed):
    """Rejected rows leave no trace in keys, states, windows, indexer groups or positions."""
    target = family_target(family, seed)
    prompt = random_prompt(PROMPTS[seed], 9)
    rng = random.Random(seed)
    session = target.start()
    for _ in session.prefill(prompt):
        pass
    tokens = list(prompt)
    while len(tokens) < len(prompt) + 60:
        rows = [rng.randrange(256) for _ in range(rng.choice((1, 2, 7, 16)))]
        kept = rng.randint(1, len(rows))
        session.verify(dm.Proposal(rows))
        session.commit(range(kept))
        tokens += rows[:kept]
        assert session.position == len(tokens)
    next_tokens = [1, 2, 3]
    logits, _ = session.verify(dm.Proposal(next_tokens))
    fresh = target.model(mx.array([tokens + next_tokens]))[0, -3:]
    difference = mx.abs(logits - fresh).max().item()
    assert difference <= (0.0 if EXACT and family not in ROUNDED else 5e-5)


@pytest.mark.parametrize("family", FAMILIES)
def test_embed_and_head_compute_what_the_model_does(family):
    """`embed` gives the first layer's input, and `head` the logits before any soft cap."""
    target = family_target(family)
    tokens = mx.array([random_prompt(12, 3)])
    inputs = []

    def watched(call_original):
        def call(layer, x, *args, **settings):
            inputs.append(x)
            return call_original(layer, x, *args, **settings)

        return call

    with overridden([(target.layers[0], watched)]):
        target.model(tokens)
    first_input = inputs[0]
    if first_input.ndim == 4:  # DeepSeek-V4.1 starts with equal streams on axis 2
        first_input = first_input[:, :, 0]
    assert mx.array_equal(target.embed(tokens), first_input)
    logits, taps = target.features(tokens, [target.num_layers - 1])
    cap = 30 if family.startswith("gemma4") else 1e9  # 1e9: tanh(x / cap) * cap changes nothing
    capped = mx.tanh(target.head(target.parts.norm(taps)) / cap) * cap
    assert mx.allclose(capped, logits, atol=1e-4)
    assert mx.array_equal(logits, target.model(tokens)), "reading the layers changed the logits"
    shape = CONFIGS[family].get("text_config", CONFIGS[family])
    assert (target.hidden_size, target.vocab_size) == (shape["hidden_size"], 256)
    assert target.num_layers == shape["num_hidden_layers"] * shape.get("num_loops", 1)


@pytest.mark.parametrize("family", FAMILIES)
def test_a_drafter_gets_the_taps_of_committed_rows_only(family):
    """The features it got step by step are those of one forward over the whole text."""
    target = family_target(family)
    prompt = random_prompt(9, 5)
    answer = plain_tokens(target.model, prompt, 40)
    layers = (EMBEDDING, target.num_layers - 1)
    oracle = Oracle(prompt, answer, 256, p=0.5, tap_layers=layers)
    dm.generate(target, oracle, prompt, max_tokens=40, block_size=8)
    pieces = mx.concatenate(oracle.taps, axis=1)
    _, whole = target.features(mx.array([prompt + answer]), layers)
    embedded = whole[..., : target.hidden_size]
    assert mx.array_equal(embedded, target.embed(mx.array([prompt + answer])))
    rows = len(prompt) + 39  # the last of 40 tokens has not been read
    assert mx.allclose(pieces[:, :rows], whole[:, :rows], atol=1e-4)


@pytest.mark.parametrize(
    ("family", "cap"),
    [("qwen3", None), ("gemma4_dense", 30)],  # a separate head, and a tied one with a soft cap
)
def test_the_head_of_a_quantized_model_computes_its_logits(family, cap):
    model = random_model(family)
    nn.quantize(model, group_size=32, bits=8)
    target = target_of(model, family)
    tokens = mx.array([random_prompt(12, 3)])
    assert (target.hidden_size, target.vocab_size) == (64, 256)
    logits, taps = target.features(tokens, [target.num_layers - 1])
    norm = getattr(model, "language_model", model).model.norm
    computed = target.head(norm(taps))
    if cap is not None:
        computed = mx.tanh(computed / cap) * cap
    assert mx.allclose(computed, logits, atol=1e-4)
