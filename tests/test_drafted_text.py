"""Whatever drafts, over whatever target: the text is the target's own greedy text."""

import mlx.core as mx
import mlx.nn as nn
import pytest
from tinymodels import greedy, random_drafter, random_model, target, tokenizer, wrapped

from dflash_mlx.drafter.dflash2 import DFlash2
from dflash_mlx.loop import generate
from dflash_mlx.targets import Target

DFLASH2 = {
    "architectures": ["DFlash2DraftModel"],
    "block_size": 8,
    "conv_kernel_size": 2,
    "conv_group_size": 16,
    "selector_rank": 8,
    "selector_top_k": 4,
}
SLIDING = {"layer_types": ["sliding_attention"] * 2, "sliding_window": 12, "is_causal": False}
GEMMA = {
    "model_type": "gemma4_text",
    "hidden_size": 64,
    "num_hidden_layers": 3,
    "intermediate_size": 128,
    "num_attention_heads": 4,
    "head_dim": 32,
    "global_head_dim": 32,
    "num_key_value_heads": 2,
    "num_kv_shared_layers": 0,
    "hidden_size_per_layer_input": 0,
    "layer_types": ["full_attention"] * 3,
    "max_position_embeddings": 4096,
    "final_logit_softcapping": 5.0,
    "use_double_wide_mlp": False,
}
PROMPT = list(range(20, 60))


@pytest.fixture(scope="module")
def gemma() -> Target:
    config = GEMMA | {"vocab_size": len(tokenizer())}
    return Target(random_model(config), wrapped(), config, "gemma")


@pytest.mark.parametrize("fields", [{}, SLIDING], ids=["full", "sliding"])
@pytest.mark.parametrize("draft_bits", [None, 8, 4])
@pytest.mark.parametrize("target_bits", [None, 4])
def test_dflash2_over_a_dense_target(fields, draft_bits, target_bits):
    drafter = random_drafter(**DFLASH2, **fields)
    assert isinstance(drafter, DFlash2)
    if draft_bits is not None:
        nn.quantize(drafter, bits=draft_bits, class_predicate=wide_enough)
    ours = target(bits=target_bits)
    result = generate(ours, drafter, PROMPT, max_tokens=48)
    assert result.tokens == greedy(ours, PROMPT, 48)
    assert result.stats.drafted_tokens > 0


def wide_enough(name: str, module: nn.Module) -> bool:
    return hasattr(module, "to_quantized") and module.weight.shape[-1] % 64 == 0


def test_a_target_that_scales_its_embeddings_and_caps_its_logits(gemma):
    """A drafter gets embeddings as the first layer does, and the head without its cap."""
    tokens, seen = mx.array([[5, 6, 7]]), []
    first = gemma.model.model.layers[0]

    class Watching(type(first)):
        def __call__(self, x, *args, **kwargs):
            seen.append(x)
            return super().__call__(x, *args, **kwargs)

    first.__class__, original = Watching, type(first)
    gemma.model(tokens)
    first.__class__ = original
    assert mx.allclose(gemma.embed(tokens), seen[0])
    hidden = mx.random.normal((1, 3, 64)) * 10
    bare = gemma.model.model.embed_tokens.as_linear(hidden)
    assert mx.abs(bare).max() > GEMMA["final_logit_softcapping"]
    assert mx.allclose(gemma.head(hidden), bare)


@pytest.mark.parametrize("fields", [{}, DFLASH2, DFLASH2 | {"final_logit_softcapping": 5.0}])
def test_drafting_for_such_a_target(gemma, fields):
    result = generate(gemma, random_drafter(**fields), PROMPT, max_tokens=48)
    assert result.tokens == greedy(gemma, PROMPT, 48)
