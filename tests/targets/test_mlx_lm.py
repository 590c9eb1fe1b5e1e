"""The drift alarm: what we build on in mlx-lm, which promises none of it.

When one of these fails after an update of mlx-lm, nothing is wrong with the test: look at what it
names in dflash_mlx/targets/internals.py, and then at the pinned range in pyproject.toml.
"""

import ast
import inspect
import re
from pathlib import Path
from types import SimpleNamespace

import families
import mlx.core as mx
import pytest
from mlx_lm.models import ministral3, mistral4

from dflash_mlx.targets import internals
from dflash_mlx.targets.parts import find_parts

PACKAGE = Path(__file__).parents[2] / "dflash_mlx"
HYBRID = ("qwen3_5", "qwen3_5_moe", "qwen3_next")
MLA = ("kimi_k25", "deepseek_v3", "deepseek_v32", "glm_moe_dsa")


def parameters(function) -> list[str]:
    return list(inspect.signature(function).parameters)


def test_a_kv_cache_is_its_three_fields():
    """`rollback.py` and the drafter's context trim them and rely on there being nothing else."""
    cache = internals.KVCache()
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
def test_a_rotating_cache_made_of_its_window(steps):
    """`caches.py` exports the window, and another cache goes on as this one does."""
    caches = [internals.RotatingKVCache(max_size=4) for _ in range(2)]
    rows = mx.arange(20, dtype=mx.float32).reshape(1, 1, 20, 1)
    for step in steps:
        at = caches[0].offset
        caches[0].update_and_fetch(*[rows[:, :, at : at + step]] * 2)
    keys, _ = internals.window_of(caches[0])
    assert keys.reshape(-1).tolist() == list(range(max(0, at + step - 4), at + step))
    internals.fill_window(caches[1], at + step, keys[...], keys[...])
    for more in (1, 1, 3, 1):
        at = caches[0].offset
        seen = [cache.update_and_fetch(*[rows[:, :, at : at + more]] * 2)[0] for cache in caches]
        masks = [cache.make_mask(2, window_size=4, return_array=True) for cache in caches]
        assert sorted(seen[0].flatten().tolist()) == sorted(seen[1].flatten().tolist())
        assert mx.array_equal(*masks) and caches[0].offset == caches[1].offset


def test_a_rotating_cache_after_several_rows():
    """`rollback.py` cuts its end: temporal order, `max_size - 1` older rows, no more."""
    cache = internals.RotatingKVCache(max_size=4)
    rows = mx.arange(9, dtype=mx.float32).reshape(1, 1, 9, 1)
    for start, count in ((0, 1), (1, 1), (2, 4), (6, 3)):
        keys, _ = cache.update_and_fetch(*[rows[:, :, start : start + count]] * 2)
    assert keys.reshape(-1).tolist() == [3, 4, 5, 6, 7, 8]
    assert internals.end_of_ring(cache) == keys.shape[2] == 6 and cache.offset == 9
    names = {"keep", "keys", "values", "offset", "max_size", "_idx"}
    assert set(internals.fields(cache)) == names and internals.fields(cache) is vars(cache)
    internals.cut_ring(cache, 2)
    assert internals.end_of_ring(cache) == 4 and cache.offset == 7
    keys, _ = cache.update_and_fetch(*[rows[:, :, 7:8]] * 2)
    assert sorted(keys.reshape(-1).tolist()) == [4, 5, 6, 7]
    cache.update_and_fetch(*[rows[:, :, 8:9]] * 2)  # in place: a ring
    assert cache.keys.reshape(-1).tolist() != [5, 6, 7, 8]
    assert internals.in_temporal_order(cache, cache.keys).reshape(-1).tolist() == [5, 6, 7, 8]


def test_the_other_caches_are_their_fields():
    """What `rollbacks.py`, `recurrent.py` and `caches.py` read and write."""
    assert set(vars(internals.ArraysCache(2))) == {"cache", "left_padding", "lengths"}
    assert set(vars(internals.CacheList(internals.KVCache()))) == {"caches"}
    assert internals.ChunkedKVCache(8).trim(0) == 0
    assert set(vars(internals.QuantizedKVCache(32, 8))) == {
        "keys",
        "values",
        "offset",
        "group_size",
        "bits",
    }


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
    ("module", "inner"),
    [(ministral3, ministral3.LanguageModel), (mistral4, mistral4.Mistral4Model)],
)
def test_queries_are_scaled_by_a_global_function_of_the_position(module, inner):
    scale = getattr(module, internals.QUERY_SCALE)
    assert parameters(scale) == ["size", "offset", "beta", "max_position_embeddings"]
    assert mx.array_equal(scale(5, 7, 0.1, 4)[2:], scale(3, 9, 0.1, 4))
    assert internals.QUERY_SCALE in inner.__call__.__code__.co_names


def test_a_longrope_keeps_its_long_periods_and_an_amplitude():
    names = {"dims": 8, "base": 1e4, "short_factor": [1.0] * 4, "long_factor": [2.0] * 4}
    rope, plain = internals.SuScaledRoPE(**names), internals.SuScaledRoPE(**names | {"dims": 8})
    internals.rescale_longrope(rope, mx.full(4, 0.5), 1.0)
    assert mx.allclose(rope._freqs * 2, plain._freqs) and rope._scale == 1.0
    x = mx.random.normal((1, 1, 3, 8))
    assert mx.allclose(rope(x), mx.fast.rope(x, 8, traditional=False, base=1e4, scale=1, offset=0))


def test_a_model_is_computed_by_the_modules_of_its_parts():
    assert internals.modules_of(families.random_model("qwen3_5_moe")) >= {"qwen3_5", "qwen3_next"}


def test_this_file_tries_all_that_is_named_there():
    tree = ast.parse((PACKAGE / "targets" / "internals.py").read_text())
    names = set()
    for node in tree.body:
        if isinstance(node, ast.ImportFrom):
            names |= {alias.asname for alias in node.names if alias.asname}
        elif isinstance(node, ast.FunctionDef):
            names.add(node.name)
        elif isinstance(node, ast.Assign):
            names |= {name.id for name in node.targets if isinstance(name, ast.Name)}
    tried = set(re.findall(r"internals\.(\w+)", Path(__file__).read_text()))
    assert names - {"__all__"} == tried - {"py", "__all__"}


def test_nothing_private_is_touched_elsewhere():
    """Neither by import, nor, beside the target's models, by any name of the file above."""
    for path in PACKAGE.rglob("*.py"):
        if path == PACKAGE / "targets" / "internals.py":
            continue
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.ImportFrom) and (node.module or "").startswith("mlx_lm"):
                names = [alias.name for alias in node.names]
                assert not any(name.startswith("_") for name in names), path
                assert path.parent.name != "targets" or names == ["TokenizerWrapper"], path
            if isinstance(node, ast.Attribute):
                assert node.attr not in ("_idx", "_temporal_order", "make_mask"), path


def test_the_functions_take_what_we_hand_them():
    named = {
        internals.scaled_dot_product_attention: "queries keys values cache scale mask sinks",
        internals.gated_delta_update: "q k v a b A_log dt_bias state mask use_kernel",
        internals.compute_g: "A_log a dt_bias",
        internals.ssm_step: "mixer x b c dt state",
        internals.normalize_qk: "q k inv_scale eps",
        internals.classes_of: "config",
        internals.make_prompt_cache: "model",
    }
    for function, names in named.items():
        assert parameters(function)[: len(names.split())] == names.split(), function
    for kind in (internals.KVCache, internals.RotatingKVCache):
        assert parameters(kind.update_and_fetch) == ["self", "keys", "values"]
    assert parameters(internals.RotatingKVCache.make_mask)[:4] == [
        *("self", "N", "window_size", "return_array")
    ]


@pytest.mark.parametrize("family", families.FAMILIES)
def test_where_a_family_has_its_parts(family):
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
        attention, mixer = internals.attention_of(layer), internals.mixer_of(layer)
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
        assert type(attention).__call__.__code__.co_names.count(internals.ATTENTION) == (
            family != "deepseek_v41"
        )
        if internals.has_key_projection(attention):
            heads, size = internals.key_heads(attention), internals.head_size(attention)
            assert cache.keys.shape[1::2] == (heads, size)
            assert internals.query_heads(attention) % heads == 0
        else:
            assert family in MLA or family == "deepseek_v41"
        assert internals.own_class(layer) is type(layer)
        ropes = [m for path, m in layer.named_modules() if path.rpartition(".")[2] == "rope"]
        assert bool(ropes) != internals.uses_no_positions(layer)
        assert not internals.masks_itself(layer)
        assert {type(rope).__name__ for rope in ropes} <= internals.ROPES


def test_which_recurrences_are_known():
    kinds = {*internals.SHORT_CONVOLUTIONS, *internals.MAMBA2}
    assert {kind.__name__ for kind in kinds} >= {"ShortConv", "NemotronHMamba2Mixer"}
    delta = internals.GatedDeltaNet, internals.Qwen3NextGatedDeltaNet
    assert delta == internals.GATED_DELTA
    assert internals.MIXERS and internals.NOPE and internals.OWN_MASKS


@pytest.mark.parametrize("family", ["qwen3", "gpt_oss", "gemma4_dense", "deepseek_v32", "llama"])
def test_models_ask_their_caches(family):
    """For masks and for what is kept: there a draft tree comes in."""
    model = families.random_model(family)
    plain = internals.make_prompt_cache(model)
    asked = internals.make_prompt_cache(model)
    tokens, seen = mx.array([[1, 2, 3]]), []

    def told(name, own):
        def call(*args, **options):
            assert name != "mask" or set(options) <= {"return_array", "window_size"}
            seen.append(name)
            return own(*args, **options)

        return call

    parts = [part for cache in asked for part in getattr(cache, "caches", (cache,))]
    for part in parts:
        masks, keeps = told("mask", part.make_mask), told("keep", part.update_and_fetch)
        assert not internals.is_hooked(part)
        internals.hook(part, masks, keeps)
        assert internals.is_hooked(part)
    logits = model(tokens, cache=asked)
    assert mx.array_equal(logits, model(tokens, cache=plain))
    assert seen.count("keep") == len(parts) and "mask" in seen
    for part in parts:
        internals.unhook(part)
    model(tokens, cache=asked)
    assert seen.count("keep") == len(parts)
    assert not {"make_mask", "update_and_fetch"} & set(internals.fields(parts[0]))


def test_masks_of_the_next_rows():
    """What `batched_rows` asks of each request's cache, a model would get from it alone."""
    asked = {"return_array": False, "window_size": None}  # by name, as mlx-lm's models do
    for cache in (internals.KVCache(), internals.RotatingKVCache(8)):
        assert internals.mask_of(cache, 1, **asked) is None
        assert internals.mask_of(cache, 2, **asked) == "causal"
        assert internals.mask_of(cache, 3, **asked | {"return_array": True}).shape == (3, 3)
    assert internals.mask_of(internals.ArraysCache(2), 4) is None


def test_which_recurrences_are_sharded():
    layer = families.random_model("qwen3_5").language_model.model.layers[0]
    assert layer.linear_attn.sharding_group is None  # the name of what `shard` sets
    assert internals.sharding_group(layer.linear_attn) is None
    layer.linear_attn.sharding_group = object()
    assert internals.sharding_group(layer.linear_attn) is not None
    without = families.random_model("qwen3_next").layers[0].linear_attn
    assert internals.sharding_group(without) is None
