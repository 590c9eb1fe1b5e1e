"""The package's files of a drafter: 4 bits in groups, as MLX's affine quantization stores them."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

Weights = dict[str, Tensor]
# Token ids, stored as they are. Matrices are stored in 4 bits, and other vectors in bf16.
IDS = "d2t"
PER_WORD = 8  # codes of 4 bits in 32


def load(folder: Path) -> tuple[dict[str, Any], Weights]:
    """The config.json of a drafter, and its weights in float32."""
    config = json.loads((folder / "config.json").read_text())
    stored = load_file(folder / "model.safetensors")
    size = config["quantization"]["group_size"]
    weights = {}
    for name, tensor in stored.items():
        layer, _, kind = name.rpartition(".")
        if kind in ("scales", "biases"):
            continue
        if f"{layer}.scales" in stored:
            scales = stored[f"{layer}.scales"]
            weights[name] = unpacked(tensor, scales, stored[f"{layer}.biases"], size)
        else:
            weights[name] = tensor if name == IDS else tensor.float()
    return config, weights


def save(config: dict[str, Any], weights: Weights, folder: Path) -> None:
    """Write both files, each whole or not at all."""
    folder.mkdir(parents=True, exist_ok=True)
    stored: Weights = {}
    for name, weight in weights.items():
        if weight.ndim == 2:
            layer = name.rpartition(".")[0]
            parts = packed(weight, config["quantization"]["group_size"])
            for kind, part in zip(("weight", "scales", "biases"), parts, strict=True):
                stored[f"{layer}.{kind}"] = part.cpu().contiguous()
        else:
            stored[name] = weight.cpu() if name == IDS else weight.bfloat16().cpu()
    unfinished = folder / "model.part"
    save_file(stored, unfinished, metadata={"format": "mlx"})
    unfinished.replace(folder / "model.safetensors")
    (folder / "config.json").write_text(json.dumps(config, indent=1) + "\n")


def rounded_to_stored(weights: Weights, size: int) -> Weights:
    """What `load` returns after `save` has stored these weights, in groups of `size` values."""
    rounded = {}
    for name, weight in weights.items():
        if weight.ndim == 2:
            rounded[name] = unpacked(*packed(weight, size), size)
        elif name == IDS:
            rounded[name] = weight
        else:
            rounded[name] = weight.bfloat16().float()
    return rounded


def packed(weight: Tensor, size: int) -> tuple[Tensor, Tensor, Tensor]:
    """Codes [R, C / 8] of a matrix [R, C], and the scales and biases [R, C / size] of its groups.

    As in `mx.quantize`, two values of a group are stored without rounding: 0, and the end of the
    group's range that is farther from 0.
    """
    groups = weight.bfloat16().float().unflatten(-1, (-1, size))
    low = groups.amin(dim=-1, keepdim=True)
    high = groups.amax(dim=-1, keepdim=True)
    from_low = low.abs() > high.abs()
    scale = ((high - low) / 15).clamp(min=1e-7)
    scale = torch.where(from_low, scale, -scale)
    edge = torch.where(from_low, low, high)
    steps = (edge / scale).round()
    scale = torch.where(steps != 0, edge / steps, scale)
    bias = torch.where(steps != 0, edge, 0)
    codes = ((groups - bias) / scale).round().clamp(0, 15).long()
    shifts = 4 * torch.arange(PER_WORD, device=weight.device)
    words = (codes.flatten(-2).unflatten(-1, (-1, PER_WORD)) << shifts).sum(dim=-1)
    signed = torch.where(words < 2**31, words, words - 2**32).int()
    return signed.view(torch.uint32), scale[..., 0].bfloat16(), bias[..., 0].bfloat16()


def unpacked(words: Tensor, scales: Tensor, biases: Tensor, size: int) -> Tensor:
    """The matrix [R, C] in float32 of what `packed` returns."""
    shifts = 4 * torch.arange(PER_WORD, device=words.device, dtype=torch.int32)
    codes = (words.view(torch.int32)[..., None] >> shifts) & 15
    groups = codes.flatten(-2).unflatten(-1, (-1, size)).float()
    return (groups * scales.float()[..., None] + biases.float()[..., None]).flatten(-2)
