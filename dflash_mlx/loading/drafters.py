"""Opening drafters: networks of their own, and heads of a target's checkpoint."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from mlx_lm.utils import dequantize_model

from ..drafter.gemma4_assistant import Gemma4Assistant
from ..drafter.mtp import MTPHead
from ..drafter.network import DFlash
from ..drafter.networks import ASSISTANTS
from ..errors import ConfigError, WeightsError
from ..targets import Target
from ..threads import evaluate
from ..validation import ErrorWrapper, read_json
from .checkpoint import read_drafter
from .checks import check_safetensors, read_header
from .mtp import head_files, read_head, stands_alone, why_no_head
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
            files = check_safetensors(folder) if stands_alone(folder) else ()
            return cls(name, folder, HEAD, target, files)
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
        sizes = (tensor.shape for file in self.files for tensor in read_header(file).values())
        stored = is_quantized(read_json(self.folder / "config.json"))
        if stored or sum(map(math.prod, sizes)) <= LARGE_DRAFTER:
            return None
        return Quantization(4, 64)


def open_drafter(
    source: DraftSource,
    target: Target | None,
    quantization: Quantization | None,
    kernels: Kernels | None,
    window: int | None = None,
) -> DFlash | MTPHead | Gemma4Assistant:
    """Load the network, head or assistant of a source, and give its layers to our kernels.

    Only a network may be loaded without its target.

    Raises: `ConfigError`, `WeightsError`, `NotEnoughMemoryError`, `SettingsError`,
        `IncompatibleDrafterError`.
    """
    name, folder = source.name, source.folder
    drafter: DFlash | MTPHead | Gemma4Assistant
    check_weights(name, source.files, quantization)
    with ErrorWrapper(ConfigError, f"{folder / 'config.json'}: no drafter can be made of it"):
        if target is None or source.kind == NETWORK:
            drafter = read_drafter(folder, window, None if target is None else target.num_layers)
        elif source.kind == HEAD:
            drafter = read_head(folder, target)
        else:
            drafter = _read_assistant(folder, target)
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
    return drafter


def _read_assistant(folder: Path, target: Target) -> Gemma4Assistant:
    """The assistant of a Gemma 4, its weights as stored. Raises `ConfigError`, `WeightsError`."""
    assistant = Gemma4Assistant(read_json(folder / "config.json"), target)
    files = map(load_file, check_safetensors(folder))
    weights = {tensor: value for file in files for tensor, value in file.items()}
    weights.pop("lm_head.weight", None)  # the embedding once more
    load_as_stored(assistant, weights, f"{folder}: the weights do not fit the config,")
    return assistant
