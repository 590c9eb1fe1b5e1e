"""Drafters in GGUF, as llama.cpp's converter writes them: the same drafter as its folder."""

from pathlib import Path
from typing import Any

import gguf
import mlx.core as mx
import numpy as np
import pytest
from ggufs import encode, vocabulary
from mlx.utils import tree_flatten
from tinymodels import drafter_config, random_drafter, refusal, save_target, tokenizer

import dflash_mlx as dm
from dflash_mlx.drafter.config import DraftConfig
from dflash_mlx.drafter.networks import network_for
from dflash_mlx.errors import DFlashError
from dflash_mlx.loading.drafter_fields import inspect_drafter
from dflash_mlx.loading.gguf.gguf_drafter import _TENSORS
from dflash_mlx.loading.gguf.gguf_file import converted

SIZES = {"hidden_size": 64, "intermediate_size": 96, "head_dim": 16}
WINDOWS = {"layer_types": ["sliding_attention", "full_attention"], "sliding_window": 32}
YARN = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 64}
CASES: dict[str, dict[str, Any]] = {
    "DFlash": {},
    "windows": WINDOWS,
    "YaRN": {"rope_scaling": YARN, "rope_theta": 5e5},
    "DSpark": {
        "architectures": ["DSparkDraftModel"],
        "markov_rank": 8,
        "markov_head_type": "vanilla",
        "sample_from_anchor": True,
    },
    "DSpark with a bonus anchor": {
        "architectures": ["DSparkDraftModel"],
        "markov_rank": 8,
        "markov_head_type": "vanilla",
        "sample_from_anchor": False,
    },
}


def gguf_names(layers: int) -> dict[str, str]:
    names = {}
    for theirs, ours in _TENSORS.items():
        for layer in range(layers if "{N}" in ours else 1):
            names[ours.replace("{N}", str(layer))] = theirs.replace("{N}", str(layer))
    return names


def write(path: Path, drafter: Any, raw: dict[str, Any], kind: str = "F32") -> None:
    """A file of a drafter; matrices of its layers in a type of GGML."""
    config: DraftConfig = drafter.config
    writer = gguf.GGUFWriter(path, "dflash")
    writer.add_block_count(config.num_hidden_layers)
    writer.add_embedding_length(config.hidden_size)
    writer.add_feed_forward_length(config.intermediate_size)
    writer.add_head_count(config.num_attention_heads)
    writer.add_head_count_kv(config.num_key_value_heads)
    writer.add_key_length(config.head_dim)
    writer.add_layer_norm_rms_eps(config.rms_norm_eps)
    writer.add_context_length(raw.get("max_position_embeddings", 4096))
    writer.add_rope_freq_base(config.rope_theta)
    writer.add_uint32("dflash.block_size", config.block_size)
    writer.add_array("dflash.target_layers", [layer + 1 for layer in config.target_layer_ids])
    writer.add_mask_token_id(config.mask_token_id)
    writer.add_token_list(vocabulary()["tokenizer.ggml.tokens"])
    if "sample_from_anchor" in raw:
        writer.add_bool("dflash.sample_from_anchor", raw["sample_from_anchor"])
    if "sliding_window" in raw:
        writer.add_sliding_window(raw["sliding_window"])
        slides = [kind == "sliding_attention" for kind in raw["layer_types"]]
        writer.add_array("dflash.attention.sliding_window_pattern", slides)
    if scaling := raw.get("rope_scaling"):
        writer.add_rope_scaling_type(gguf.RopeScalingType.YARN)
        writer.add_rope_scaling_factor(scaling["factor"])
        writer.add_rope_scaling_orig_ctx_len(scaling["original_max_position_embeddings"])
    names = gguf_names(config.num_hidden_layers)
    for name, value in tree_flatten(drafter.parameters()):
        array = np.array(value.astype(mx.float32))
        packed = array.ndim > 1 and array.shape[-1] % 32 == 0 and "markov" not in name
        data, _ = encode(array, kind if packed else "F32")
        number = gguf.GGMLQuantizationType[kind if packed else "F32"]
        writer.add_tensor(names[name], data, raw_dtype=number)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def random_network(raw: dict[str, Any]) -> Any:
    config = DraftConfig.from_dict(raw)
    mx.random.seed(1)
    drafter = network_for(config)(config)
    mx.eval(drafter.parameters())
    return drafter


@pytest.mark.parametrize("case", CASES)
def test_a_drafter_in_gguf_equals_the_one_that_was_written(tmp_path: Path, case: str) -> None:
    raw = drafter_config(**CASES[case])
    drafter = random_network(raw)
    write(tmp_path / "a.gguf", drafter, raw)
    loaded = dm.load_drafter(str(tmp_path / "a.gguf"))
    for name in ("target_layer_ids", "block_size", "mask_token_id", "windows", "causal", "kind"):
        assert getattr(loaded.config, name) == getattr(drafter.config, name), name
    for name in ("first_row", "rope_theta", "rope_amplitude", "markov_rank"):
        assert getattr(loaded.config, name) == pytest.approx(getattr(drafter.config, name)), name
    ours, theirs = (dict(tree_flatten(network.parameters())) for network in (loaded, drafter))
    assert ours.keys() == theirs.keys()
    assert all(mx.array_equal(ours[name], theirs[name]) for name in ours)
    taps = mx.random.normal((1, 5, 128))
    block = mx.random.normal((1, 4, 64))
    hidden = [network(block, taps, network.make_cache()) for network in (loaded, drafter)]
    assert mx.array_equal(*hidden)


def test_inspect_shows_how_a_file_is_read(tmp_path: Path) -> None:
    raw = drafter_config(**CASES["DSpark"])
    write(tmp_path / "a.gguf", random_network(raw), raw)
    decisions = {
        decision.field: decision.value for decision in inspect_drafter(tmp_path / "a.gguf")
    }
    assert decisions["target_layer_ids"] == (0, 2) and decisions["markov_rank"] == 8


@pytest.mark.parametrize("kind", ["F16", "BF16", "Q8_0", "Q4_0", "Q5_1"])
def test_drafts_of_every_type_keep_the_text(tmp_path: Path, kind: str) -> None:
    folder = save_target(tmp_path / "target")
    raw = drafter_config(intermediate_size=256, hidden_size=64)
    write(tmp_path / "a.gguf", drafter=random_network(raw), raw=raw, kind=kind)
    target, drafter = dm.load(str(folder), str(tmp_path / "a.gguf"))
    prompt = tokenizer().encode("user: what is 37")
    plain = dm.generate(target, None, prompt, max_tokens=20).tokens
    drafted = dm.generate(target, drafter, prompt, max_tokens=20)
    assert drafted.tokens == plain and drafted.stats.drafted_tokens > 0


def test_quantized_matrices_of_a_file_stay_quantized_unless_they_are_unpacked(
    tmp_path: Path,
) -> None:
    raw = drafter_config()
    drafter = random_network(raw)
    write(tmp_path / "a.gguf", drafter=drafter, raw=raw, kind="Q8_0")
    folder = converted(tmp_path / "a.gguf", unpacked=False)
    weights = mx.load(str(next(folder.glob("*.safetensors"))))
    packed = "layers.0.self_attn.q_proj"
    assert weights[f"{packed}.weight"].dtype == mx.uint32
    values = mx.dequantize(
        *(weights[f"{packed}.{x}"] for x in ("weight", "scales", "biases")), 32, 8
    )
    wanted = drafter.layers[0].self_attn.q_proj.weight
    assert mx.abs(values - wanted).max() < 0.01 * mx.abs(wanted).max()


@pytest.mark.parametrize(
    ("key", "said"),
    [
        ("dflash.target_layers", "dflash.target_layers is missing"),
        ("dflash.block_size", "dflash.block_size is missing"),
        ("tokenizer.ggml.mask_token_id", "mask_token_id is missing"),
    ],
)
def test_the_error_about_a_missing_key_names_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, key: str, said: str
) -> None:
    raw = drafter_config()
    add_key_value = gguf.GGUFWriter.add_key_value

    def add_all_but_one(self, name: str, *rest: Any, **more: Any) -> None:
        if name != key:
            add_key_value(self, name, *rest, **more)

    monkeypatch.setattr(gguf.GGUFWriter, "add_key_value", add_all_but_one)
    write(tmp_path / "a.gguf", random_network(raw), raw)
    assert said in refusal(DFlashError, dm.load_drafter, tmp_path / "a.gguf")


def test_the_error_about_tensors_of_another_network_names_them(
    tmp_path: Path, monkeypatch: Any
) -> None:
    raw = drafter_config()
    names = gguf_names(2) | {"fc.weight": "selector_hidden.weight"}
    monkeypatch.setitem(write.__globals__, "gguf_names", lambda layers: names)
    write(tmp_path / "a.gguf", random_drafter(), raw)
    message = refusal(DFlashError, dm.load_drafter, tmp_path / "a.gguf")
    assert "selector_hidden.weight is not understood" in message and "DFlash2" in message
