"""Drafted text is plain text: families x drafters, alone, in trees and eight in one forward."""

import functools
import itertools
from dataclasses import replace

import mlx.core as mx
import pytest
from families import (
    FAMILIES,
    check_drafted_text,
    plain_tokens,
    random_model,
    random_prompt,
    target_of,
)

from dflash_mlx.drafter.config import DraftConfig
from dflash_mlx.drafter.networks import network_for

LAYER = {
    "num_hidden_layers": 1,
    "intermediate_size": 32,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "head_dim": 16,
}
DSPARK = {"architectures": ["DSparkDraftModel"], "block_size": 6, "mask_token_id": 1}
HEADS = ("vanilla", "gated", "rnn")
DRAFTERS = {
    head: DSPARK
    | {"markov_rank": 8, "markov_head_type": head, "sample_from_anchor": head != "gated"}
    for head in HEADS
} | {"eagle3": {"architectures": ["LlamaForCausalLMEagle3"]}}
# Every family with one of DSpark's heads, and some with EAGLE-3's; all pairs run with -m matrix.
DEFAULT = {(family, HEADS[at % 3], 0.8 * (at % 2)) for at, family in enumerate(FAMILIES)}
DEFAULT |= {("qwen3", "eagle3", 0.0), ("qwen3_5", "eagle3", 0.8)}


@functools.cache
def pair(family, kind):
    """A random target, and a random drafter for it of half of its tokens."""
    target = target_of(random_model(family), family)
    sizes = {"hidden_size": target.hidden_size, "vocab_size": target.vocab_size}
    sizes |= {"draft_vocab_size": target.vocab_size // 2}
    if kind != "eagle3":
        sizes["target_layer_ids"] = [0, target.num_layers - 1]
    config = DraftConfig.from_dict(LAYER | sizes | DRAFTERS[kind])
    if kind == "eagle3":
        config = replace(config, target_layer_ids=(0, 1, target.num_layers - 1))
    mx.random.seed(5)
    drafter = network_for(config)(config)
    drafter.d2t = mx.arange(target.vocab_size // 2)  # every other token
    return target, drafter


@pytest.mark.parametrize(
    ("family", "kind", "temperature"),
    [
        pytest.param(*each, marks=[] if each in DEFAULT else [pytest.mark.matrix])
        for each in itertools.product(FAMILIES, DRAFTERS, (0.0, 0.8))
    ],
)
def test_it_is_plain_text(family, kind, temperature):
    (target, drafter), settings = pair(family, kind), {"max_tokens": 8, "temperature": temperature}
    settings |= {"seed": 0} if temperature else {}
    prompts = [random_prompt(6 + 3 * number, number) for number in range(8)]
    plain = check_drafted_text(target, drafter, prompts, **settings)
    if not temperature:
        assert plain[0] == plain_tokens(target.model, prompts[0], 8)
