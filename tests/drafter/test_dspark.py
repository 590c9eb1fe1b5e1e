"""DSpark, and what all drafters share with it, against a slow implementation in float64."""

import dataclasses

import mlx.core as mx
import numpy as np
import pytest
import reference
import test_dflash2
from golden import corrected
from mlx.utils import tree_flatten
from test_dflash2 import SHAPE, distance

from dflash_mlx.drafter.candidates import DraftScores
from dflash_mlx.drafter.networks import ADAPTER, EMBEDDING, HEAD, MASK
from dflash_mlx.sampling import Sampler
from dflash_mlx.settings import RequestSettings

VOCABULARY = SHAPE["vocab_size"]
DRAFTED = 23
CONTEXT = 40
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


def build(config, parts=(EMBEDDING, HEAD)):
    """A drafter with random weights; with a reduced vocabulary, one of scattered tokens."""
    return test_dflash2.build(config, parts=parts)


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
    "a window that use_swa forces": {"use_swa": True, "swa_window_size": 5},
    "sinks": {"attention_sink_bias": True},
    "sinks in sliding layers": SLIDING | {"add_swa_attention_sink_bias": True},
    "interleaved yarn": {"rope_is_neox_style": False, "rope_scaling": YARN},
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
    cache = drafter.make_cache()
    fed = 0
    for upto, anchor in [(0, 5), (1, 9), (20, 60), (CONTEXT, 11)]:
        rows = config.block_size
        block = drafter.embed(mx.array([[anchor, *[2] * (rows - 1)]]), None)
        hidden = drafter(block, taps[:, fed:upto], cache)
        fed = upto
        raw, weights, whole, drafting = expected(drafter, taps[:, :upto], anchor, rows)
        assert distance(hidden[0], whole) < 1e-4
        logits = drafter.logits(hidden, None)[0, config.first_row :]
        base = reference.base_logits(raw, weights, drafting)
        assert distance(logits, base) < 1e-3
        tokens, expected_logits = reference.markov_walk(raw, weights, drafting, base, anchor)
        given = hidden[0, config.first_row :]
        walked = drafter.choose(
            [DraftScores(drafter.to_full_vocab(logits), 1.0, given, mx.array(anchor))]
        )[0]
        assert walked.tolist() == tokens
        previous = mx.array([anchor, *tokens[:-1]])
        assert distance(corrected(drafter, logits, given, previous), expected_logits) < 1e-3


@pytest.mark.parametrize("kind", ["vanilla", "gated", "rnn"])
def test_requests_are_walked_together_as_they_are_alone(kind):
    """With the noise of the target's choices in the scores, as drafts above temperature 0 have."""
    drafter = build(raw_config(markov_head_type=kind, draft_vocab_size=DRAFTED))
    hidden = mx.random.normal((5, 32))
    anchor = mx.array(7)
    logits = drafter.logits(hidden[None], None)[0]
    noise = mx.random.gumbel((5, VOCABULARY))
    temperatures = [0.4, 0.8, 2.0]
    scores = [drafter.to_full_vocab(logits / t) + noise for t in temperatures]
    pairs = zip(scores, temperatures, strict=True)
    together = drafter.choose([DraftScores(row, 1 / t, hidden, anchor) for row, t in pairs])
    weights = {name: np.array(value) for name, value in tree_flatten(drafter.parameters())}
    config = dataclasses.asdict(drafter.config)
    for t, tokens in zip(temperatures, together, strict=True):
        draft_noise = np.array(drafter.to_draft_vocab(noise))
        alone = reference.markov_walk(
            config, weights, np.array(hidden), np.array(logits), 7, draft_noise, t
        )
        assert tokens.tolist() == alone[0]


def slots_of(drafter, hidden, sampler=None):
    logits = drafter.to_full_vocab(drafter.logits(hidden, None)[0])
    scores, weight = (sampler or Sampler()).draft_scores(logits)
    return DraftScores(scores, weight, hidden[0], mx.array(7))


@pytest.mark.parametrize("temperature", [0.0, 0.8])
@pytest.mark.parametrize("kind", ["vanilla", "gated", "rnn"])
@pytest.mark.parametrize("drafted", [VOCABULARY, DRAFTED])
def test_the_favourites_of_a_tree_are_the_walk(kind, drafted, temperature):
    drafter = build(raw_config(markov_head_type=kind, draft_vocab_size=drafted))
    sampler = Sampler(RequestSettings(temperature=temperature, seed=3), [1, 2, 3])
    slots = slots_of(drafter, mx.random.normal((1, 4, 32)), sampler)
    tokens, log_probs = drafter.candidates(slots, 12)
    assert tokens.shape == (4, 12) and log_probs.shape == (4, 1, 12)
    assert mx.all(mx.exp(log_probs).sum(axis=-1) < 1 + 1e-4)
    if temperature == 0:
        [walked] = drafter.choose([slots])
        best = log_probs[:, 0].argmax(axis=-1)
        assert mx.array_equal(mx.take_along_axis(tokens, best[:, None], axis=-1)[:, 0], walked)


def test_a_mask_embedding_stands_in_for_the_mask_token():
    drafter = build(raw_config(), (EMBEDDING, HEAD, MASK))
    block = drafter.embed(mx.array([[5, 2, 2]]), None)[0]
    assert mx.array_equal(block[0], drafter.embed_tokens.weight[5])
    assert mx.array_equal(block[1], drafter.mask_embedding)
    assert not mx.array_equal(block[1], drafter.embed_tokens.weight[2])


@pytest.mark.parametrize("adapter", [False, True])
def test_taps_of_another_width(adapter):
    """With an adapter each tap is projected first; without, the fusion itself is that wide."""
    fields = {"architectures": ["DFlashDraftModel"], "target_hidden_size": 20, "markov_rank": 0}
    nested = {"causal_head": True}
    parts = (EMBEDDING, HEAD, ADAPTER) if adapter else (EMBEDDING, HEAD)
    drafter = build(raw_config(**fields, dflash_config=nested), parts)
    taps = mx.random.normal((1, 11, 2 * 20))
    block = drafter.embed(mx.array([[5, *[2] * 5]]), None)
    hidden = drafter(block, taps, drafter.make_cache())
    assert distance(hidden[0], expected(drafter, taps, 5, 6)[2]) < 1e-4
