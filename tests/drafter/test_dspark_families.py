"""Every target family with a DSpark drafter: the text is plain text, in chains and in trees."""

import functools

import mlx.core as mx
import pytest
from families import FAMILIES, plain_tokens, random_model, random_prompt, target_of

import dflash_mlx as dm
from dflash_mlx.drafter.config import DraftConfig
from dflash_mlx.drafter.dspark import DSpark

TOKENS, SEED = 14, 0
HEADS = ["vanilla", "gated", "rnn"]


def dspark_for(target, head):
    """A random DSpark over a target, with half of its tokens; row 0 drafts, or row 1."""
    raw = {
        "architectures": ["DSparkDraftModel"],
        "hidden_size": target.hidden_size,
        "num_hidden_layers": 1,
        "intermediate_size": 32,
        "num_attention_heads": 2,
        "num_key_value_heads": 1,
        "head_dim": 16,
        "vocab_size": target.vocab_size,
        "draft_vocab_size": target.vocab_size // 2,
        "block_size": 6,
        "mask_token_id": 1,
        "target_layer_ids": [0, target.num_layers - 1],
        "markov_rank": 8,
        "markov_head_type": head,
        "sample_from_anchor": head != "gated",
    }
    mx.random.seed(5)
    drafter = DSpark(DraftConfig.from_dict(raw))
    drafter.d2t = mx.arange(target.vocab_size // 2)  # every other token
    return drafter


@functools.cache
def pair(family):
    """A target, and a drafter for it."""
    target = target_of(random_model(family), family)
    return target, dspark_for(target, HEADS[FAMILIES.index(family) % len(HEADS)])


def plain(target, prompt, temperature):
    """What is generated without a drafter; greedily by mlx-lm itself."""
    if temperature == 0:
        return plain_tokens(target.model, prompt, TOKENS)
    settings = {"max_tokens": TOKENS, "temperature": temperature, "seed": SEED}
    return dm.generate(target, None, prompt, **settings).tokens


@pytest.mark.parametrize("temperature", [0.0, 0.8])
@pytest.mark.parametrize("family", FAMILIES)
def test_text_is_plain_text_in_chains_and_trees(family, temperature):
    (target, drafter), prompt = pair(family), random_prompt(20, 1)
    answer = plain(target, prompt, temperature)
    for tree in (None, 8) if target.supports_trees else (None,):
        result = dm.generate(
            target,
            drafter,
            prompt,
            max_tokens=TOKENS,
            temperature=temperature,
            seed=SEED,
            tree_budget=tree,
        )
        assert result.tokens == answer
        assert result.stats.drafted_tokens > 0 and bool(result.stats.trees) == (tree is not None)


def test_all_heads_meet_trees():
    reading = [pair(family)[0].supports_trees for family in FAMILIES]
    assert {at % len(HEADS) for at, reads in enumerate(reading) if reads} == {0, 1, 2}
