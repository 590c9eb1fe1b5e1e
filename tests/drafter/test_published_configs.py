"""Every drafter config in use resolves to what its authors' code takes it to be, or is refused.

`data/published_configs.json` holds the configs and what each one means, checked against the code
that they were made for. Entries marked "invented" put single keys into a real config.
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
# What the message has to name, where the expectation is a sentence.
NAMED = {
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


def named(entry):
    return entry["name"]


def value(config, name):
    """A resolved field in the form that the file has it in."""
    if name == "rope_type":
        return (config.rope_scaling or {}).get("rope_type", "default")
    if name == "attention_sinks":
        return any(config.sinks)
    if name == "markov":
        head = {"rank": config.markov_rank, "type": config.markov_head_type}
        return head if config.kind == "dspark" else None
    if name == "eagle":
        return {norm: getattr(config, norm) for norm in EAGLE_NORMS}
    field = getattr(config, "target_layer_ids" if name == "taps" else name)
    return list(field) if isinstance(field, tuple) else field


@pytest.mark.parametrize("entry", LOADED, ids=named)
def test_a_published_config_resolves(entry):
    config = DraftConfig.from_dict(entry["config"])
    resolved = {name: value(config, name) for name in entry["expect"]}
    amplitude = entry["expect"]["rope_amplitude"]
    assert resolved == entry["expect"] | {"rope_amplitude": pytest.approx(amplitude, abs=1e-8)}


@pytest.mark.parametrize("entry", REFUSED, ids=named)
def test_another_network_is_refused_by_the_name_of_the_key(entry):
    with pytest.raises(ConfigError) as caught:
        DraftConfig.from_dict(entry["config"])
    message = str(caught.value)
    assert all(word in message for word in NAMED[entry["name"]]) and "\n" not in message


def test_a_drafter_with_experts_is_refused_for_them():
    entry = next(entry for entry in LOADED if entry["expect"]["packaging"] == "specforge")
    experts = {"router_z_loss": 0.1, "num_experts": 64, "num_experts_per_tok": 8}
    with pytest.raises(ConfigError, match="num_experts must be 0, not 64"):
        DraftConfig.from_dict(experts | entry["config"])


@pytest.mark.parametrize("place", ["", "dflash_config", "transformer_layer_config"])
@pytest.mark.parametrize("entry", LOADED, ids=named)
def test_a_key_that_nobody_knows_is_a_warning_wherever_it_stands(entry, place):
    changed = copy.deepcopy(entry["config"])
    if place and not changed.get(place):
        return  # not every packaging has this place
    (changed[place] if place else changed)["frobnicate"] = 1
    prefix = f"{place}." if place else ""
    with pytest.warns(UserWarning, match=rf"not used: [^:]*\b{prefix}frobnicate\b"):
        assert DraftConfig.from_dict(changed) == DraftConfig.from_dict(entry["config"])


def test_what_is_accepted_and_not_used_is_listed():
    copied = DraftConfig.from_dict(CONFIGS["satgeze_Qwen3.6-27B-DSpark(shape)"])
    assert {"num_anchors", "partial_rotary_factor", "attn_output_gate"} <= set(copied.unused)
    kimi = DraftConfig.from_dict(CONFIGS["zlab_Kimi-K2.5-DFlash"])
    assert "Kimi-K2.5" in kimi.sources["rope_amplitude"]


@pytest.mark.filterwarnings("error")
@pytest.mark.parametrize(
    "name",
    ["zlab_Muse-Glimmer-30B-DFlash2", "zlab_Qwen3.8-27B-DFlash2", "RadixArk_Qwen3.8-27B-DSpark"],
)
def test_what_every_config_has_is_no_warning(name):
    DraftConfig.from_dict(CONFIGS[name])


EXPORTS = {
    "modelopt": {"eagle_config": {"parallel_draft_heads_num_layers": 1, "parallel_draft_step": 1}},
    "nebius": {"architectures": ["LlamaForCausalLM"], "truncated_vocab_size": 32000},
    "angelslim": {"architectures": ["Eagle3LlamaForCausalLM"], "use_mrope": False},
    "angelslim, VL": {"architectures": ["Eagle3LlamaForCausalLM"], "image_token_id": 151655},
}


@pytest.mark.parametrize("fields", EXPORTS.values(), ids=EXPORTS)
def test_other_exports_of_eagle_3_are_the_same_head(fields):
    config = CONFIGS["specforge__qwen3-8b-eagle3.json"]
    assert DraftConfig.from_dict(config | fields) == DraftConfig.from_dict(config)


# One of each packaging and kind is enough.
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


NASTY = {
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


def places(config, prefix=()):
    """The path to every value."""
    for key, value in config.items():
        yield (*prefix, key)
        if isinstance(value, dict):
            yield from places(value, (*prefix, key))


@pytest.mark.parametrize("nasty", NASTY.values(), ids=NASTY.keys())
@pytest.mark.parametrize("name", ONE_OF_EACH)
def test_any_value_anywhere_resolves_or_is_an_error_in_one_line(name, nasty):
    for path in places(CONFIGS[name]):
        config = copy.deepcopy(CONFIGS[name])
        inside = config
        for key in path[:-1]:
            inside = inside[key]
        inside[path[-1]] = nasty
        try:
            resolved = DraftConfig.from_dict(config)
        except ConfigError as error:
            assert "\n" not in str(error) and len(str(error)) < 400, path
        else:
            sizes = (resolved.hidden_size, resolved.head_dim, resolved.block_size)
            assert max(sizes) < 2**31 and math.isfinite(resolved.rope_theta), path
            assert math.isfinite(resolved.rope_amplitude), path


def test_kinds_that_are_known_and_not_read_are_named():
    """Speculators 0.9 writes XPress; P-EAGLE and Medusa are other networks."""
    config = copy.deepcopy(LOADED[0]["config"])
    for kind, word in (("xpress", "XPress"), ("peagle", "P-EAGLE"), ("medusa", "Medusa")):
        config["speculators_model_type"] = kind
        with pytest.raises(ConfigError, match=f"{word} .*cannot be read here"):
            DraftConfig.from_dict(config)
