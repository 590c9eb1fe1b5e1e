"""Every published drafter config resolves as in its authors' code, or is refused.

`data/published_configs.json` holds the configs and what each one resolves to, checked against the
code they were made for. Entries marked "invented" are real configs with single keys added.
"""

import copy
import json
import math
from pathlib import Path

import pytest

from dflash_mlx.drafter.config import DraftConfig
from dflash_mlx.errors import ConfigError

ENTRIES = json.loads((Path(__file__).parents[1] / "data" / "published_configs.json").read_text())
LOADED = [entry for entry in ENTRIES if "expect" in entry]
REFUSED = [entry for entry in ENTRIES if "expect_error" in entry]
CONFIGS = {entry["name"]: entry["config"] for entry in ENTRIES}
# The words that the error for a refused config must contain.
WORDS_OF_ERRORS = {
    "zlab_Qwen3.5-122B-A10B-DFlash(trimmed)": ["max_window_layers", "layer_types"],
    "Laguna_DFlash": ["architectures", "DFlashLagunaForCausalLM"],
    "layer_types_vs_use_swa_false": ["layer_types", "use_sliding_window"],
    "specforge__qwen3-8b-domino.json": ["architectures", "DominoDraftModel"],
    "specforge__qwen3.5-4b-domino.json": ["architectures", "DominoDraftModel"],
    "specforge__qwen3.6-27b-domino-full-attention.json": ["architectures", "DominoDraftModel"],
    "Ornith-1.0-9B-DSpark(shape)": ["architectures", "Qwen35DSparkModel"],
    "hybrid_DFlash-label_with_Markov(shape)": ["markov_rank", "sample_from_anchor", "shift_label"],
}

EAGLE_NORMS = ("norm_before_residual", "norm_before_fc", "fc_norm", "norm_output")


def name_of(entry):
    return entry["name"]


def resolved_value(config, name):
    """A resolved field, in the form that published_configs.json has it in."""
    if name == "rope_type":
        return (config.rope_scaling or {}).get("rope_type", "default")
    if name == "attention_sinks":
        return any(config.sinks)
    if name == "markov":
        head = {"rank": config.markov_rank, "type": config.markov_head_type}
        return head if config.kind == "dspark" else None
    if name == "eagle":
        return {norm: getattr(config, norm) for norm in EAGLE_NORMS}
    field = "target_layer_ids" if name == "taps" else name
    value = getattr(config, field)
    return list(value) if isinstance(value, tuple) else value


@pytest.mark.parametrize("entry", LOADED, ids=name_of)
def test_a_published_config_resolves_as_in_its_authors_code(entry):
    config = DraftConfig.from_dict(entry["config"])
    resolved = {name: resolved_value(config, name) for name in entry["expect"]}
    amplitude = entry["expect"]["rope_amplitude"]
    assert resolved == entry["expect"] | {"rope_amplitude": pytest.approx(amplitude, abs=1e-8)}


@pytest.mark.parametrize("entry", REFUSED, ids=name_of)
def test_the_error_for_an_unsupported_network_names_the_key(entry):
    with pytest.raises(ConfigError) as caught:
        DraftConfig.from_dict(entry["config"])
    message = str(caught.value)
    assert all(word in message for word in WORDS_OF_ERRORS[entry["name"]])
    assert "\n" not in message


def test_a_drafter_with_experts_is_refused():
    entry = next(entry for entry in LOADED if entry["expect"]["packaging"] == "specforge")
    experts = {"router_z_loss": 0.1, "num_experts": 64, "num_experts_per_tok": 8}
    with pytest.raises(ConfigError, match="num_experts must be 0, not 64"):
        DraftConfig.from_dict(experts | entry["config"])


@pytest.mark.parametrize("place", ["", "dflash_config", "transformer_layer_config"])
@pytest.mark.parametrize("entry", LOADED, ids=name_of)
def test_an_unknown_key_is_a_warning_at_the_root_and_in_nested_objects(entry, place):
    changed = copy.deepcopy(entry["config"])
    if place and not changed.get(place):
        return  # not every packaging has this object
    changed_object = changed[place] if place else changed
    changed_object["frobnicate"] = 1
    prefix = f"{place}." if place else ""
    with pytest.warns(UserWarning, match=rf"not used: [^:]*\b{prefix}frobnicate\b"):
        assert DraftConfig.from_dict(changed) == DraftConfig.from_dict(entry["config"])


def test_keys_that_are_accepted_but_unused_are_listed():
    copied = DraftConfig.from_dict(CONFIGS["satgeze_Qwen3.6-27B-DSpark(shape)"])
    assert {"num_anchors", "partial_rotary_factor", "attn_output_gate"} <= set(copied.unused)
    kimi = DraftConfig.from_dict(CONFIGS["zlab_Kimi-K2.5-DFlash"])
    assert "Kimi-K2.5" in kimi.sources["rope_amplitude"]


@pytest.mark.filterwarnings("error")
@pytest.mark.parametrize(
    "name",
    ["zlab_Muse-Glimmer-30B-DFlash2", "zlab_Qwen3.8-27B-DFlash2", "RadixArk_Qwen3.8-27B-DSpark"],
)
def test_an_ordinary_config_gives_no_warning(name):
    DraftConfig.from_dict(CONFIGS[name])


EXPORTS = {
    "modelopt": {"eagle_config": {"parallel_draft_heads_num_layers": 1, "parallel_draft_step": 1}},
    "nebius": {"architectures": ["LlamaForCausalLM"], "truncated_vocab_size": 32000},
    "angelslim": {"architectures": ["Eagle3LlamaForCausalLM"], "use_mrope": False},
    "angelslim, VL": {"architectures": ["Eagle3LlamaForCausalLM"], "image_token_id": 151655},
}


@pytest.mark.parametrize("fields", EXPORTS.values(), ids=EXPORTS)
def test_other_exports_of_an_eagle_3_head_resolve_to_the_same_config(fields):
    config = CONFIGS["specforge__qwen3-8b-eagle3.json"]
    assert DraftConfig.from_dict(config | fields) == DraftConfig.from_dict(config)


# One config of each packaging and kind.
ONE_OF_EACH = [
    "zlab_Muse-Glimmer-30B-DFlash2",
    "meta_MuseGlimmerAssistant",
    "zlab_Kimi-K2.5-DFlash",
    "nvidia_K3-DSpark-as-DFlashDraftModel",
    "RedHat_gemma-4-31B-it-speculator.dspark",
    "RadixArk_Qwen3.8-27B-DSpark",
    "JetSpec_jetspec-Qwen3.6-35B-A3B",
    "nvidia_Nemotron-3.5-Lightning-30B-A3B-DSpark",
]


def deep(levels):
    value = []
    for _ in range(levels):
        value = [value]
    return value


BAD_VALUES = {
    "huge": 10**30,
    "400 digits": 10**400,
    "negative": -1,
    "zero": 0,
    "one": 1,
    "fraction": 0.5,
    "tiny": 5e-324,
    "large": 1e308,
    "nan": math.nan,
    "infinity": math.inf,
    "true": True,
    "false": False,
    "text": "x" * 10_000,
    "lines": "a\nb",
    "list": [],
    "list of lists": [[1], [2]],
    "list of floats": [1.0, 2.0],
    "object": {},
    "object in object": {"rope_type": {"a": 1}, "proposal_methods": [{"speculative_tokens": 1.5}]},
    "deep": deep(900),
}


def key_paths(config, prefix=()):
    """The keys that lead to every value of a nested config."""
    for key, value in config.items():
        yield (*prefix, key)
        if isinstance(value, dict):
            yield from key_paths(value, (*prefix, key))


@pytest.mark.parametrize("bad_value", BAD_VALUES.values(), ids=BAD_VALUES.keys())
@pytest.mark.parametrize("name", ONE_OF_EACH)
def test_a_bad_value_of_any_key_resolves_or_is_an_error_in_one_line(name, bad_value):
    for path in key_paths(CONFIGS[name]):
        config = copy.deepcopy(CONFIGS[name])
        parent = config
        for key in path[:-1]:
            parent = parent[key]
        parent[path[-1]] = bad_value
        try:
            resolved = DraftConfig.from_dict(config)
        except ConfigError as error:
            assert "\n" not in str(error) and len(str(error)) < 400, path
        else:
            sizes = (resolved.hidden_size, resolved.head_dim, resolved.block_size)
            assert max(sizes) < 2**31 and math.isfinite(resolved.rope_theta), path
            assert math.isfinite(resolved.rope_amplitude), path


def test_the_error_for_an_unsupported_kind_of_drafter_names_it():
    """XPress (written by Speculators 0.9), P-EAGLE and Medusa are networks that we do not read."""
    config = copy.deepcopy(LOADED[0]["config"])
    for kind, word in (("xpress", "XPress"), ("peagle", "P-EAGLE"), ("medusa", "Medusa")):
        config["speculators_model_type"] = kind
        with pytest.raises(ConfigError, match=f"{word} .*which dflash-mlx cannot load"):
            DraftConfig.from_dict(config)
