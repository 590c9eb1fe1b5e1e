"""The drift alarm: what we build on in mlx-lm, which promises none of it.

When one of these fails after an update of mlx-lm, nothing is wrong with the test: look at every
place of dflash_mlx/ that imports mlx_lm, and then at the pinned range in pyproject.toml.
"""

import inspect

import families
import mlx.core as mx
import pytest
from mlx_lm import utils
from mlx_lm.models import rope_utils
from mlx_lm.models.activations import swiglu
from mlx_lm.models.cache import (
    ArraysCache,
    CacheList,
    KVCache,
    QuantizedKVCache,
    RotatingKVCache,
    make_prompt_cache,
)
from mlx_lm.models.deepseek_v41 import LayerCache
from mlx_lm.models.qwen3_5 import GatedDeltaNet
from mlx_lm.models.qwen3_next import Qwen3NextGatedDeltaNet
from tinymodels import END, SUPPORTED, model_config, random_model, save_target, tokenizer, wrapped

from dflash_mlx.proposal import Proposal


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


def test_a_rotating_cache_after_several_rows():
    """`rollback.py` cuts its end: temporal order, `max_size - 1` older rows, no more."""
    cache = RotatingKVCache(max_size=4)
    rows = mx.arange(9, dtype=mx.float32).reshape(1, 1, 9, 1)
    for start, count in ((0, 1), (1, 1), (2, 4), (6, 3)):
        keys, _ = cache.update_and_fetch(*[rows[:, :, start : start + count]] * 2)
    assert keys.reshape(-1).tolist() == [3, 4, 5, 6, 7, 8]
    assert cache._idx == keys.shape[2] == 6 and cache.offset == 9
    fields = {"keep", "keys", "values", "offset", "max_size", "_idx"}
    assert set(vars(cache)) == fields


def test_the_other_caches_are_their_fields():
    """What `rollback.py`, `recurrent.py`, `compressed.py` and `kv_bits.py` read and write."""
    assert set(vars(ArraysCache(2))) == {"cache", "left_padding", "lengths"}
    assert set(vars(CacheList(KVCache()))) == {"caches"}
    assert set(vars(QuantizedKVCache(32, 8))) == {"keys", "values", "offset", "group_size", "bits"}
    compressed = ["compress_kv", "index_k", "pending_kv", "pending_gate"]
    assert set(vars(LayerCache(8))) == {"window_size", "offset", "window", *compressed}


@pytest.mark.parametrize("family", ["qwen3_5", "qwen3_5_moe", "qwen3_next"])
def test_a_recurrence_is_what_enters_it(family):
    """`recurrent.py` replays it from the convolution's output and the gates, bit for bit."""
    model = families.random_model(family)
    layer = getattr(model, "language_model", model).model.layers[0]
    tokens = families.random_prompt(12, 1)
    short, whole = (families.target_of(model, family).start() for _ in range(2))
    for session, rows in ((short, 7), (whole, 12)):
        list(session.prefill([1, 2, 3]))
        session.verify(Proposal(tokens[:rows]))
        session.commit(range(7))
    assert type(layer.linear_attn) in (GatedDeltaNet, Qwen3NextGatedDeltaNet)
    for one, other in zip(short._cache[0].cache, whole._cache[0].cache, strict=True):
        assert mx.array_equal(one, other)


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
