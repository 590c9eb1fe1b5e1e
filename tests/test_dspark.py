"""DSpark, and what all drafters have beside it, against a slow second writing in float64."""

import dataclasses

import mlx.core as mx
import mlx.nn as nn
import numpy as np
import pytest
import reference
from mlx.utils import tree_flatten
from test_dflash2 import SHAPE, distance, random_weight

from dflash_mlx.drafter.calibration import Calibration
from dflash_mlx.drafter.config import DraftConfig
from dflash_mlx.drafter.dspark import CONFIDENCE_ALONE, network_for
from dflash_mlx.drafter.packagings import ADAPTER, CONFIDENCE, EMBEDDING, HEAD, MASK
from dflash_mlx.sampling import Sampler
from dflash_mlx.settings import SamplingSettings

VOCABULARY, DRAFTED, CONTEXT = SHAPE["vocab_size"], 23, 40
SLIDING = {"layer_types": ["sliding_attention", "full_attention"], "sliding_window": 7}
YARN = {"rope_type": "yarn", "factor": 16.0, "original_max_position_embeddings": 64}


def raw_config(**fields):
    """A DSpark config.json as SpecForge writes them, with the anchor's row drafting."""
    return {
        "architectures": ["DSparkDraftModel"],
        **SHAPE,
        "mask_token_id": 2,
        "target_layer_ids": [0, 3],
        "markov_rank": 8,
        **fields,
    }


def build(config, parts=(EMBEDDING, HEAD, CONFIDENCE), seed=0):
    """A drafter with random weights; with a reduced vocabulary, one of scattered tokens."""
    mx.random.seed(seed)
    resolved = DraftConfig.from_dict(config)
    drafter = network_for(resolved)(resolved, parts)
    weights = [
        (name, random_weight(name, value)) for name, value in tree_flatten(drafter.parameters())
    ]
    for at, (name, _) in enumerate(weights):
        if name == "d2t":
            kept = np.sort(np.random.default_rng(seed).permutation(VOCABULARY)[:DRAFTED])
            weights[at] = name, mx.array(kept - np.arange(DRAFTED))
        if "markov_w" in name:
            weights[at] = name, 2 * weights[at][1]
    drafter.load_weights(weights)
    return drafter


def expected(drafter, taps, anchor, rows):
    """What the reference makes of a block: hidden states, and those of the rows that draft."""
    config = dataclasses.asdict(drafter.config)
    weights = {name: np.array(value) for name, value in tree_flatten(drafter.parameters())}
    block = np.asarray(weights["embed_tokens.weight"])[[anchor, *[2] * (rows - 1)]]
    if "mask_embedding" in weights:
        block[1:] = weights["mask_embedding"]
    block = block * config["input_embedding_scale"]
    hidden = reference.forward(config, weights, np.array(taps[0]), block)
    return config, weights, hidden, hidden[drafter.config.first_row :]


VARIANTS = {
    "vanilla": {},
    "gated": {"markov_head_type": "gated"},
    "rnn": {"markov_head_type": "rnn"},
    "a reduced vocabulary": {"draft_vocab_size": DRAFTED},
    "rnn over a reduced vocabulary": {"markov_head_type": "rnn", "draft_vocab_size": DRAFTED},
    "the second row drafts first": {"sample_from_anchor": False},
    "causal by a flag": {"is_causal": True},
    "windows, causal by the rule": SLIDING,
    "windows, not causal": SLIDING | {"is_causal": False},
    "a window that use_swa forces": {"use_swa": True, "swa_window_size": 5},
    "sinks": {"attention_sink_bias": True},
    "sinks in sliding layers": SLIDING | {"add_swa_attention_sink_bias": True},
    "interleaved rotation": {"rope_is_neox_style": False},
    "interleaved yarn": {"rope_is_neox_style": False, "rope_scaling": YARN},
    "interleaved linear": {
        "rope_is_neox_style": False,
        "rope_scaling": {"rope_type": "linear", "factor": 3.0},
    },
    "attention biases": {"attention_bias": True},
    "cap, multiplier and scale": {
        "final_logit_softcapping": 3.0,
        "output_multiplier": 0.6,
        "logit_scale": 1.7,
        "input_embedding_scale": 1.5,
    },
    "one tap, the embedding's output": {"target_layer_ids": [-1]},
    "blocks of one row": {"block_size": 1},
    "all at once": SLIDING
    | {
        "markov_head_type": "gated",
        "draft_vocab_size": DRAFTED,
        "sample_from_anchor": False,
        "attention_sink_bias": True,
        "rope_is_neox_style": False,
        "logit_scale": 0.5,
    },
}


@pytest.mark.parametrize("fields", VARIANTS.values(), ids=VARIANTS.keys())
def test_against_the_slow_reference(fields):
    drafter = build(raw_config(**fields))
    config = drafter.config
    taps = mx.random.normal((1, CONTEXT, len(config.target_layer_ids) * config.hidden_size))
    cache, fed = drafter.make_cache(), 0
    for upto, anchor in [(0, 5), (1, 9), (20, 60), (CONTEXT, 11)]:
        rows = config.block_size
        block = drafter.embed_block(mx.array([anchor, *[2] * (rows - 1)]), None)
        hidden, fed = drafter(block, taps[:, fed:upto], cache), upto
        raw, weights, whole, drafting = expected(drafter, taps[:, :upto], anchor, rows)
        assert distance(hidden[0], whole) < 1e-4
        logits = drafter.logits(hidden, None)[0, config.first_row :]
        base = reference.base_logits(raw, weights, drafting)
        assert distance(logits, base) < 1e-3
        tokens, corrected, confidence = reference.markov_walk(raw, weights, drafting, base, anchor)
        given = hidden[0, config.first_row :]
        [walked] = drafter.walk([drafter.widen(logits)], [1.0], given, mx.array(anchor))
        assert walked.tolist() == tokens
        previous = mx.array([anchor, *tokens[:-1]])
        assert distance(drafter.corrected(logits, given, previous), corrected) < 1e-3
        assert distance(drafter.confidence(given, previous), confidence) < 1e-3


@pytest.mark.parametrize("kind", ["vanilla", "gated", "rnn"])
def test_trials_are_walked_together_as_they_are_alone(kind):
    """With the noise of the target's choices in the scores, as drafts above temperature 0 have."""
    drafter = build(raw_config(markov_head_type=kind, draft_vocab_size=DRAFTED))
    hidden, anchor = mx.random.normal((5, 32)), mx.array(7)
    logits = drafter.logits(hidden[None], None)[0]
    noise = mx.random.gumbel((5, VOCABULARY))
    temperatures = [0.4, 0.8, 2.0]
    scores = [drafter.widen(logits / t) + noise for t in temperatures]
    together = drafter.walk(scores, [1 / t for t in temperatures], hidden, anchor)
    weights = {name: np.array(value) for name, value in tree_flatten(drafter.parameters())}
    config = dataclasses.asdict(drafter.config)
    for t, tokens in zip(temperatures, together, strict=True):
        known = np.array(drafter.narrow(noise))
        alone = reference.markov_walk(
            config, weights, np.array(hidden), np.array(logits), 7, known, t
        )
        assert tokens.tolist() == alone[0]


@pytest.mark.parametrize(
    ("parts", "width"),
    [((EMBEDDING, HEAD, CONFIDENCE), 40), ((EMBEDDING, HEAD, CONFIDENCE, CONFIDENCE_ALONE), 32)],
)
def test_the_confidence_heads_width_says_what_it_reads(parts, width):
    drafter = build(raw_config(), parts)
    assert drafter.confidence_head["proj"].weight.shape == (1, width)
    hidden, previous = mx.random.normal((5, 32)), mx.array([3, 1, 4, 1, 5])
    found = drafter.confidence(hidden, previous)
    other = drafter.confidence(hidden, previous + 1)
    assert mx.array_equal(found, other) == (width == 32)


@pytest.mark.parametrize("temperature", [0.0, 0.8])
@pytest.mark.parametrize("kind", ["vanilla", "gated", "rnn"])
@pytest.mark.parametrize("drafted", [VOCABULARY, DRAFTED])
def test_a_trees_probabilities_are_those_after_each_nodes_own_parent(kind, drafted, temperature):
    """Of the walk's predecessor exactly; of the others up to what is no candidate of the slot."""
    drafter = build(raw_config(markov_head_type=kind, draft_vocab_size=drafted))
    hidden, anchor, count = mx.random.normal((1, 4, 32)), mx.array(7), 12
    sampler = Sampler(SamplingSettings(temperature=temperature, seed=3), [1, 2, 3])
    found = drafter.candidates(hidden, anchor, None, sampler, Calibration(), count)
    assert found.log_q.shape == (4, count, count)
    config = dataclasses.asdict(drafter.config)
    weights = {name: np.array(value) for name, value in tree_flatten(drafter.parameters())}
    base = np.array(drafter.logits(hidden, None)[0])
    ids = np.arange(VOCABULARY) if drafted == VOCABULARY else np.array(drafter.token_ids())
    log_q, _ = sampler.foresee(drafter.widen(mx.array(base)))
    own = np.array(drafter.narrow(log_q), np.float64)
    for slot in range(4 if kind != "rnn" else 1):  # a recurrent state depends on the path
        for row, before in enumerate([7] if slot == 0 else found.tokens[slot - 1].tolist()):
            bias = reference.markov_walk(
                config, weights, np.array(hidden[0, slot : slot + 1]), 0 * base[:1], before
            )[1][0]
            scores = own[slot] + bias / (temperature or 1.0)
            columns = np.searchsorted(ids, found.tokens[slot])
            theirs = found.log_q[slot, row]
            # Ratios of candidates are exact whatever stands before them.
            assert distance(np.diff(theirs), np.diff(scores[columns])) < 1e-3
            if slot == 0:
                exact = scores - np.log(np.exp(scores - scores.max()).sum()) - scores.max()
                assert distance(theirs, exact[columns]) < 1e-3


def test_the_chain_of_a_tree_is_the_walk():
    drafter = build(raw_config())
    hidden, anchor = mx.random.normal((1, 5, 32)), mx.array(7)
    found = drafter.candidates(hidden, anchor, None, Sampler(), Calibration(), 6)
    [walked] = drafter.walk([drafter.logits(hidden, None)[0]], [1.0], hidden[0], anchor)
    chain, before = [], 0
    for slot in range(5):
        before = int(found.log_q[slot, before].argmax())
        chain.append(int(found.tokens[slot, before]))
    assert chain == walked.tolist()


def test_rows_of_a_quantized_head_are_what_it_computes_with():
    config = raw_config(markov_rank=64)
    drafter = build(config)
    hidden, anchor = mx.random.normal((1, 5, 32)), mx.array(7)
    nn.quantize(drafter.markov_head, group_size=64, bits=8)
    head = drafter.markov_head
    inner = mx.random.normal((2, 3, 64))
    tokens = mx.array([[4, 9], [66, 0]])
    whole = head.markov_w2(inner)
    some = mx.take_along_axis(whole, mx.broadcast_to(tokens[:, None], (2, 3, 2)), axis=-1)
    assert mx.allclose(head.pairs(inner, tokens), some, atol=1e-3)
    assert drafter.candidates(hidden, anchor, None, Sampler(), Calibration(), 6).tokens.any()


def test_a_mask_embedding_stands_in_for_the_mask_token():
    drafter = build(raw_config(), (EMBEDDING, HEAD, MASK))
    block = drafter.embed_block(mx.array([5, 2, 2]), None)[0]
    assert mx.array_equal(block[0], drafter.embed_tokens.weight[5])
    assert mx.array_equal(block[1], drafter.mask_embedding)
    assert not mx.array_equal(block[1], drafter.embed_tokens.weight[2])


@pytest.mark.parametrize("adapter", [False, True])
def test_taps_of_another_width(adapter):
    """With an adapter each tap is projected first; without, the fusion itself is that wide."""
    fields = {"architectures": ["DFlashDraftModel"], "target_hidden_size": 20, "markov_rank": 0}
    nested = {"causal_head": True}
    parts = (EMBEDDING, HEAD, *([ADAPTER] if adapter else []))
    drafter = build(raw_config(**fields, dflash_config=nested), parts)
    taps = mx.random.normal((1, 11, 2 * 20))
    block = drafter.embed_block(mx.array([5, *[2] * 5]), None)
    hidden = drafter(block, taps, drafter.make_cache())
    assert distance(hidden[0], expected(drafter, taps, 5, 6)[2]) < 1e-4
