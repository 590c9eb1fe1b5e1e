"""Memory and speeds of known models, compared with mlx-lm's modules and timings on Macs."""

import json
import re
from pathlib import Path

import mlx.core as mx
import pytest
from mlx.utils import tree_flatten
from mlx_lm.models.cache import KVCache, RotatingKVCache, make_prompt_cache

from dflash_mlx.drafter.config import DraftConfig
from dflash_mlx.drafter.networks import network_for
from dflash_mlx.errors import SettingsError
from dflash_mlx.loading import registry, sizes
from dflash_mlx.loading.quantization import Quantization
from dflash_mlx.loading.registry import pairs
from dflash_mlx.loading.sizes import CONTEXT, find_size, memory_need
from dflash_mlx.machine.chips import chip_named, chips, find_chip
from dflash_mlx.machine.facts import working_set
from dflash_mlx.targets.internals import classes_of

DATA = Path(__file__).parents[1] / "data"
CONFIGS = json.loads((DATA / "target_configs.json").read_text())
MAC = json.loads((DATA / "mac_steps.json").read_text())
PUBLISHED = {
    load["name"]: load["config"]
    for load in json.loads((DATA / "published_configs.json").read_text())
}
KNOWN = {pair.short: size for pair in pairs() if (size := find_size(pair)) is not None}
GIB = 2**30
# Their names count parameters in another way: without embeddings, or with vision and sound.
LEFT_OUT = {"gemma-4-E2B-it", "gemma-4-E4B-it", "Muse-Glimmer-30B"}
DRAFTERS = {
    "Qwen3-4B": "specforge__qwen3-4b-dflash.json",
    "Qwen3-8B": "specforge__qwen3-8b-dflash.json",
    "Qwen3.5-27B": "zlab_Qwen3.5-27B-DFlash(Apr)",
    "Qwen3.8-27B": "zlab_Qwen3.8-27B-DFlash2",
    "Qwen3.6-35B-A3B": "zlab_Qwen3.6-35B-A3B-DFlash(Jun)",
    "Qwen3.5-397B-A17B": "zlab_Qwen3.5-397B-A17B-DFlash",
    "gpt-oss-20b": "zlab_gpt-oss-20b-DFlash",
    "Muse-Glimmer-30B": "zlab_Muse-Glimmer-30B-DFlash2",
    "LFM2.5-2.6B": "LiquidAI_LFM2.5-2.6B-DSpark",
}


def lazy_model(name):
    """mlx-lm's module of a target, with weights that are never computed."""
    config = CONFIGS[name]
    config = CONFIGS[config] if isinstance(config, str) else config
    model_class, arguments = classes_of(config)
    model = model_class(arguments.from_dict(config))
    model.set_dtype(mx.bfloat16)
    return model


def parameters(model):
    return sum(weight.size for _, weight in tree_flatten(model.parameters())) / 1e9


def test_every_size_is_checked_here():
    assert KNOWN.keys() == CONFIGS.keys() == sizes._sizes().keys()
    assert KNOWN.keys() >= DRAFTERS.keys()


@pytest.mark.parametrize("name", KNOWN)
def test_sizes_are_those_of_mlx_lm(name):
    """Compare the number of parameters, and the bytes of a context.

    The model and the caches of its forward are lazy, and never computed.
    """
    size = KNOWN[name]
    model = lazy_model(name)
    count = size.dense + size.lookup + size.experts * size.expert
    assert count == pytest.approx(parameters(model), rel=2e-3)
    billions_in_name = re.search(r"-E?([\d.]+)B", name, re.IGNORECASE)
    if billions_in_name and name not in LEFT_OUT:
        assert count == pytest.approx(float(billions_in_name[1]), rel=0.07)
    caches = make_prompt_cache(model)
    model(mx.zeros((1, 1), mx.int32), cache=caches)
    bytes_per_token = 0.0
    fixed_bytes = 0.0
    for cache in caches:
        arrays = [array for _, array in tree_flatten(cache.state) if isinstance(array, mx.array)]
        size_in_bytes = sum(array.nbytes for array in arrays)
        if not isinstance(cache, KVCache | RotatingKVCache):  # a recurrent state
            fixed_bytes += size_in_bytes
            continue
        bytes_per_row = size_in_bytes / cache.keys.shape[2]
        window = getattr(cache, "max_size", None)
        if window:
            fixed_bytes += bytes_per_row * window
        else:
            bytes_per_token += bytes_per_row
    assert 1e3 * size.token == pytest.approx(bytes_per_token, rel=0.01)
    assert 1e6 * size.fixed == pytest.approx(fixed_bytes, rel=0.05, abs=3e6)


@pytest.mark.parametrize("name, published", DRAFTERS.items())
def test_drafters_are_as_large_as_published(name, published):
    config = DraftConfig.from_dict(PUBLISHED[published])
    assert KNOWN[name].drafter == pytest.approx(parameters(network_for(config)(config)), rel=0.02)


def test_weights_are_those_of_the_files_on_the_hub():
    for name, bits, gigabytes in (
        ("gpt-oss-20b", 4, 12.1),
        ("Qwen3-8B", 4, 4.6),
        ("Qwen3-8B", 8, 8.7),
        ("Qwen3-30B-A3B", 4, 17.2),
        ("Ternary-Bonsai-27B", 4, 8.5),
    ):
        assert KNOWN[name].weights(bits) / 1e9 == pytest.approx(gigabytes, rel=0.02)


def test_the_memory_that_a_pair_needs_is_that_of_weights_drafter_and_context():
    by_name = {pair.short: pair for pair in pairs()}
    need = memory_need(by_name["Qwen3-8B"])
    size = KNOWN["Qwen3-8B"]
    assert need.total == size.weights(4) + size.drafter_bytes + size.context(CONTEXT)
    assert memory_need(by_name["Kimi-K2.5"]) is None
    assert registry.find_pair("Qwen3-8B-4bit").short == "Qwen3-8B"
    other_bytes = sizes.drafter_and_context_bytes("mlx-community/Qwen3-8B-4bit")
    assert other_bytes == need.drafter + need.context > 0
    assert sizes.drafter_and_context_bytes("somebody/model") == 0


@pytest.mark.parametrize("step", MAC["steps"], ids=lambda s: "{model} {chip} {rows}".format(**s))
def test_predicted_steps_are_close_to_timings_on_macs(step):
    size = KNOWN[step["model"]]
    chip = chip_named(step["chip"])
    if step["rows"] == 1:
        predicted = size.plain_seconds(chip, step["bits"])
    else:
        predicted = size._verify_seconds(chip, step["bits"])
    assert 1e3 * predicted == pytest.approx(step["milliseconds"], rel=0.2)


@pytest.mark.parametrize("product", MAC["products"])
def test_predicted_products_are_close_to_timings_on_macs(product):
    chip = chip_named(product["chip"])
    weights = product["columns"] * product["depth"]
    predicted = chip.read_seconds(Quantization(4, 64).quantized_bytes(weights))
    if product["rows"] > 1:
        if product["kernels"] == "stock":
            compute_seconds = chip.multiply_seconds(sizes.STOCK_ROWS, weights, chip.stock_share)
        else:
            compute_seconds = chip.multiply_seconds(sizes.ROWS, weights, None)
        predicted = max(predicted, compute_seconds)
    assert 1e3 * predicted == pytest.approx(product["milliseconds"], rel=0.2)


@pytest.mark.parametrize("name", KNOWN)
def test_predictions_are_plausible_on_every_chip(name):
    size = KNOWN[name]
    for chip in chips():
        assert 1 < size.gains_above(chip) < 17, chip.name
        assert size.plain_seconds(chip, 8) >= size.plain_seconds(chip, 4)
    slow = chip_named("M4")
    fast = chip_named("M4 Max")
    assert size.plain_seconds(fast) < size.plain_seconds(slow)


def test_chips_are_found_by_the_names_people_and_devices_use():
    names = ("Apple M4 Max", "m4 max", "M4Max")
    assert {find_chip(name) for name in names} == {chip_named("M4 Max")}
    assert find_chip("AMD EPYC") is None
    with pytest.raises(SettingsError, match="M4 Max"):
        chip_named("M99")


def test_the_working_set_is_what_macos_recommends():
    for memory, usable in ((8, 5.3), (16, 10.7), (32, 21.3), (64, 48)):
        assert working_set(memory * GIB) / GIB == pytest.approx(usable, abs=0.05)
