"""What the files of a folder tell before loading: memory of the weights, and sampling."""

import json
import warnings

import mlx.core as mx
import pytest
from tinymodels import refusal, save_drafter, save_target

from dflash_mlx.errors import NotEnoughMemoryError
from dflash_mlx.loading.folder import Folder, RemoteFolder
from dflash_mlx.loading.load import load, load_target
from dflash_mlx.loading.memory_check import check_memory, fits
from dflash_mlx.loading.quantization import Quantization
from dflash_mlx.machine.facts import memory_bytes


def write_sparse_weights(folder, gigabytes: float) -> None:
    """Write a sparse weight file of this size: it has a header, but takes no room on the disk."""
    columns = 1024
    row_bytes = 2 * columns  # in bf16
    rows = int(gigabytes * 1e9 / row_bytes)
    size = rows * row_bytes
    tensor = {"dtype": "BF16", "shape": [rows, columns], "data_offsets": [0, size]}
    header = json.dumps({"model.embed_tokens.weight": tensor}).encode()
    with (folder / "model.safetensors").open("wb") as file:
        file.write(len(header).to_bytes(8, "little") + header)
        file.truncate(8 + len(header) + size)


def test_the_memory_of_weights_is_computed_from_their_headers(tmp_path):
    file = tmp_path / "model.safetensors"
    tensors = {
        "a": mx.zeros((10, 64), mx.bfloat16),
        "b": mx.zeros((10, 65), mx.float16),
        "c": mx.zeros((7,), mx.float32),
        "d": mx.zeros((9, 8), mx.uint32),
    }
    mx.save_safetensors(str(file), tensors)
    # How many numbers each tensor has.
    a = 640
    b = 650
    c = 7
    d = 72
    folder = Folder(tmp_path)
    assert folder.memory() == 2 * a + 2 * b + 4 * c + 4 * d
    assert folder.memory(float_bytes=4) == 4 * (a + b + c + d)
    quantized = a * 4.5 / 8 + 2 * b + 4 * c + 4 * d  # the rows of b are no whole groups
    assert folder.memory(Quantization(4, 64)) == quantized


@pytest.mark.parametrize(
    ("config", "unchanged", "in_4_bits", "floats"),
    [
        ({}, 2048, 576, 4096),
        ({"quantization": {"bits": 4}}, 2048, 2048, 2048),
        ({"quantization_config": {"quant_method": "fp8"}}, 4096, 1152, 8192),
    ],
)
def test_the_memory_of_weights_is_estimated_from_file_sizes_before_a_download(
    config, unchanged, in_4_bits, floats, tmp_path
):
    """Files have 16 bits per weight, or 8 bits that become 16, or are used as they are."""
    (tmp_path / "config.json").write_text(json.dumps(config))
    preview = RemoteFolder(tmp_path, "a model", lambda: 2048)
    assert preview.memory() == unchanged and preview.memory(Quantization(4, 64)) == in_4_bits
    assert preview.memory(float_bytes=4) == floats


def test_weights_that_do_not_fit_are_refused_before_they_are_read(tmp_path):
    """Reading the file, which is 20 times the memory, would take minutes or fill the memory."""
    folder = save_target(tmp_path)
    memory = memory_bytes() / 1e9
    write_sparse_weights(folder, memory * 20)
    message = refusal(NotEnoughMemoryError, load_target, folder)
    assert str(folder) in message and f"this machine has {memory:.1f} GB" in message
    assert "even quantized to 4 bits they would take" in message


def test_the_error_about_memory_says_which_quantization_would_fit(tmp_path):
    folder = save_target(tmp_path)
    memory = memory_bytes() / 1e9
    # In 8 bits they would be 1.3 times the memory, in 4 bits 0.7 times.
    write_sparse_weights(folder, memory * 2.5)
    assert "; quantized to 4 bits they would take" in refusal(
        NotEnoughMemoryError, load_target, folder
    )
    assert "quantized to 4 bits" in refusal(NotEnoughMemoryError, load_target, folder, bits=8)


def test_the_error_about_memory_suggests_no_quantization_of_a_quantized_model(tmp_path):
    folder = save_target(tmp_path)
    config = json.loads((folder / "config.json").read_text())
    config["quantization"] = {"bits": 4, "group_size": 64}
    (folder / "config.json").write_text(json.dumps(config))
    write_sparse_weights(folder, memory_bytes() / 1e9 * 2)
    assert "choose a smaller model" in refusal(NotEnoughMemoryError, load_target, folder)


def test_a_pair_has_to_fit_together(tmp_path):
    target = save_target(tmp_path / "t")
    drafter = save_drafter(tmp_path / "d")
    memory = memory_bytes() / 1e9
    on_cpu = mx.default_device() == mx.Device(mx.cpu)
    growth = 2 if on_cpu else 1  # the CPU computes in f32, which takes twice the file's bytes
    write_sparse_weights(target, memory * 0.6 / growth)
    write_sparse_weights(drafter, memory * 0.6 / growth)
    refusal(NotEnoughMemoryError, load, target, draft=str(drafter))


@pytest.mark.parametrize(("size", "says"), [(10.7, "yes"), (12.5, "no")])
def test_what_fits_is_what_the_gpu_may_use(monkeypatch, size, says):
    """macOS gives the GPU two thirds of a small Mac's memory: here 10.7 GiB of 16."""
    info = {**mx.device_info(), "max_recommended_working_set_size": int(11.4e9)}
    monkeypatch.setattr(mx, "device_info", lambda *_: info)
    monkeypatch.setattr(mx.metal, "is_available", lambda: True)
    monkeypatch.setattr("dflash_mlx.machine.facts.memory_bytes", lambda: 16 * 2**30)
    assert fits(size * 1e9, quantized=True, mac=True) == says
    if says == "no":
        with pytest.raises(NotEnoughMemoryError, match=r"the GPU may use 11.4 GB"):
            check_memory("a model", int(size * 1e9))


# What generation_config.json says, and the sampling settings of the publisher that it means.
FILES = [
    (None, {}),  # no such file
    ({"eos_token_id": 2}, {}),
    (
        {"do_sample": True, "temperature": 0.6, "top_k": 20, "top_p": 0.95},  # Qwen3's
        {"temperature": 0.6, "top_k": 20, "top_p": 0.95},
    ),
    ({"temperature": 0.6, "top_p": 0.9}, {"temperature": 0.6, "top_p": 0.9}),
    ({"do_sample": True}, {"temperature": 1.0}),  # gpt-oss's
    ({"do_sample": False, "temperature": 0.7}, {}),
    ({"do_sample": True, "temperature": None, "top_k": -1}, {"temperature": 1.0, "top_k": 0}),
    ({"repetition_penalty": 1.05, "top_p": 0.8}, {"repetition_penalty": 1.05}),
]


@pytest.mark.parametrize(("content", "expected"), FILES)
def test_the_publishers_sampling_settings_are_the_defaults(content, expected, tmp_path):
    if content is not None:
        (tmp_path / "generation_config.json").write_text(json.dumps(content))
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert Folder(tmp_path).sampling_defaults == expected


@pytest.mark.parametrize("text", ["{", "[]", '{"do_sample": true, "top_p": "x"}'])
def test_sampling_settings_that_cannot_be_used_are_a_warning(text, tmp_path):
    (tmp_path / "generation_config.json").write_text(text)
    with pytest.warns(UserWarning, match=r"generation_config.json is not used"):
        assert Folder(tmp_path).sampling_defaults == {}
