"""For a given seed the text is the same, token for token, whatever drafts and however much."""

import mlx.core as mx
import pytest
from families import FAMILIES, random_model, random_prompt, target_of
from oracle import Oracle
from tinymodels import random_drafter, target

import dflash_mlx as dm

PROMPT = list(range(20, 40))
TOKENS = 48
WAYS = {
    "all tokens": {},
    "top-k": {"top_k": 20},
    "top-p": {"top_p": 0.9},
    "min-p": {"min_p": 0.02},
    "penalties": {
        "repetition_penalty": 1.2,
        "presence_penalty": 0.5,
        "frequency_penalty": 0.3,
        "frequency_context_size": 64,
        "logit_bias": {5: 2.0, 9: -3.0},
    },
}
WAYS["everything"] = {name: value for way in WAYS.values() for name, value in way.items()}


def never(tokens, logits):
    """A processor of one's own: no token twice in a row."""
    return mx.where(mx.arange(logits.shape[-1]) == tokens[-1], -mx.inf, logits)


WAYS["a processor"] = {"logits_processors": [never]}


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("temperature", [0.0, 0.8, 1.3])
def test_whoever_drafts(temperature, way):
    model = target("qwen3")
    settings = {"temperature": temperature, "seed": 11, "max_tokens": TOKENS, **WAYS[way]}
    plain = dm.generate(model, None, PROMPT, **settings)
    assert plain.stats.rounds == TOKENS - 1
    for p in (1.0, 0.7):
        oracle = Oracle(PROMPT, plain.tokens, model.vocab_size, p)
        drafted = dm.generate(model, oracle, PROMPT, **settings)
        assert drafted.tokens == plain.tokens
        assert drafted.stats.rounds < TOKENS - 1
    # Nearly all that this one drafts is wrong.
    assert dm.generate(model, random_drafter(), PROMPT, **settings).tokens == plain.tokens


@pytest.mark.parametrize("block_size", [1, 2, 3, 5, 9, 16])
def test_at_every_width(block_size):
    model = target("llama")
    settings = {"temperature": 0.8, "seed": 4, "max_tokens": TOKENS, "top_p": 0.95}
    settings["repetition_penalty"] = 1.1
    plain = dm.generate(model, None, PROMPT, **settings)
    oracle = Oracle(PROMPT, plain.tokens, model.vocab_size, 0.8, seed=block_size)
    drafted = dm.generate(model, oracle, PROMPT, block_size=block_size, **settings)
    assert drafted.tokens == plain.tokens and set(oracle.widths) <= set(range(1, block_size + 1))


@pytest.mark.parametrize("family", FAMILIES)
def test_on_every_family(family):
    model, prompt = target_of(random_model(family), family), random_prompt(20, 0)
    settings = {"temperature": 0.8, "top_k": 40, "seed": 3, "max_tokens": 32}
    plain = dm.generate(model, None, prompt, **settings).tokens
    oracle = Oracle(prompt, plain, 256, 0.7)
    assert dm.generate(model, oracle, prompt, block_size=8, **settings).tokens == plain


def test_the_seed_and_nothing_else_decides():
    model = target("qwen3")
    texts = [
        dm.generate(model, None, PROMPT, temperature=1.0, seed=seed, max_tokens=24).tokens
        for seed in (1, 2, 1)
    ]
    assert texts[0] == texts[2] != texts[1]
    fresh = dm.generate(model, None, PROMPT, temperature=1.0, max_tokens=24)
    again = dm.generate(
        model, random_drafter(), PROMPT, temperature=1.0, max_tokens=24, seed=fresh.stats.seed
    )
    assert again.tokens == fresh.tokens
