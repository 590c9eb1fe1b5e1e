"""An error about a wrong path says what the path has, which its header or config shows."""

import json
import zipfile
from pathlib import Path
from typing import Any

import gguf
import mlx.core as mx
import numpy as np
import pytest
from ggufs import gguf_of, write
from tinymodels import drafter_config, refusal, save_adapter, save_drafter, save_target

import dflash_mlx as dm
from dflash_mlx.bench.datasets import read_prompts
from dflash_mlx.errors import DataError, DFlashError
from dflash_mlx.loading.contents import (
    ADAPTER,
    DRAFTER,
    MODEL,
    OTHER,
    config_contents,
    read_contents,
)
from dflash_mlx.loading.drafter_fields import inspect_drafter
from dflash_mlx.train.dataset import read_records

DATA = Path(__file__).parents[1] / "data"


def tiny_gguf(path: Path, architecture: str, **general: str) -> Path:
    """Write a GGUF file with a header and one small tensor."""
    writer = gguf.GGUFWriter(path, architecture)
    for key, value in general.items():
        writer.add_string(f"general.{key}", value)
    writer.add_tensor("fc.weight", np.zeros((32, 32), np.float32))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


@pytest.fixture(scope="module")
def paths(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """One path of each kind of content: folders, weights, GGUF files, and other files."""
    folder = tmp_path_factory.mktemp("paths")
    folders = {name: folder / name for name in ("target", "drafter", "adapter", "peft", "empty")}
    save_target(folders["target"], "llama")
    save_drafter(folders["drafter"])
    save_adapter(folders["adapter"], folders["target"], "lora")
    folders["peft"].mkdir()
    (folders["peft"] / "adapter_config.json").write_text('{"peft_type": "LORA", "lora_alpha": 8}')
    array = mx.zeros((2, 2))
    names = {"peft": "base_model.model.a.lora_A.weight", "drafter": "hidden_norm.weight"}
    for kind, name in names.items():
        folders[f"{kind}.safetensors"] = folder / f"{kind}.safetensors"
        mx.save_safetensors(str(folders[f"{kind}.safetensors"]), {name: array})
    folders["empty"].mkdir()
    folders["gguf drafter"] = tiny_gguf(folder / "a.gguf", "dflash-draft")
    folders["gguf eagle"] = tiny_gguf(folder / "e.gguf", "eagle3")
    folders["gguf adapter"] = tiny_gguf(folder / "b.gguf", "llama", type="adapter")
    folders["gguf projector"] = tiny_gguf(folder / "c.gguf", "clip")
    folders["gguf model"] = tiny_gguf(folder / "d.gguf", "qwen3")
    content_of = {
        "page": b"<!DOCTYPE html><html>",
        "pointer": b"version https://git-lfs.github.com/spec/v1\noid sha256:0\n",
        "parquet": b"PAR1" + bytes(20),
        "json": b'{"a": 1}',
        "text": "naïve".encode(),
        "nothing": b"",
        "binary": bytes([200, 201, 0]) * 2000,
    }
    for name, content in content_of.items():
        folders[name] = folder / name
        folders[name].write_bytes(content)
    folders["torch"] = folder / "pytorch_model.bin"
    with zipfile.ZipFile(folders["torch"], "w") as archive:
        archive.writestr("archive/data.pkl", b"")
    return folders


KINDS = {
    "target": (MODEL, "a model (llama)"),
    "drafter": (DRAFTER, "a drafter (DFlashDraftModel)"),
    "adapter": (ADAPTER, "an adapter of mlx_lm.lora"),
    "peft": (ADAPTER, "a PEFT adapter"),
    "empty": (OTHER, "an empty folder"),
    "peft.safetensors": (ADAPTER, "weights of a PEFT adapter (safetensors)"),
    "drafter.safetensors": (DRAFTER, "weights of a drafter (safetensors)"),
    "gguf drafter": (DRAFTER, "a DFlash drafter in the form of older forks in GGUF"),
    "gguf eagle": (DRAFTER, "an EAGLE-3 head, which drafts in GGUF"),
    "gguf adapter": (ADAPTER, "a LoRA adapter in GGUF (llama)"),
    "gguf projector": (OTHER, "a projector for images in GGUF (clip)"),
    "gguf model": (MODEL, "a model in GGUF (qwen3)"),
    "page": (OTHER, "a web page"),
    "pointer": (OTHER, "a pointer of Git LFS"),
    "parquet": (OTHER, "a Parquet file"),
    "json": (OTHER, "a JSON file"),
    "text": (OTHER, "a text file"),
    "nothing": (OTHER, "an empty file"),
    "binary": (OTHER, "a binary file of an unknown kind"),
    "torch": (OTHER, "a zip archive or a PyTorch checkpoint"),
}


@pytest.mark.parametrize("name", KINDS)
def test_the_content_of_a_path_is_recognized(paths: dict[str, Path], name: str) -> None:
    kind, words = read_contents(paths[name])
    assert kind == KINDS[name][0] and words.startswith(KINDS[name][1])


def test_every_published_drafter_is_a_drafter_and_every_target_a_model() -> None:
    drafters = json.loads((DATA / "published_configs.json").read_text())
    assert {config_contents(entry["config"]).kind for entry in drafters} == {DRAFTER}
    models: dict[str, Any] = json.loads((DATA / "mlx_lm_models.json").read_text())
    assert {config_contents(config).kind for config in models.values()} == {MODEL}
    for kind in ("gemma4_assistant", "qwen3_5_mtp"):
        assert config_contents({"model_type": kind}).kind == DRAFTER


ALL = [name for name in KINDS if name != "target"]


@pytest.mark.parametrize("name", [name for name in ALL if name != "gguf model"])
def test_the_error_about_a_path_that_is_not_a_model_says_what_it_is(
    paths: dict[str, Path], name: str
) -> None:
    message = refusal(DFlashError, dm.load_target, paths[name])
    kind, words = KINDS[name]
    assert words.partition(" in GGUF")[0] in message
    option = {DRAFTER: "--draft", ADAPTER: "--adapter"}.get(kind, "")
    assert option in message or "safetensors" in name


@pytest.mark.parametrize("name", [name for name in ALL if KINDS[name][0] not in (MODEL, DRAFTER)])
def test_the_error_about_a_path_that_is_not_a_drafter_says_what_it_is(
    paths: dict[str, Path], name: str
) -> None:
    message = refusal(DFlashError, dm.load, paths["target"], str(paths[name]))
    assert KINDS[name][1].partition(" in GGUF")[0] in message


@pytest.mark.parametrize("name", [kind for kind in KINDS if kind not in ("adapter", "peft")])
def test_the_error_about_a_path_that_is_not_an_adapter_says_what_it_is(
    paths: dict[str, Path], name: str
) -> None:
    message = refusal(DFlashError, dm.load_target, paths["target"], adapter=str(paths[name]))
    assert KINDS[name][1] in message and "not an adapter" in message


@pytest.mark.parametrize("name", ["gguf model", "torch", "parquet", "binary"])
@pytest.mark.parametrize("reader", [read_prompts, lambda path: list(read_records(path))])
def test_the_error_about_a_file_of_prompts_or_records_that_is_not_text_says_what_it_is(
    paths: dict[str, Path], name: str, reader: Any
) -> None:
    with pytest.raises(DataError) as caught:
        reader(paths[name])
    assert KINDS[name][1] in str(caught.value)


def test_the_path_of_a_weight_file_means_its_folder(paths: dict[str, Path]) -> None:
    """File choosers and shells complete paths to files, and many programs accept them."""
    target = dm.load_target(str(paths["target"] / "model.safetensors"))
    assert target.num_layers == 3
    drafter = dm.load_drafter(str(paths["drafter"] / "model.safetensors"))
    assert drafter.config.block_size == drafter_config()["block_size"]
    weights = str(paths["adapter"] / "adapters.safetensors")
    assert dm.load_target(str(paths["target"]), adapter=weights)


def test_a_renamed_part_of_a_split_gguf_file_is_refused(tmp_path: Path) -> None:
    metadata, tensors, _ = gguf_of("qwen3")
    write(tmp_path / "a.gguf", metadata=metadata, tensors=tensors, kinds={}, most_tensors=20)
    first = sorted(tmp_path.glob("*.gguf"))[0]
    alone = tmp_path / "alone" / "model.gguf"
    alone.parent.mkdir()
    alone.write_bytes(first.read_bytes())
    message = refusal(DFlashError, dm.load_target, alone)
    assert "one of" in message and "parts of a model under another name" in message


def test_inspecting_an_adapter_says_that_it_is_not_a_drafter(paths: dict[str, Path]) -> None:
    with pytest.raises(DFlashError, match="a PEFT adapter, not a drafter"):
        inspect_drafter(paths["peft"])
