"""DSpark, and the parts that all drafters share with it, against a slow float64 reference."""

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
MASK_TOKEN = 2
DRAFTED = 23  # the size of a reduced vocabulary
CONTEXT = 40
SLIDING = {"layer_types": ["sliding_attention", "full_attention"], "sliding_window": 7}
YARN = {"rope_type": "yarn", "factor": 16.0, "original_max_position_embeddings": 64}


def raw_config(**fields):
    """A DSpark config.json as SpecForge writes it, in which the anchor's row drafts a token."""
    return {
        "architectures": ["DSparkDraftModel"],
        **SHAPE,
        "mask_token_id": MASK_TOKEN,
        "target_layer_ids": [0, 3],
        "markov_rank": 8,
        **fields,
    }


def block_tokens(anchor, rows):
    """The tokens of a block: the anchor, and a mask for each token to draft."""
    return [anchor] + [MASK_TOKEN] * (rows - 1)


def build(config, parts=(EMBEDDING, HEAD)):
    """A drafter with random weights, whose checkpoint has an embedding and a head."""
    return test_dflash2.build(config, parts=parts)


def reference_of(drafter, taps, anchor, rows):
    """A drafter's config and weights for the reference, and the reference's hidden states.

    The hidden states are those of a block's rows, and those of the rows that draft a token.
    """
    config = dataclasses.asdict(drafter.config)
    weights = {name: np.array(value) for name, value in tree_flatten(drafter.parameters())}
    block = np.asarray(weights["embed_tokens.weight"])[block_tokens(anchor, rows)]
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
def test_hidden_states_logits_and_greedy_tokens_equal_the_references(fields):
    drafter = build(raw_config(**fields))
    config = drafter.config
    taps = mx.random.normal((1, CONTEXT, len(config.target_layer_ids) * config.hidden_size))
    cache = drafter.make_cache()
    start = 0
    for end, anchor in [(0, 5), (1, 9), (20, 60), (CONTEXT, 11)]:
        rows = config.block_size
        block = drafter.embed(mx.array([block_tokens(anchor, rows)]), None)
        hidden = drafter(block, taps[:, start:end], cache)
        start = end
        resolved, weights, all_rows, draft_rows = reference_of(drafter, taps[:, :end], anchor, rows)
        assert distance(hidden[0], all_rows) < 1e-4
        logits = drafter.logits(hidden, None)[0, config.first_row :]
        base_logits = reference.base_logits(resolved, weights, draft_rows)
        assert distance(logits, base_logits) < 1e-3
        tokens, expected_logits = reference.markov_walk(
            resolved, weights, draft_rows, base_logits, anchor
        )
        draft_hidden = hidden[0, config.first_row :]
        scores = drafter.to_full_vocab(logits)
        [chosen] = drafter.choose([DraftScores(scores, 1.0, draft_hidden, mx.array(anchor))])
        assert chosen.tolist() == tokens
        previous = mx.array([anchor, *tokens[:-1]])
        assert distance(corrected(drafter, logits, draft_hidden, previous), expected_logits) < 1e-3


@pytest.mark.parametrize("kind", ["vanilla", "gated", "rnn"])
def test_tokens_chosen_for_several_requests_are_those_of_the_reference_for_each(kind):
    """At temperatures above 0, where the scores include the noise of the target's choices."""
    drafter = build(raw_config(markov_head_type=kind, draft_vocab_size=DRAFTED))
    hidden = mx.random.normal((5, 32))
    anchor = mx.array(7)
    logits = drafter.logits(hidden[None], None)[0]
    noise = mx.random.gumbel((5, VOCABULARY))
    temperatures = [0.4, 0.8, 2.0]
    requests = []
    for temperature in temperatures:
        scores = drafter.to_full_vocab(logits / temperature) + noise
        requests.append(DraftScores(scores, 1 / temperature, hidden, anchor))
    together = drafter.choose(requests)
    weights = {name: np.array(value) for name, value in tree_flatten(drafter.parameters())}
    config = dataclasses.asdict(drafter.config)
    draft_noise = np.array(drafter.to_draft_vocab(noise))
    for temperature, tokens in zip(temperatures, together, strict=True):
        expected, _ = reference.markov_walk(
            config,
            weights,
            np.array(hidden),
            np.array(logits),
            7,
            draft_noise,
            temperature,
        )
        assert tokens.tolist() == expected


@pytest.mark.parametrize("temperature", [0.0, 0.8])
@pytest.mark.parametrize("kind", ["vanilla", "gated", "rnn"])
@pytest.mark.parametrize("drafted", [VOCABULARY, DRAFTED])
def test_the_candidates_of_a_tree_are_probable_and_the_top_ones_the_greedy_chain(
    kind, drafted, temperature
):
    """The chain at temperature 0 only. At any, a slot's probabilities sum to 1 at most."""
    drafter = build(raw_config(markov_head_type=kind, draft_vocab_size=drafted))
    sampler = Sampler(RequestSettings(temperature=temperature, seed=3), [1, 2, 3])
    hidden = mx.random.normal((1, 4, 32))
    logits = drafter.to_full_vocab(drafter.logits(hidden, None)[0])
    scores, weight = sampler.draft_scores(logits)
    draft_scores = DraftScores(scores, weight, hidden[0], mx.array(7))
    tokens, log_probs = drafter.candidates(draft_scores, 12)
    assert tokens.shape == (4, 12) and log_probs.shape == (4, 1, 12)
    assert mx.all(mx.exp(log_probs).sum(axis=-1) < 1 + 1e-4)
    if temperature == 0:
        [chosen] = drafter.choose([draft_scores])
        best = log_probs[:, 0].argmax(axis=-1)
        assert mx.array_equal(mx.take_along_axis(tokens, best[:, None], axis=-1)[:, 0], chosen)


def test_a_mask_embedding_replaces_that_of_the_mask_token():
    drafter = build(raw_config(), (EMBEDDING, HEAD, MASK))
    block = drafter.embed(mx.array([block_tokens(5, rows=3)]), None)[0]
    assert mx.array_equal(block[0], drafter.embed_tokens.weight[5])
    assert mx.array_equal(block[1], drafter.mask_embedding)
    assert not mx.array_equal(block[1], drafter.embed_tokens.weight[MASK_TOKEN])


@pytest.mark.parametrize("adapter", [False, True])
def test_taps_of_another_width_give_the_references_hidden_states(adapter):
    """An adapter projects each tap first; without one, the fusion layer takes the wider taps."""
    fields = {"architectures": ["DFlashDraftModel"], "target_hidden_size": 20, "markov_rank": 0}
    nested = {"causal_head": True}
    parts = (EMBEDDING, HEAD, ADAPTER) if adapter else (EMBEDDING, HEAD)
    drafter = build(raw_config(**fields, dflash_config=nested), parts)
    taps = mx.random.normal((1, 11, 2 * 20))  # 11 rows of two layers' features
    block = drafter.embed(mx.array([block_tokens(5, rows=6)]), None)
    hidden = drafter(block, taps, drafter.make_cache())
    _, _, all_rows, _ = reference_of(drafter, taps, anchor=5, rows=6)
    assert distance(hidden[0], all_rows) < 1e-4
