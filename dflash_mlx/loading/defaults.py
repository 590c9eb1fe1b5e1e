"""The sampling settings that the publisher of a model recommends."""

from __future__ import annotations

import warnings
from pathlib import Path
from typing import Any, Final

from ..errors import ConfigError, SettingsError
from ..settings import RequestSettings
from ..validation import read_json

FILE: Final = "generation_config.json"
SAMPLING: Final = ("temperature", "top_p", "top_k", "min_p", "repetition_penalty")


def sampling_defaults(folder: Path) -> dict[str, Any]:
    """The sampling settings of a model folder's generation_config.json, for `RequestSettings`.

    Empty if there is no such file, or it has the model decode greedily. A file that cannot be used
    is a warning.
    """
    path = folder / FILE
    if not path.is_file():
        return {}
    try:
        config = read_json(path)
        found = {name: config[name] for name in SAMPLING if config.get(name) is not None}
        samples = config.get("do_sample")
        if samples is True:
            found = {"temperature": 1.0} | found  # transformers' default
        elif samples is False or "temperature" not in found:
            found = {name: found[name] for name in found if name == "repetition_penalty"}
        if isinstance(found.get("top_k"), int):
            found["top_k"] = max(0, found["top_k"])  # -1 is off for vLLM
        RequestSettings(**found)
    except (ConfigError, SettingsError) as error:
        warnings.warn(f"dflash-mlx: {path} is not used: {error}", stacklevel=2)
        return {}
    return found
