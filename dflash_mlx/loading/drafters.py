"""Opening drafters: networks of their own, and heads of a target's checkpoint."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import mlx.nn as nn
from mlx_lm.utils import dequantize_model

from ..drafter.gemma4_assistant import Gemma4Assistant
from ..drafter.mtp import MTPHead
from ..drafter.network import DFlash
from ..drafter.packagings import ASSISTANTS
from ..errors import ConfigError, WeightsError
from ..targets import Target
from ..threads import evaluate
from ..validation import ErrorWrapper, read_json
from .checkpoint import read_drafter
from .checks import check_safetensors, read_header
from .mtp import head_files, read_head, why_no_head
from .preflight import check_weights, is_language_model, on_cpu
from .quantization import Quantization, is_quantized, stored_quantization
from .reading import check_not_quantized, load_as_stored, load_file, start_reading
from .registry import MTP

if TYPE_CHECKING:
    from ..kernels.modules import Kernels

# What a folder holds.
NETWORK, MODEL, HEAD, ASSISTANT = "network", "model", "head", "assistant"
LARGE_DRAFTER = 10**9  # parameters


@dataclass(frozen=True)
class DraftSource:
    """A drafter's folder, and what is in it.

    Attributes:
        name: as it was named.
        folder: where it is.
        kind: `NETWORK`, `MODEL`, `HEAD` or `ASSISTANT`.
        target: the target's config.json.
        files: the weight files, but for those that the target reads, too.
    """

    name: str
    folder: Path
    kind: str
    target: Mapping[str, Any]
    files: Sequence[Path] = ()

    @classmethod
    def of(cls, name: str, folder: Path, target: Mapping[str, Any]) -> DraftSource:
        """What a folder holds for a target. Raises `ConfigError`, `WeightsError`."""
        if head_files(folder, target):
            return cls(name, folder, HEAD, target)
        if name == MTP:
            raise WeightsError(why_no_head(str(folder), target))
        config = read_json(folder / "config.json")
        kind, files = MODEL if is_language_model(config) else NETWORK, check_safetensors(folder)
        if config.get("model_type") in ASSISTANTS:
            kind = ASSISTANT
        return cls(name, folder, kind, target, files)

    def quantization_beside(self, target: Quantization | None) -> Quantization | None:
        """How it is quantized beside a target that is, on load or already; None to leave it.

        A head as the target. Others in 4 bits if they are large: drafts get cheaper, not worse.
        """
        if self.kind == HEAD:
            stored = any(name.endswith(".scales") for name in head_files(self.folder, self.target))
            return None if stored else target or stored_quantization(self.target)
        if target is None and not is_quantized(self.target):
            return None
        sizes = (tensor["shape"] for file in self.files for tensor in read_header(file).values())
        stored = is_quantized(read_json(self.folder / "config.json"))
        if stored or sum(map(math.prod, sizes)) <= LARGE_DRAFTER:
            return None
        return Quantization(4, 64)


def open_network(
    name: str,
    folder: Path,
    quantization: Quantization | None,
    kernels: Kernels | None,
    window: int | None = None,
    num_layers: int | None = None,
) -> DFlash:
    """Load the drafter network in a folder; `num_layers` are its target's."""
    check_weights(name, check_safetensors(folder), quantization)
    with ErrorWrapper(ConfigError, f"{folder / 'config.json'}: no drafter can be made of it"):
        drafter = read_drafter(folder, window, num_layers)
    _read(name, drafter, quantization, kernels)
    return drafter


def open_head(
    name: str,
    folder: Path,
    target: Target,
    quantization: Quantization | None,
    kernels: Kernels | None,
) -> MTPHead:
    """Load a target's MTP head from a folder.

    Raises: `WeightsError`, `IncompatibleDrafterError`, `SettingsError`.
    """
    head = read_head(folder, target)
    _read(name, head, quantization, kernels)
    return head


def open_assistant(
    name: str,
    folder: Path,
    target: Target,
    quantization: Quantization | None,
    kernels: Kernels | None,
) -> Gemma4Assistant:
    """Load a Gemma 4's assistant. Raises: `ConfigError`, `WeightsError`, `SettingsError`."""
    files = check_safetensors(folder)
    check_weights(name, files, quantization)
    config = read_json(folder / "config.json")
    with ErrorWrapper(ConfigError, f"{folder / 'config.json'}: no assistant can be made of it"):
        assistant = Gemma4Assistant(config, target)
    weights = {tensor: value for file in files for tensor, value in load_file(file).items()}
    weights.pop("lm_head.weight", None)  # the embedding once more
    load_as_stored(assistant, weights, f"{folder}: the weights do not fit the config,")
    _read(name, assistant, quantization, kernels)
    return assistant


def _read(
    name: str,
    drafter: nn.Module,
    quantization: Quantization | None,
    kernels: Kernels | None,
) -> None:
    """Read a drafter's weights, and give its layers to our kernels."""
    quantized = any("scales" in module for module in drafter.modules())
    check_not_quantized(name, quantization, quantized)
    with ErrorWrapper(WeightsError, f"{name}: the weights cannot be used"):
        if quantized and on_cpu():
            # MLX's quantized products are slow on a CPU, and drafts do not change the text.
            dequantize_model(drafter)
        start_reading(name, drafter, quantization)
        evaluate(drafter)
    if kernels is not None:
        from .wiring import wire_drafter

        wire_drafter(drafter, kernels)
