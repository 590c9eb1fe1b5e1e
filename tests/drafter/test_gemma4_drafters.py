"""Drafters with Gemma 4's layers: the layers are mlx-lm's, and text is plain text."""

import mlx.core as mx
import pytest
from families import check_drafted_text, random_model, random_prompt, target_of
from mlx.utils import tree_flatten, tree_map
from mlx_lm.models import gemma4_text
from mlx_lm.models.base import create_attention_mask
from mlx_lm.models.cache import KVCache

from dflash_mlx.drafter.config import DraftConfig
from dflash_mlx.drafter.networks import EMBEDDING, HEAD, network_for
from dflash_mlx.loading.drafters import drop_copies

ROPE = {"rope_type": "proportional", "rope_theta": 1e6, "partial_rotary_factor": 0.25}
TINY = {
    "architectures": ["Gemma4DSparkModel"],
    "hidden_size": 64,
    "num_hidden_layers": 2,
    "intermediate_size": 96,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "num_global_key_value_heads": 1,
    "head_dim": 16,
    "global_head_dim": 32,
    "vocab_size": 256,
    "attention_k_eq_v": True,
    "hidden_activation": "gelu_pytorch_tanh",
    "rope_parameters": {"full_attention": ROPE},
    "layer_types": ["full_attention"] * 2,
    "final_logit_softcapping": 30.0,
    "target_layer_ids": [0, 2],
}
DSPARK = {
    "block_size": 6,
    "mask_token_id": 4,
    "markov_rank": 8,
    "enable_confidence_head": True,
}
EAGLE = {"architectures": ["Gemma4Eagle3Model"], "num_hidden_layers": 1, "ttt_length": 7}
EAGLE |= {"layer_types": ["full_attention"]}


def drafter_of(**changes):
    """A random one that brings its own embedding and head, as DeepSpec's do."""
    config = DraftConfig.from_dict(TINY | changes)
    mx.random.seed(3)
    drafter = network_for(config)(config, (EMBEDDING, HEAD, "layers.0.self_attn.q_norm.weight"))
    drafter.update(tree_map(lambda w: w + 0.1 * mx.random.normal(w.shape), drafter.parameters()))
    return drafter


@pytest.mark.parametrize("shared", [True, False])
def test_a_layer_is_the_targets_full_attention_layer(shared):
    drafter = drafter_of(**DSPARK, attention_k_eq_v=shared)
    ours, config = (
        drafter.layers[1],
        {**TINY, "hidden_size_per_layer_input": 0, "num_kv_shared_layers": 0},
    )
    arguments = gemma4_text.ModelArgs.from_dict(config | {"attention_k_eq_v": shared})
    theirs = gemma4_text.DecoderLayer(arguments, 1)
    theirs.load_weights(tree_flatten(ours.parameters()), strict=False)
    assert {n for n, _ in tree_flatten(theirs.parameters())} <= {
        n for n, _ in tree_flatten(ours.parameters())
    }
    x = mx.random.normal((1, 9, 64))
    expected = theirs(x, mask=create_attention_mask(x, None), cache=KVCache())[0]
    attention = ours.self_attn
    attention.causal = True
    found = ours(
        x, lambda h: attention.attend(attention.queries(h, 0), *attention.keys_values(h, 0))
    )
    assert mx.abs(found - expected).max() < 1e-5


@pytest.mark.parametrize("temperature", [0.0, 0.8])
@pytest.mark.parametrize(
    "changes", [DSPARK, EAGLE, DSPARK | {"markov_rank": 0, "enable_confidence_head": False}]
)
def test_text_is_plain_text(changes, temperature):
    target = target_of(random_model("gemma4_dense"), "gemma4_dense")
    drafter = drafter_of(**changes, hidden_size=target.hidden_size)
    settings = {"max_tokens": 8, "temperature": temperature, "seed": 0 if temperature else None}
    check_drafted_text(target, drafter, [random_prompt(20, 1)], **settings)


def test_copies_of_the_targets_scaled_embedding_are_dropped():
    target = target_of(random_model("gemma4_dense"), "gemma4_dense")
    drafter = drafter_of(**DSPARK, hidden_size=target.hidden_size)
    ids = mx.arange(256)[None]
    drafter.embed_tokens.weight = target.embed(ids)[0] / target.hidden_size**0.5
    before = drafter.embed(ids, target)
    assert "embedding" in drop_copies(drafter, target)
    assert mx.allclose(before, drafter.embed(ids, target), rtol=1e-4)
