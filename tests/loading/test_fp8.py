"""Models in 8-bit floats load as the 16-bit models of the same values, with their MTP heads."""

import json
from pathlib import Path

import mlx.core as mx
import numpy as np
import pytest
from mlx.utils import tree_flatten
from mtp_heads import save_pair

from dflash_mlx.loading.folder import Folder
from dflash_mlx.loading.load import load, load_target

BLOCK = 128


def in_fp8(folder: Path) -> None:
    """Convert a folder's projections to 8-bit floats with scales for blocks, as DeepSeek-V3 does.

    A second folder, whose name ends with "-16bit", gets the same values in 16 bits.
    """
    for file in [*folder.rglob("*.safetensors")]:
        stored = {}
        meant = {}
        for name, weight in mx.load(str(file)).items():
            stored[name] = meant[name] = weight
            if weight.ndim < 2 or "proj" not in name or "conv" in name:
                continue
            rows, columns = weight.shape[-2:]
            blocks = (*weight.shape[:-2], -(-rows // BLOCK), -(-columns // BLOCK))
            random = np.random.default_rng(len(stored))
            scales = np.float32(2.0 ** random.uniform(-6, -4, blocks))
            wide = scales.repeat(BLOCK, -2).repeat(BLOCK, -1)[..., :rows, :columns]
            codes = mx.to_fp8(weight / mx.array(wide))
            floats = np.array(mx.from_fp8(codes, dtype=mx.float32))
            stored |= {name: codes, f"{name}_scale_inv": mx.array(scales)}
            meant[name] = mx.array(floats * wide).astype(mx.bfloat16)
        mx.eval(stored, meant)
        mx.save_safetensors(str(file), stored)
        whole = file.read_bytes()
        size = 8 + int.from_bytes(whole[:8], "little")
        header = json.loads(whole[8:size])
        for name in header:
            if f"{name}_scale_inv" in stored:
                header[name]["dtype"] = "F8_E4M3"
        text = json.dumps(header).encode()
        file.write_bytes(len(text).to_bytes(8, "little") + text + whole[size:])
        twin = folder.with_name(f"{folder.name}-16bit") / file.relative_to(folder)
        twin.parent.mkdir(parents=True, exist_ok=True)
        mx.save_safetensors(str(twin), meant)
        for other in file.parent.glob("*.json"):
            twin.with_name(other.name).write_bytes(other.read_bytes())
    config = json.loads((folder / "config.json").read_text())
    config["quantization_config"] = {"quant_method": "fp8", "weight_block_size": [BLOCK, BLOCK]}
    (folder / "config.json").write_text(json.dumps(config))


@pytest.mark.parametrize("family", ["qwen3_5", "qwen3_5_moe", "qwen3_next", "glm4_moe", "mimo"])
def test_targets_and_heads_in_8_bit_floats_equal_those_in_16_bits(
    tmp_path: Path, family: str
) -> None:
    folder, draft = save_pair(tmp_path / "fp8", family)
    in_fp8(folder)
    wide_folder = tmp_path / "fp8-16bit"
    target, head = load(str(folder), draft=draft)
    wide_draft = draft.replace(str(folder), str(wide_folder))
    wide_target, wide_head = load(str(wide_folder), draft=wide_draft)
    for module, wide_module in ((target.model, wide_target.model), (head, wide_head)):
        tensors = dict(tree_flatten(module.parameters()))
        expected = dict(tree_flatten(wide_module.parameters()))
        assert tensors.keys() == expected.keys()
        for name, value in expected.items():
            assert mx.array_equal(tensors[name], value), name


def test_8_bit_floats_take_two_bytes_in_memory_and_can_be_quantized_on_load(tmp_path: Path) -> None:
    folder, _ = save_pair(tmp_path / "fp8", "mimo")
    in_fp8(folder)
    assert Folder(folder).memory() <= 1.1 * Folder(tmp_path / "fp8-16bit").memory()
    assert load_target(str(folder), bits=8).model.model.layers[0].mlp.up_proj.bits == 8
