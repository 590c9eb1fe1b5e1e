"""Fine-tunes of a target by `mlx_lm.lora`, through mlx-lm's own loader: LoRA, DoRA or full."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import mlx.core as mx
import mlx.nn as nn
from mlx.utils import tree_flatten

from ..errors import ModelNotFoundError, WeightsError
from ..validation import ErrorWrapper, brief, read_json
from .folder import StoredTensor, read_header
from .hub import Hub
from .reading import MODEL_ERRORS, on_cpu
from .registry import Name, as_name

FILE, CONFIG = "adapters.safetensors", "adapter_config.json"
_PARTS = ("lora_a", "lora_b", "m")  # of an adapter's layers
_KINDS = ("lora", "dora", "full")


@dataclass(frozen=True)
class Adapter:
    """A fine-tune: its folder, its adapter_config.json and what its weights' header says."""

    folder: Path
    config: dict[str, Any]
    stored: Mapping[str, StoredTensor]

    def add_to(self, name: str, model: nn.Module) -> None:
        """Put its layers into a target, in place.

        Raises `WeightsError` if it is another model's, or not complete.
        """
        from mlx_lm.tuner.utils import load_adapters  # mlx-lm's trainer comes with it

        wrong = f"{self.folder}: this adapter does not fit {name}"
        with ErrorWrapper(WeightsError, wrong, MODEL_ERRORS):
            load_adapters(model, str(self.folder))
        full = self.config.get("fine_tune_type") == "full"
        for path, _ in () if full else tree_flatten(model.parameters()):
            if path.rpartition(".")[2] in _PARTS and path not in self.stored:
                raise WeightsError(f"{wrong} (the tensor {path} is missing).")
        if on_cpu():
            model.set_dtype(mx.float32)
        model.eval()  # no dropout


def find_adapter(name: Name, hub: Hub) -> Adapter:
    """The adapter in a folder or repository, which is downloaded.

    Raises: `ModelNotFoundError`, `DownloadError`, `ConfigError`, `WeightsError`, `SettingsError`.
    """
    name = as_name(name)
    folder = Path(name).expanduser()
    if not folder.exists():
        if name.count("/") != 1 or name.startswith((".", "/", "~")):
            raise ModelNotFoundError(f"No adapter {name!r}: there is no such folder.")
        folder = hub.fetch(name, [FILE]).path
    for file in (FILE, CONFIG):
        if not (folder / file).exists():
            raise ModelNotFoundError(
                f"{folder}: there is no {file}; an adapter is a folder of mlx_lm.lora."
            )
    config = read_json(folder / CONFIG)
    if (kind := config.get("fine_tune_type", "lora")) not in _KINDS:
        raise WeightsError(
            f"{folder / CONFIG}: fine_tune_type is {brief(kind)}, not lora, dora or full."
        )
    return Adapter(folder, config, read_header(folder / FILE))
