"""Keys and values in 8 or 4 bits: families that support it, and the errors of those that do not."""

import numpy as np
import pytest
from families import FAMILIES, QUANTIZABLE, family_target, random_prompt

import dflash_mlx as dm
from dflash_mlx.errors import SettingsError

REASONS = {
    "gpt_oss": "RotatingKVCache",
    "gemma4_dense": "RotatingKVCache",
    "gemma4_moe": "RotatingKVCache",
    "gemma4_E4B-like": "RotatingKVCache",
    "kimi_k25": "MLA latents",
    "deepseek_v3": "MLA latents",
    "glm_moe_dsa": "MLA latents",
    "deepseek_v32": "MLA latents",
    "deepseek_v41": "LayerCache",
}


def test_every_family_quantizes_keys_or_has_a_reason_not_to():
    assert set(QUANTIZABLE) | set(REASONS) == set(FAMILIES)


@pytest.mark.parametrize("family", REASONS)
def test_a_model_that_cannot_quantize_keys_is_refused_at_once(family):
    target = family_target(family)
    with pytest.raises(SettingsError, match=REASONS[family]) as caught:
        dm.stream_generate(target, None, [1, 2, 3], kv_bits=8)
    assert "\n" not in str(caught.value)


def test_a_head_size_that_is_not_a_multiple_of_the_group_is_refused():
    target = family_target("qwen3", head_dim=48)
    with pytest.raises(SettingsError, match="head size 48"):
        dm.stream_generate(target, None, [1, 2, 3], kv_bits=8)


def test_caches_of_8_and_4_bits_take_the_memory_expected():
    sizes = {}
    for bits in (None, np.int64(8), 4):
        session = family_target("qwen3").start(kv_bits=bits)
        list(session.prefill(random_prompt(500, 1)))
        sizes[bits] = sum(cache.nbytes for cache in session.cache)
    # A group of 32 numbers has a scale and a bias of 32 bits each: 2 more bits for each number.
    assert sizes[8] / sizes[None] == pytest.approx((8 + 2) / 32, rel=0.01)
    assert sizes[4] / sizes[None] == pytest.approx((4 + 2) / 32, rel=0.01)
