"""The drift alarm: the internals of mlx-lm that we rely on and that mlx-lm does not promise.

When one of these tests fails after an update of mlx-lm, the test is right: look at what it names
in dflash_mlx/targets/internals.py, and then at the range of versions in pyproject.toml.
"""

import ast
import inspect
from pathlib import Path
from types import SimpleNamespace

import families
import mlx.core as mx
import pytest
from mlx.utils import tree_flatten
from mlx_lm.models import ministral3, mistral4

from dflash_mlx.targets import internals
from dflash_mlx.targets.caches import make_cache, own_cache
from dflash_mlx.targets.caches.row_cache import RowCache
from dflash_mlx.targets.model_parts import find_parts

PACKAGE = Path(__file__).parents[2] / "dflash_mlx"
HYBRID = ("qwen3_5", "qwen3_5_moe", "qwen3_next")
MLA = ("kimi_k25", "deepseek_v3", "deepseek_v32", "glm_moe_dsa")


def parameters(function) -> list[str]:
    return list(inspect.signature(function).parameters)


def test_a_kv_cache_has_three_fields():
    """A commit moves the offset back, which is enough only if no other field has to change."""
    cache = own_cache(internals.KVCache())
    assert vars(cache) == {"keys": None, "values": None, "offset": 0}
    rows = mx.arange(5, dtype=mx.float32).reshape(1, 1, 5, 1)
    keys, values = cache.update_and_fetch(rows, -rows)
    assert keys.reshape(-1).tolist() == [0, 1, 2, 3, 4]
    assert values.reshape(-1).tolist() == [0, -1, -2, -3, -4]
    assert cache.keys.shape[2] == internals.KVCache.step == 256
    assert cache.trim(2) == 2 and cache.offset == 3
    assert set(vars(cache)) == {"keys", "values", "offset"}
    keys, _ = cache.update_and_fetch(rows[:, :, :1] + 9, rows[:, :, :1])
    assert keys.reshape(-1).tolist() == [0, 1, 2, 9]
    assert [type(part) for part in cache.state] == [mx.array, mx.array, int]


@pytest.mark.parametrize("steps", [(3,), (1, 1), (9,), (6, 1), (1, 5, 1, 1, 1), (1,) * 10])
def test_a_rotating_cache_filled_from_a_window_continues_alike(steps):
    """A cache filled from another one's window gives that one's keys and masks from there on."""
    original = own_cache(internals.RotatingKVCache(max_size=4))
    filled = own_cache(internals.RotatingKVCache(max_size=4))
    rows = mx.arange(20, dtype=mx.float32).reshape(1, 1, 20, 1)
    for count in steps:
        new = rows[:, :, original.offset : original.offset + count]
        original.update_and_fetch(new, new)
    position = sum(steps)
    keys, _ = original.window()
    assert keys.reshape(-1).tolist() == list(range(max(0, position - 4), position))
    filled.fill(position, keys[...], keys[...])
    for count in (1, 1, 3, 1):
        new = rows[:, :, original.offset : original.offset + count]
        expected, _ = original.update_and_fetch(new, new)
        actual, _ = filled.update_and_fetch(new, new)
        assert sorted(actual.flatten().tolist()) == sorted(expected.flatten().tolist())
        masks = [
            cache.make_mask(2, window_size=4, return_array=True) for cache in (original, filled)
        ]
        assert mx.array_equal(*masks)
        assert original.offset == filled.offset


def test_a_rotating_cache_holds_rows_in_order_after_a_step_of_several():
    """With `max_size - 1` older rows at most; a commit relies on it and cuts the end."""
    cache = own_cache(internals.RotatingKVCache(max_size=4))
    rows = mx.arange(9, dtype=mx.float32).reshape(1, 1, 9, 1)
    for start, end in ((0, 1), (1, 2), (2, 6), (6, 9)):
        keys, _ = cache.update_and_fetch(rows[:, :, start:end], rows[:, :, start:end])
    assert keys.reshape(-1).tolist() == [3, 4, 5, 6, 7, 8]
    assert cache._idx == keys.shape[2] == 6 and cache.offset == 9
    assert set(vars(cache)) == {"keep", "keys", "values", "offset", "max_size", "_idx"}
    cache.cut(2)
    assert cache._idx == 4 and cache.offset == 7
    keys, _ = cache.update_and_fetch(rows[:, :, 7:8], rows[:, :, 7:8])
    assert sorted(keys.reshape(-1).tolist()) == [4, 5, 6, 7]
    cache.update_and_fetch(rows[:, :, 8:9], rows[:, :, 8:9])  # overwrites the oldest row in place
    assert cache.keys.reshape(-1).tolist() != [5, 6, 7, 8]
    assert cache.in_order(cache.keys).reshape(-1).tolist() == [5, 6, 7, 8]


def test_the_other_caches_have_the_fields_we_know():
    assert set(vars(own_cache(internals.ArraysCache(2)))) == {"cache", "left_padding", "lengths"}
    assert set(vars(own_cache(internals.CacheList(internals.KVCache())))) == {"caches"}
    assert own_cache(internals.ChunkedKVCache(8)).trim(0) == 0
    names = {"keys", "values", "offset", "group_size", "bits"}
    assert set(vars(own_cache(internals.QuantizedKVCache(32, 8)))) == names


EMPTY = {
    "full": lambda: internals.KVCache(),
    "quantized": lambda: internals.QuantizedKVCache(32, 8),
    "window": lambda: internals.RotatingKVCache(8),
    "chunked": lambda: internals.ChunkedKVCache(8),
    "arrays": lambda: internals.ArraysCache(2),
    "parts": lambda: internals.CacheList(internals.KVCache(), internals.RotatingKVCache(8)),
}


@pytest.mark.parametrize("kind", EMPTY)
def test_our_caches_pass_for_mlx_lms(kind):
    """They are instances of mlx-lm's classes with the same attributes and results."""
    theirs = EMPTY[kind]()
    ours = own_cache(EMPTY[kind]())
    assert isinstance(ours, type(theirs))
    for name in {*dir(theirs), "bits", "keys", "advance", "make_mask"}:
        assert hasattr(ours, name) == hasattr(theirs, name), name
    assert bool(ours) == bool(theirs), "mlx-lm asks `if cache`"
    assert ours.is_trimmable() == theirs.is_trimmable() and ours.empty() == theirs.empty()
    if kind in ("arrays", "parts"):
        return
    for rows in (3, 1, 6, 1, 1, 5):
        if kind != "chunked":
            for array, window in ((False, None), (True, None), (False, 4)):
                options = {"return_array": array, "window_size": window}
                assert _same(ours.make_mask(rows, **options), theirs.make_mask(rows, **options))
        keys = mx.random.normal((1, 2, rows, 32))
        values = mx.random.normal((1, 2, rows, 32))
        actual = tree_flatten([ours.update_and_fetch(keys, values), ours.state])
        expected = tree_flatten([theirs.update_and_fetch(keys, values), theirs.state])
        for (name, x), (_, y) in zip(actual, expected, strict=True):
            assert _same(x, y), name


def _same(x, y) -> bool:
    return mx.array_equal(x, y).item() if isinstance(x, mx.array) else x == y


@pytest.mark.parametrize("family", families.FAMILIES)
def test_a_model_computes_the_same_with_our_caches(family):
    """Prompts, single rows and several rows give the bits that mlx-lm's own caches give."""
    model = families.random_model(family)
    theirs = internals.make_prompt_cache(model)
    ours = make_cache(model, find_parts(model).owners)
    for rows in (40, 1, 5, 1, 1):
        tokens = mx.array([families.random_prompt(rows, rows)])
        assert mx.array_equal(model(tokens, cache=ours), model(tokens, cache=theirs))


@pytest.mark.parametrize("family", ["qwen3_next", "deepseek_v32"])
def test_a_pipeline_gives_the_first_rank_the_last_layers(family):
    model = families.random_model(family)
    backbone = internals.backbone(internals.text_model(model))
    layers = list(model.layers)
    assert internals.has_pipeline(backbone) and internals.first_layer(model) == 0
    backbone.pipeline(SimpleNamespace(rank=lambda: 0, size=lambda: 2))
    assert layers[2:] == model.layers
    assert internals.first_layer(model) == 2 and len(backbone.layers) == len(layers)
    assert not internals.has_pipeline(internals.backbone(families.random_model("qwen3")))


@pytest.mark.parametrize(
    ("module", "backbone_class"),
    [(ministral3, ministral3.LanguageModel), (mistral4, mistral4.Mistral4Model)],
)
def test_queries_are_scaled_by_a_global_function_of_the_position(module, backbone_class):
    scale = getattr(module, internals.QUERY_SCALE)
    assert parameters(scale) == ["size", "offset", "beta", "max_position_embeddings"]
    assert mx.array_equal(scale(5, 7, 0.1, 4)[2:], scale(3, 9, 0.1, 4))
    assert internals.QUERY_SCALE in backbone_class.__call__.__code__.co_names


def test_a_longrope_takes_new_periods_and_a_new_amplitude():
    settings = {"dims": 8, "base": 1e4, "short_factor": [1.0] * 4, "long_factor": [2.0] * 4}
    rope = internals.SuScaledRoPE(**settings)
    plain = internals.SuScaledRoPE(**settings)
    internals.rescale_longrope(rope, mx.full(4, 0.5), 1.0)
    assert mx.allclose(rope._freqs * 2, plain._freqs) and rope._scale == 1.0
    x = mx.random.normal((1, 1, 3, 8))
    assert mx.allclose(rope(x), mx.fast.rope(x, 8, traditional=False, base=1e4, scale=1, offset=0))


def test_the_modules_that_compute_a_model_are_found():
    """Qwen3.5's MoE model uses layers of mlx-lm's `qwen3_5` and `qwen3_next` modules."""
    assert internals.modules_of(families.random_model("qwen3_5_moe")) >= {"qwen3_5", "qwen3_next"}


def test_only_internals_imports_private_names_of_mlx_lm():
    """In `targets/`, internals.py is the only module that imports mlx-lm's caches and models."""
    for path in PACKAGE.rglob("*.py"):
        if path == PACKAGE / "targets" / "internals.py":
            continue
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.ImportFrom) and (node.module or "").startswith("mlx_lm"):
                names = [alias.name for alias in node.names]
                assert not any(name.startswith("_") for name in names), path
                assert path.parent.name != "targets" or names == ["TokenizerWrapper"], path


def test_the_functions_of_mlx_lm_have_the_parameters_that_we_pass():
    expected_parameters = {
        internals.scaled_dot_product_attention: "queries keys values cache scale mask sinks",
        internals.gated_delta_update: "q k v a b A_log dt_bias state mask use_kernel",
        internals.compute_g: "A_log a dt_bias",
        internals.ssm_step: "mixer x b c dt state",
        internals.normalize_qk: "q k inv_scale eps",
        internals.classes_of: "config",
        internals.make_prompt_cache: "model",
    }
    for function, names in expected_parameters.items():
        expected = names.split()
        assert parameters(function)[: len(expected)] == expected, function
    for kind in (internals.KVCache, internals.RotatingKVCache):
        assert parameters(kind.update_and_fetch) == ["self", "keys", "values"]
    mask_parameters = parameters(internals.RotatingKVCache.make_mask)
    assert mask_parameters[:4] == ["self", "N", "window_size", "return_array"]


@pytest.mark.parametrize("family", families.FAMILIES)
def test_the_parts_of_every_family_are_found(family):
    """And the kinds of all layers are recognised: attention, recurrences, rotations and sinks."""
    config = families.CONFIGS[family]
    shape = config.get("text_config", config)
    model = families.random_model(family)
    assert isinstance(model, internals.classes_of(config)[0])
    text = internals.text_model(model)
    parts = find_parts(model)
    assert len(model.layers) == shape["num_hidden_layers"]
    gemma = family.startswith("gemma4")
    assert internals.own_head(text) is parts.head
    assert (parts.head is None) == (gemma or family == "lfm2_moe")
    scale = internals.embed_scale(internals.backbone(text))
    assert scale == (shape["hidden_size"] ** 0.5 if gemma else None)

    caches = internals.make_prompt_cache(model)
    model(mx.array([[1, 2, 3]]), cache=caches)
    for layer, cache in zip(parts.owners, caches, strict=True):
        attention = internals.attention_of(layer)
        mixer = internals.mixer_of(layer)
        assert (attention is None) == (mixer is not None)
        if mixer is not None:
            assert (type(mixer) in internals.SHORT_CONVOLUTIONS) == (family == "lfm2_moe")
            assert (type(mixer) in internals.MAMBA2) == (family == "nemotron_h")
            assert (type(mixer) in internals.GATED_DELTA) == (family in HYBRID)
            continue
        assert internals.is_mla(layer) == (family in MLA)
        assert family != "deepseek_v3" or type(attention) is internals.DeepseekV3Attention
        indexed = type(attention) is internals.DeepseekV32Attention
        assert indexed == (family in ("deepseek_v32", "glm_moe_dsa"))
        assert internals.has_sinks(attention) == (family in ("gpt_oss", "deepseek_v41"))
        names_in_code = type(attention).__call__.__code__.co_names
        assert (internals.ATTENTION in names_in_code) == (family != "deepseek_v41")
        if internals.has_key_projection(attention):
            heads = internals.key_heads(attention)
            size = internals.head_size(attention)
            assert (cache.keys.shape[1], cache.keys.shape[3]) == (heads, size)
            assert internals.query_heads(attention) % heads == 0
        else:
            assert family in MLA or family == "deepseek_v41"
        assert internals.own_class(layer) is type(layer)
        ropes = [
            module
            for path, module in layer.named_modules()
            if path == "rope" or path.endswith(".rope")
        ]
        assert bool(ropes) != internals.uses_no_positions(layer)
        assert not internals.masks_itself(layer)
        assert {type(rope).__name__ for rope in ropes} <= internals.ROPES


def test_the_recurrent_layers_of_mlx_lm_are_known():
    kinds = {*internals.SHORT_CONVOLUTIONS, *internals.MAMBA2}
    assert {kind.__name__ for kind in kinds} >= {"ShortConv", "NemotronHMamba2Mixer"}
    delta = internals.GatedDeltaNet, internals.Qwen3NextGatedDeltaNet
    assert delta == internals.GATED_DELTA
    assert internals.MIXERS and internals.NOPE and internals.OWN_MASKS


@pytest.mark.parametrize("family", ["qwen3", "gpt_oss", "gemma4_dense", "deepseek_v32", "llama"])
def test_models_get_masks_and_keys_from_their_caches(family, monkeypatch):
    """A draft tree gets in there: a cache of ours gives the tree's mask."""
    model = families.random_model(family)
    caches = make_cache(model, find_parts(model).owners)
    parts = [part for cache in caches for part in getattr(cache, "caches", (cache,))]
    calls = []
    for name in ("make_mask", "update_and_fetch"):
        inherited = getattr(RowCache, name)

        def call(cache, *args, name=name, inherited=inherited, **options):
            assert name == "update_and_fetch" or set(options) <= {"return_array", "window_size"}
            calls.append(name)
            return inherited(cache, *args, **options)

        monkeypatch.setattr(RowCache, name, call)
    model(mx.array([[1, 2, 3]]), cache=caches)
    assert calls.count("update_and_fetch") == len(parts)
    assert "make_mask" in calls


def test_mask_of_gives_none_a_word_or_an_array():
    """As mlx-lm does: none for one row, "causal" for several, an array where it is asked for."""
    options = {"return_array": False, "window_size": None}  # by name, as mlx-lm's models do
    for cache in (internals.KVCache(), internals.RotatingKVCache(8)):
        assert internals.mask_of(cache, 1, **options) is None
        assert internals.mask_of(cache, 2, **options) == "causal"
        mask = internals.mask_of(cache, 3, return_array=True, window_size=None)
        assert mask.shape == (3, 3)
    assert internals.mask_of(internals.ArraysCache(2), 4) is None


def test_the_sharding_group_of_a_recurrent_layer_is_found():
    layer = families.random_model("qwen3_5").language_model.model.layers[0]
    assert layer.linear_attn.sharding_group is None  # the attribute that mlx-lm's `shard` sets
    assert internals.sharding_group(layer.linear_attn) is None
    layer.linear_attn.sharding_group = object()
    assert internals.sharding_group(layer.linear_attn) is not None
    without = families.random_model("qwen3_next").layers[0].linear_attn
    assert internals.sharding_group(without) is None
