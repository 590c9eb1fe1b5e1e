"""The drift alarm: what we build on in mlx-lm, which promises none of it.

When one of these fails after an update of mlx-lm, nothing is wrong with the test: look at every
place of dflash_mlx/ that imports mlx_lm, and then at the pinned range in pyproject.toml.
"""

import inspect

import mlx.core as mx
import pytest
from mlx_lm import utils
from mlx_lm.models import rope_utils
from mlx_lm.models.activations import swiglu
from mlx_lm.models.cache import KVCache, make_prompt_cache
from tinymodels import END, SUPPORTED, model_config, random_model, save_target, tokenizer, wrapped


def parameters(function) -> list[str]:
    return list(inspect.signature(function).parameters)


def test_a_kv_cache_is_its_three_fields():
    """`rollback.py` and the drafter's context trim them and rely on there being nothing else."""
    cache = KVCache()
    assert vars(cache) == {"keys": None, "values": None, "offset": 0}
    rows = mx.arange(5, dtype=mx.float32).reshape(1, 1, 5, 1)
    keys, values = cache.update_and_fetch(rows, -rows)
    assert keys.reshape(-1).tolist() == [0, 1, 2, 3, 4]
    assert values.reshape(-1).tolist() == [0, -1, -2, -3, -4]
    assert cache.keys.shape[2] == KVCache.step == 256
    assert cache.trim(2) == 2 and cache.offset == 3
    assert set(vars(cache)) == {"keys", "values", "offset"}
    keys, _ = cache.update_and_fetch(rows[:, :, :1] + 9, rows[:, :, :1])
    assert keys.reshape(-1).tolist() == [0, 1, 2, 9]
    assert [type(part) for part in cache.state] == [mx.array, mx.array, int]


@pytest.mark.parametrize("family", SUPPORTED)
def test_how_a_model_is_built_and_called(family):
    """`Target` finds the parts by these names; `Taps` records what each layer's class returns."""
    model = random_model(model_config(family))
    backbone = model.model
    assert parameters(model.__call__)[:2] == ["inputs", "cache"]
    caches = make_prompt_cache(model)
    assert [type(cache) for cache in caches] == [KVCache] * len(backbone.layers)

    calls = []

    class Spy(type(backbone.layers[0])):
        def __call__(self, *arguments, **options):
            calls.append((arguments, options))
            return super().__call__(*arguments, **options)

    for layer in backbone.layers:
        layer.__class__ = Spy
    tokens = mx.array([[3, 4, 5]])
    logits = model(tokens, cache=caches)
    assert len(calls) == len(backbone.layers) == 3
    for (x, *_), options in calls:
        assert x.shape == (1, 3, 64) and set(options) <= {"cache"}
    assert [cache.offset for cache in caches] == [3, 3, 3]
    assert logits.shape == (1, 3, len(tokenizer()))
    hidden = backbone(tokens)
    tied = not hasattr(model, "lm_head")
    head = backbone.embed_tokens.as_linear if tied else model.lm_head
    assert mx.allclose(head(hidden), logits, atol=1e-5)


def test_the_tokenizer_wrapper():
    wrapper = wrapped([7])
    assert wrapper.eos_token_ids == {7, tokenizer().eos_token_id}
    first, second = wrapper.detokenizer, wrapper.detokenizer
    assert first is not second  # a request's own
    for token in tokenizer().encode("The fox"):
        first.add_token(token)
    first.finalize()
    assert first.last_segment == "The fox" and first.last_segment == second.last_segment == ""
    messages = [{"role": "user", "content": "hi"}]
    ids = wrapper.apply_chat_template(messages, add_generation_prompt=True)
    assert ids == tokenizer().encode("user: hi\nassistant:")
    assert wrapper.has_chat_template and wrapper.bos_token is None and wrapper.eos_token == END


def test_how_models_are_loaded(tmp_path):
    assert parameters(utils.load_model)[:3] == ["model_path", "lazy", "strict"]
    assert parameters(utils.load_tokenizer) == [
        "model_path",
        "tokenizer_config_extra",
        "eos_token_ids",
    ]
    folder = save_target(tmp_path, "qwen3_moe", eos_token_id=5)
    model, config = utils.load_model(folder, lazy=True)
    assert config["eos_token_id"] == 5 and config["hidden_size"] == 64
    # True, False or how to quantize, for a layer's path
    assert model.quant_predicate("model.layers.0.self_attn.q_proj", None) is True
    assert model.quant_predicate("model.layers.0.mlp.gate", None)["bits"] == 8
    wrapper = utils.load_tokenizer(folder, eos_token_ids=[5])
    assert 5 in wrapper.eos_token_ids


def test_what_the_drafter_is_made_of():
    assert parameters(rope_utils.initialize_rope) == [
        "dims",
        "base",
        "traditional",
        "scaling_config",
        "max_position_embeddings",
    ]
    gate, x = mx.array([1.0, -2.0]), mx.array([3.0, 5.0])
    assert mx.allclose(swiglu(gate, x), gate * mx.sigmoid(gate) * x)
