"""Names or paths -> a `Target` and its `DFlash` drafter, checked before anything runs.

A name is the embedded pair ("tiny"), a local folder, or a repository of the Hugging Face hub.
"""

from __future__ import annotations

import json
from importlib.resources import files
from pathlib import Path
from typing import Any, cast

import mlx.core as mx
import mlx.nn as nn
from huggingface_hub import snapshot_download
from huggingface_hub.errors import HfHubHTTPError, HFValidationError, LocalEntryNotFoundError
from mlx.utils import tree_flatten
from mlx_lm.utils import load_model, load_tokenizer

from .drafter.checkpoint import read_drafter
from .drafter.network import DFlash
from .errors import ConfigError, ModelNotFoundError, SettingsError, WeightsError
from .registry import drafter_for
from .target import Target
from .weights import check_safetensors

EMBEDDED = "tiny"
GROUP_SIZE = 64  # of weights quantized on load, as mlx-lm's own default


def load(
    name: str,
    draft: str | None = None,
    target_bits: int | None = None,
    draft_bits: int | None = None,
) -> tuple[Target, DFlash]:
    """Load a target and the drafter made for it.

    Args:
        name: "tiny" (the embedded pair), a folder, or a hub repository.
        draft: the drafter's folder or repository; None finds it in the registry.
        target_bits, draft_bits: 4 or 8 quantizes the weights on load; None leaves them.

    Raises:
        ModelNotFoundError, ConfigError, WeightsError, SettingsError, IncompatibleDrafterError,
        UnsupportedCacheError.
    """
    if draft is None:
        draft = EMBEDDED if name == EMBEDDED else drafter_for(name)
    target, drafter = load_target(name, target_bits), load_drafter(draft, draft_bits)
    drafter.config.check_fits(target.hidden_size, target.vocab_size, target.num_layers)
    return target, drafter


def load_target(path: str, bits: int | None = None) -> Target:
    """Load a target alone: any folder or repository that mlx-lm itself can load.

    Raises: `ModelNotFoundError`, `ConfigError`, `WeightsError`, `SettingsError`,
        `UnsupportedCacheError`.
    """
    _check_bits(bits)
    folder = _folder(path, "target")
    check_safetensors(folder)
    config = _read_json(folder / "config.json")
    if bits is not None and ("quantization" in config or "quantization_config" in config):
        raise SettingsError(f"{path} is quantized already: leave out the bits to use it as it is.")
    try:
        model, config = load_model(folder, lazy=True)
    except (ValueError, KeyError, TypeError) as error:
        # mlx-lm's ways to say: unknown model_type, a config field missing, weights that don't fit
        raise ConfigError(f"{path}: mlx-lm cannot load it ({_one_line(error)}).") from error
    except RuntimeError as error:  # from mx.load
        raise WeightsError(f"{path}: the weights cannot be read ({_one_line(error)}).") from error
    _settle(model, bits, getattr(model, "quant_predicate", None))
    return Target(model, _tokenizer(folder, config), config, name=path)


def load_drafter(path: str, bits: int | None = None) -> DFlash:
    """Load a drafter alone, DFlash or DFlash2, as its config says.

    Raises: `ModelNotFoundError`, `ConfigError`, `WeightsError`, `SettingsError`.
    """
    _check_bits(bits)
    drafter = read_drafter(_folder(path, "drafter"))
    if bits is not None and drafter.config.quantization is not None:
        raise SettingsError(f"{path} is quantized already: leave out the bits to use it as it is.")
    _settle(drafter, bits, None)
    return drafter


def _settle(model: nn.Module, bits: int | None, predicate: Any) -> None:
    """Give the weights the form they compute in, and read them into memory."""
    on_cpu = mx.default_device() == mx.Device(mx.cpu)
    if on_cpu:
        # MLX's CPU kernels are slow and coarse in half precision; f32 is neither.
        model.set_dtype(mx.float32)
    if bits is not None:

        def quantizable(name: str, module: nn.Module) -> bool | dict[str, Any]:
            if not hasattr(module, "to_quantized") or module.weight.shape[-1] % GROUP_SIZE:
                return False
            return predicate is None or cast("bool | dict[str, Any]", predicate(name, module))

        nn.quantize(model, group_size=GROUP_SIZE, bits=bits, class_predicate=quantizable)
    if on_cpu:
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


def _folder(name: str, part: str) -> Path:
    """The local folder of a model: embedded, given, or fetched from the hub."""
    if name == EMBEDDED:
        return Path(str(files("dflash_mlx.tiny"))) / part
    folder = Path(name).expanduser()
    if folder.is_dir():
        return folder
    if folder.exists():
        raise ModelNotFoundError(f"{name} is a file: give the folder that holds config.json.")
    if name.startswith((".", "/", "~")) or name.count("/") != 1:
        raise ModelNotFoundError(
            f"No model {name!r}: give a folder, a hub repository (owner/name), or {EMBEDDED!r}."
        )
    try:
        patterns = ["*.json", "*.safetensors", "*.jinja", "*.txt", "*.model", "*.tiktoken", "*.py"]
        return Path(snapshot_download(name, allow_patterns=patterns))
    except LocalEntryNotFoundError as error:
        raise ModelNotFoundError(
            f"{name} is neither a folder nor downloaded, and the hub cannot be reached."
        ) from error
    except (HfHubHTTPError, HFValidationError) as error:
        raise ModelNotFoundError(f"{name}: {_one_line(error)}") from error


def _tokenizer(folder: Path, config: dict[str, Any]) -> Any:
    if not any((folder / name).exists() for name in ("tokenizer.json", "tokenizer.model")):
        raise ModelNotFoundError(f"{folder}: there is no tokenizer.json, the tokenizer is missing.")
    try:
        return load_tokenizer(folder, eos_token_ids=config.get("eos_token_id"))
    except (OSError, ValueError, KeyError) as error:
        raise ConfigError(
            f"{folder}: the tokenizer cannot be read ({_one_line(error)})."
        ) from error


def _read_json(file: Path) -> dict[str, Any]:
    try:
        content = json.loads(file.read_text(encoding="utf-8"))
    except FileNotFoundError as error:
        raise ModelNotFoundError(f"{file.parent}: there is no {file.name}.") from error
    except ValueError as error:
        raise ConfigError(f"{file}: not valid JSON ({error}).") from error
    if not isinstance(content, dict):
        raise ConfigError(f"{file}: a JSON object is expected.")
    return content


def _check_bits(bits: int | None) -> None:
    if bits not in (None, 4, 8):
        raise SettingsError(f"Weights are quantized to 4 or 8 bits, not {bits}.")


def _one_line(error: Exception) -> str:
    """The first line of another library's message, short enough to read."""
    text = str(error).strip() or type(error).__name__
    return text.splitlines()[0][:200].rstrip(".")
