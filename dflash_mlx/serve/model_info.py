"""The entries of models in lists, in the formats of all APIs."""

from __future__ import annotations

import hashlib
import time
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

from mlx_lm.utils import get_total_parameters

from ..errors import ConfigError
from ..kernels.shapes import weight_bytes
from ..validation import read_json
from .offered_models import OfferedModel

if TYPE_CHECKING:
    from ..targets import Target

NEVER: Final = "9999-12-31T23:59:59Z"  # when a model expires that is never unloaded
# Names of the context length in the lists of other servers.
_CONTEXT_FIELDS: Final = (
    "context_length",
    "max_model_len",
    "max_context_length",
    "loaded_context_length",
)


def openai_entry(model: OfferedModel) -> dict[str, Any]:
    """Describe a model for the lists of OpenAI and Anthropic."""
    content = {
        "id": model.name,
        "object": "model",
        "created": model.created,
        "owned_by": "dflash-mlx",
        "type": "model",
        "display_name": model.name,
        "created_at": _time(model),
        "state": "loaded" if model.handler else "not-loaded",
    }
    if model.handler is not None:
        length = model.handler.target.context_length
        content |= dict.fromkeys(_CONTEXT_FIELDS, length)
        content["meta"] = {"n_ctx_train": length}
    return content


def ollama_entry(model: OfferedModel) -> dict[str, Any]:
    """Describe a model for Ollama's lists."""
    handler = model.handler
    content = {
        "name": model.name,
        "model": model.name,
        "modified_at": _time(model),
        "digest": hashlib.sha256(model.name.encode()).hexdigest(),
        "details": _details(handler.target if handler else None, model.path),
    }
    if handler is None:
        return content | {"size": _file_bytes(model.path)}
    size = weight_bytes(handler.target.model)
    return content | {
        "expires_at": NEVER,
        "size": size,
        "size_vram": size,
        "context_length": handler.target.context_length,
    }


def ollama_details(model: OfferedModel) -> dict[str, Any]:
    """Describe a model for Ollama's /api/show."""
    handler = model.handler
    details = _details(handler.target if handler else None, model.path)
    model_info: dict[str, Any] = {"general.basename": model.name}
    capabilities = ["completion", "tools"]
    content = {
        "modified_at": _time(model),
        "details": details,
        "model_info": model_info,
        "capabilities": capabilities,
    }
    if handler is None:
        return content
    target = handler.target
    family = details["family"]
    model_info["general.architecture"] = family
    model_info["general.parameter_count"] = get_total_parameters(target.model)
    model_info[f"{family}.context_length"] = target.context_length
    model_info[f"{family}.embedding_length"] = target.hidden_size
    if handler.form.thinks:
        capabilities.append("thinking")
    template = target.tokenizer.chat_template
    content["template"] = template if isinstance(template, str) else ""
    return content


def _time(model: OfferedModel) -> str:
    return time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime(model.created))


def _file_bytes(path: Path | None) -> int:
    """Return the size of the files of the weights; 0 if they are not on this disk."""
    with suppress(OSError):
        if path is not None:
            files = [path] if path.is_file() else path.glob("*.safetensors")
            return sum(file.stat().st_size for file in files)
    return 0


def _details(target: Target | None, path: Path | None) -> dict[str, Any]:
    """Describe a model by its config.json, and by its weights if it is loaded."""
    config = {}
    parameters = ""
    if target is not None:
        config = target.config
        millions = get_total_parameters(target.model) / 1e6
        parameters = f"{millions / 1e3:.3g}B" if millions >= 1e3 else f"{millions:.3g}M"
    elif path is not None and path.is_dir():
        with suppress(ConfigError):
            config = read_json(path / "config.json")
    family = str(config.get("model_type", ""))
    bits = (config.get("quantization") or {}).get("bits")
    dtype = str(config.get("dtype") or config.get("torch_dtype") or "")
    return {
        "format": "mlx",
        "family": family,
        "families": [family],
        "parameter_size": parameters,
        "quantization_level": f"{bits}-bit" if bits else dtype,
    }
