"""Fine-tunes of a target by `mlx_lm.lora`, through mlx-lm's own loader: LoRA, DoRA or full."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import mlx.core as mx
import mlx.nn as nn
from mlx.utils import tree_flatten

from ..errors import ModelNotFoundError, SettingsError, WeightsError
from ..validation import ErrorWrapper, brief, read_json
from .checks import read_header
from .hub import Hub
from .preflight import on_cpu
from .reading import SupportsSharding
from .registry import Name, as_name

FILE, CONFIG = "adapters.safetensors", "adapter_config.json"
_PARTS = ("lora_a", "lora_b", "m")  # of an adapter's layers
_KINDS = ("lora", "dora", "full")


def adapter_folder(
    name: Name | None, hub: Hub, cluster: SupportsSharding | None = None
) -> Path | None:
    """The folder of an adapter, downloaded if it is a repository; None for None.

    Raises: `ModelNotFoundError`, `DownloadError`, `ConfigError`, `WeightsError`, `SettingsError`.
    """
    if name is None:
        return None
    if cluster is not None:
        raise SettingsError("adapter needs one machine: fuse it into the weights (mlx_lm.fuse).")
    name = as_name(name)
    folder = Path(name).expanduser()
    if not folder.exists():
        if name.count("/") != 1 or name.startswith((".", "/", "~")):
            raise ModelNotFoundError(f"No adapter {name!r}: there is no such folder.")
        folder = hub.fetch(name, [FILE])
    for file in (FILE, CONFIG):
        if not (folder / file).exists():
            raise ModelNotFoundError(
                f"{folder}: there is no {file}; an adapter is a folder of mlx_lm.lora."
            )
    kind = read_json(folder / CONFIG).get("fine_tune_type", "lora")
    if kind not in _KINDS:
        raise WeightsError(
            f"{folder / CONFIG}: fine_tune_type is {brief(kind)}, not lora, dora or full."
        )
    read_header(folder / FILE)
    return folder


def add_adapter(name: str, model: nn.Module, folder: Path) -> dict[str, Any]:
    """Put an adapter's layers into a target, in place; returns its adapter_config.json.

    Raises `WeightsError` if it is another model's, or not complete.
    """
    from mlx_lm.tuner.utils import load_adapters  # mlx-lm's trainer comes with it

    wrong = f"{folder}: this adapter does not fit {name}"
    config, stored = read_json(folder / CONFIG), read_header(folder / FILE)
    with ErrorWrapper(WeightsError, wrong):
        load_adapters(model, str(folder))
    if config.get("fine_tune_type", "lora") != "full":
        own = (path for path, _ in tree_flatten(model.parameters()))
        for path in own:
            if path.rpartition(".")[2] in _PARTS and path not in stored:
                raise WeightsError(f"{wrong} (the tensor {path} is missing).")
    if on_cpu():
        model.set_dtype(mx.float32)
    model.eval()  # no dropout
    return config
