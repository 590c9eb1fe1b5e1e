"""Nothing that can stand in a config.json does harm: it resolves, or a ConfigError names it."""

import copy
import json
import math
from pathlib import Path

import pytest

from dflash_mlx.drafter.config import DraftConfig
from dflash_mlx.errors import ConfigError

ENTRIES = json.loads((Path(__file__).parents[1] / "data" / "published_configs.json").read_text())
# One of each packaging and kind is enough.
NAMES = [
    "zlab_Muse-Glimmer-30B-DFlash2",
    "meta_MuseGlimmerAssistant",
    "zlab_Kimi-K2.5-DFlash",
    "nvidia_K3-DSpark-as-DFlashDraftModel",
    "RedHat_gemma-4-31B-it-speculator.dspark",
    "RadixArk_Qwen3.8-27B-DSpark",
    "JetSpec_jetspec-Qwen3.6-35B-A3B",
    "nvidia_Nemotron-3.5-Lightning-30B-A3B-DSpark",
]
CONFIGS = {entry["name"]: entry["config"] for entry in ENTRIES if entry["name"] in NAMES}


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
@pytest.mark.parametrize("name", NAMES)
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
