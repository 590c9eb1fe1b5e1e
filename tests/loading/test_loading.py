"""Loading pairs: from folders and names, with quantization, shards and EOS tokens."""

import json

import mlx.core as mx
import mlx.nn as nn
import numpy as np
import pytest
from mlx.utils import tree_flatten
from mlx_lm.utils import quantize_model
from tinymodels import (
    END,
    SUPPORTED,
    drafter_config,
    model_config,
    random_drafter,
    random_model,
    refusal,
    save_drafter,
    save_target,
    save_weights,
    tokenizer,
)

from dflash_mlx.errors import (
    ModelNotFoundError,
    SettingsError,
    WeightsError,
)
from dflash_mlx.loading.drafter_loader import DraftSource
from dflash_mlx.loading.folder import Folder
from dflash_mlx.loading.hub import Hub
from dflash_mlx.loading.load import load, load_drafter, load_target
from dflash_mlx.loading.quantization import Quantization
from dflash_mlx.loop import generate

TOKENS = mx.array([[5, 9, 2, 40, 41, 7]])
CPU = mx.default_device() == mx.Device(mx.cpu)


@pytest.fixture(scope="module")
def pair(tmp_path_factory):
    """The folders of a target and its drafter, not to be written to."""
    folder = tmp_path_factory.mktemp("pair")
    return save_target(folder / "target"), save_drafter(folder / "drafter")


@pytest.fixture
def folder(tmp_path):
    """A target's folder to change."""
    return save_target(tmp_path / "target")


def test_a_pair_is_loaded_from_folders(pair, monkeypatch):
    target, drafter = load(pair[0], draft=pair[1])  # paths, as pathlib has them
    assert target.name == str(pair[0])
    monkeypatch.setenv("HOME", str(pair[0].parent))
    assert load_target("~/target").num_layers == 3
    assert (target.num_layers, target.hidden_size) == (3, 64)
    assert target.vocab_size == drafter.config.vocab_size == len(tokenizer())
    assert drafter.tap_layers == (0, 2)
    plain = random_model(model_config("qwen3"))
    assert mx.allclose(target.model(TOKENS), plain(TOKENS), rtol=1e-4, atol=1e-4)
    assert generate(target, drafter, [5, 6], max_tokens=5).tokens


@pytest.mark.parametrize("family", SUPPORTED)
@pytest.mark.parametrize("bits", [4])
def test_bits_quantize_as_mlx_lm_does(family, bits, tmp_path):
    ours = load_target(str(save_target(tmp_path, family)), bits=bits).model
    config = model_config(family)
    theirs, _ = quantize_model(random_model(config), config, group_size=64, bits=bits)
    expected = dict(tree_flatten(theirs.parameters()))
    tensors = dict(tree_flatten(ours.parameters()))
    assert set(tensors) == set(expected)
    assert all(mx.array_equal(tensors[name], expected[name]) for name in tensors)
    assert any(isinstance(module, nn.QuantizedLinear) for module in ours.modules())


def test_a_quantized_folder_loads_as_it_is(tmp_path):
    config = model_config("qwen3")
    model, config = quantize_model(random_model(config), config, group_size=64, bits=4)
    tokenizer().save_pretrained(tmp_path)
    save_weights(tmp_path, model)
    (tmp_path / "config.json").write_text(json.dumps(config))
    assert mx.array_equal(load_target(str(tmp_path)).model(TOKENS), model(TOKENS))
    assert "quantized already" in refusal(SettingsError, load_target, tmp_path, 4)


@pytest.mark.skipif(not CPU, reason="half precision stays on a GPU")
@pytest.mark.parametrize("bits", [None, 8])
def test_half_precision_computes_in_f32_on_the_cpu(bits, tmp_path):
    target_folder = save_target(tmp_path / "t")
    draft_folder = save_drafter(tmp_path / "d")
    for path in (target_folder, draft_folder):
        weights = mx.load(str(path / "model.safetensors"))
        halves = {name: value.astype(mx.bfloat16) for name, value in weights.items()}
        mx.save_safetensors(str(path / "model.safetensors"), halves)
    target, drafter = load(str(target_folder), str(draft_folder), target_bits=bits, draft_bits=bits)
    for module in (target.model, drafter):
        types = {value.dtype for _, value in tree_flatten(module.parameters())}
        assert types == ({mx.float32} if bits is None else {mx.float32, mx.uint32})
    model = random_model(model_config("qwen3"))
    model.set_dtype(mx.bfloat16)
    model.set_dtype(mx.float32)
    if bits is None:
        assert mx.allclose(target.model(TOKENS), model(TOKENS), rtol=1e-4, atol=1e-4)


def test_a_drafter_can_be_quantized(pair):
    drafter = load_drafter(pair[1], bits=np.int64(8))
    assert isinstance(drafter.fc, nn.QuantizedLinear)
    # Its 96 columns are not a multiple of the group size, so this matrix is not quantized.
    assert isinstance(drafter.layers[0].mlp.down_proj, nn.Linear)
    taps = mx.random.normal((1, 3, 128))
    block = mx.random.normal((1, 4, 64))
    exact = random_drafter()
    hidden = drafter(block, taps, drafter.make_cache())
    assert mx.allclose(hidden, exact(block, taps, exact.make_cache()), atol=0.1)


def test_the_shards_of_an_index_are_read_and_other_files_ignored(folder):
    weights = mx.load(str(folder / "model.safetensors"))
    whole = load_target(str(folder)).model(TOKENS)
    (folder / "model.safetensors").unlink()
    names = sorted(weights)
    shards = {f"model-{i}-of-2.safetensors": names[i::2] for i in range(2)}
    for shard, inside in shards.items():
        mx.save_safetensors(str(folder / shard), {name: weights[name] for name in inside})
    index = {name: shard for shard, inside in shards.items() for name in inside}
    (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": index}))
    assert mx.array_equal(load_target(str(folder)).model(TOKENS), whole)
    for stray in ("model.safetensors", "model-zz.safetensors"):  # of another download
        mx.save_safetensors(str(folder / stray), {name: 0 * weights[name] for name in names})
    assert mx.array_equal(load_target(str(folder)).model(TOKENS), whole)
    (folder / "model-1-of-2.safetensors").unlink()
    assert "model-1-of-2.safetensors is missing" in refusal(WeightsError, load_target, folder)


@pytest.mark.parametrize("where", ["config.json", "generation_config.json"])
def test_every_eos_token_of_the_configs_ends_the_text(where, folder):
    content = json.loads((folder / where).read_text()) if where == "config.json" else {}
    (folder / where).write_text(json.dumps(content | {"eos_token_id": [7, 9]}))
    end = tokenizer().convert_tokens_to_ids(END)
    assert load_target(str(folder)).tokenizer.eos_token_ids == {7, 9, end}


@pytest.mark.parametrize("name", ["nothing-here", "/nothing/here", "~/nothing", "a/b/c"])
@pytest.mark.parametrize("loader", [load, load_drafter])
def test_an_unknown_name_is_an_error(name, loader):
    assert f"No model '{name}'" in refusal(ModelNotFoundError, loader, name)


@pytest.mark.parametrize("name", ["lookup", "none", "mtp"])
def test_lookup_and_mtp_are_not_loaded_as_drafters(name):
    assert f"'{name}' needs its target" in refusal(SettingsError, load_drafter, name)


def test_a_file_is_not_a_model(pair):
    path = pair[0] / "config.json"
    assert "it is a JSON file" in refusal(ModelNotFoundError, load_target, path)


def test_the_registry_finds_the_drafter_of_a_folder(pair, tmp_path):
    folder = tmp_path / "Qwen3-8B"
    folder.symlink_to(pair[0])
    names = set()

    class RecordingHub(Hub):
        def find(self, name):
            names.add(name)
            return Folder(pair[1])

    _, drafter = load(str(folder), hub=RecordingHub())
    assert names == {"z-lab/Qwen3-8B-DFlash-b16"}
    assert drafter.network.config.block_size == 16


@pytest.mark.parametrize("bits", [0, 3, 16, "4", 4.0, True])
@pytest.mark.parametrize("loader", [load_target, load_drafter])
def test_other_bits_than_4_and_8_are_refused(bits, loader, pair):
    target_folder, drafter_folder = pair
    folder = drafter_folder if loader is load_drafter else target_folder
    assert "4 or 8 bits" in refusal(SettingsError, loader, folder, bits)


@pytest.mark.parametrize(("draft_window", "expected"), [(None, 9), (5, 5)])
def test_the_window_of_a_drafter_is_the_setting_or_that_of_its_config(
    tmp_path, draft_window, expected
):
    """Whatever it is, the text is the same."""
    config = drafter_config() | {"draft_window_size": 9}
    folder = save_drafter(tmp_path / "drafter")
    (folder / "config.json").write_text(json.dumps(config))
    saved = save_target(tmp_path / "target")
    target, drafter = load(str(saved), str(folder), draft_window=draft_window)
    assert set(drafter.config.windows) == {expected}
    prompt = list(range(5, 30))
    plain = generate(target, None, prompt, max_tokens=8).tokens
    assert generate(target, drafter, prompt, max_tokens=8).tokens == plain


def test_a_large_drafter_of_a_quantized_target_gets_4_bits_by_default(tmp_path, monkeypatch):
    folder = save_drafter(tmp_path / "drafter")
    four = Quantization(4, 64)
    source = DraftSource.of("it", Folder(folder), {})
    assert source.default_quantization(four) is None
    monkeypatch.setattr("dflash_mlx.loading.drafter_loader.LARGE_DRAFTER", 1000)
    assert source.default_quantization(four) == four
    assert source.default_quantization(None) is None
    (folder / "config.json").write_text(json.dumps({"quantization": {"bits": 8}}))
    source = DraftSource.of("it", Folder(folder), {})
    assert source.default_quantization(four) is None


def test_a_drafter_with_16_bits_is_not_quantized_and_lookup_has_no_window(tmp_path):
    folder = save_drafter(tmp_path / "drafter")
    saved = save_target(tmp_path / "target")
    _, drafter = load(str(saved), str(folder), draft_bits=16)
    assert drafter.layers[0].self_attn.q_proj.weight.dtype == mx.float32
    with pytest.raises(SettingsError, match="draft_window means nothing to lookup"):
        load(str(saved), "lookup", draft_window=4)
