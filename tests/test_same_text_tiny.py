"""The promise of sampling on the embedded pair: drafted text is plain text, prompt by prompt."""

from importlib.resources import files

import pytest
from oracle import Oracle

import dflash_mlx as dm
from dflash_mlx.bench.datasets import BenchPrompt, embedded_prompts
from dflash_mlx.prompt import encode_prompt

PER_CATEGORY, TOKENS = 3, 12
# Strong enough that few tokens tell a row that was filtered or penalized like another; the hottest
# temperature is for what cooler ones hide, the pair being sure of nearly every token of its texts.
WAYS = [
    {},
    {"top_k": 3, "top_p": 0.6, "min_p": 0.001},
    {"repetition_penalty": 1.5, "presence_penalty": 3.0, "frequency_penalty": 1.0},
]

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(
        not files("dflash_mlx").joinpath("tiny", "drafter", "model.safetensors").is_file(),
        reason="the embedded pair is not here",
    ),
]


@pytest.fixture(scope="module")
def pair():
    return dm.load("tiny")


def shortest_of_each_category() -> list[BenchPrompt]:
    """Prompts are read in one forward whatever samples, so long ones would show nothing more."""
    chosen = {}
    for prompt in sorted(embedded_prompts(), key=lambda prompt: len(str(prompt.messages))):
        chosen.setdefault(prompt.category, []).append(prompt)
    return [prompt for prompts in chosen.values() for prompt in prompts[:PER_CATEGORY]]


@pytest.mark.parametrize(("first", "temperature"), enumerate((0.3, 0.8, 2.0)))
def test_drafted_tokens_are_plain_tokens(pair, first, temperature):
    """Each prompt at each temperature, in another way at each."""
    target, drafter = pair
    chosen = shortest_of_each_category()
    assert len(chosen) == 21
    rounds = tokens = 0
    for seed, prompt in enumerate(chosen):
        ids = encode_prompt(target, prompt.messages)
        way = WAYS[(first + seed) % len(WAYS)]
        settings = {"temperature": temperature, "seed": seed, "max_tokens": TOKENS, **way}
        plain = dm.generate(target, None, ids, **settings)
        width = 1 + seed % 16  # every fixed width has its turn
        # Always wrong and mostly right take turns: the two together cost more than they show.
        oracle = Oracle(ids, plain.tokens, target.vocab_size, (0.0, 0.8)[seed % 2], seed=seed)
        checked = dm.generate(target, oracle, ids, block_size=4, **settings)
        assert checked.tokens == plain.tokens
        pinned = dm.generate(target, drafter, ids, block_size=width, **settings)
        drafted = dm.generate(target, drafter, ids, **settings)
        assert drafted.tokens == pinned.tokens == plain.tokens
        rounds, tokens = rounds + drafted.stats.rounds, tokens + drafted.stats.round_tokens
    assert tokens > 1.5 * rounds
