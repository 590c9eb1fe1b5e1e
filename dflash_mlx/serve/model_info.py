"""What the lists of models say, in the formats of all APIs."""

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
from .models import OfferedModel

if TYPE_CHECKING:
    from ..targets import Target

NEVER: Final = "9999-12-31T23:59:59Z"  # when a model is unloaded that nothing unloads
# The context length, by the names of other servers' lists.
_LENGTHS: Final = "context_length max_model_len max_context_length loaded_context_length".split()


def openai_entry(model: OfferedModel) -> dict[str, Any]:
    """The model as OpenAI's and Anthropic's lists have it."""
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
        content |= dict.fromkeys(_LENGTHS, length) | {"meta": {"n_ctx_train": length}}
    return content


def ollama_entry(model: OfferedModel) -> dict[str, Any]:
    """The model as Ollama's lists have it."""
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
    size, length = weight_bytes(handler.target.model), handler.target.context_length
    return content | {
        "expires_at": NEVER,
        "size": size,
        "size_vram": size,
        "context_length": length,
    }


def ollama_details(model: OfferedModel) -> dict[str, Any]:
    """The model as Ollama's /api/show has it."""
    handler, abilities = model.handler, ["completion", "tools"]
    details = _details(handler.target if handler else None, model.path)
    known: dict[str, Any] = {"general.basename": model.name}
    content = {"modified_at": _time(model), "details": details, "model_info": known}
    content["capabilities"] = abilities
    if handler is None:
        return content
    target, family = handler.target, details["family"]
    known["general.architecture"] = family
    known["general.parameter_count"] = get_total_parameters(target.model)
    known[f"{family}.context_length"] = target.context_length
    known[f"{family}.embedding_length"] = target.hidden_size
    abilities += ["thinking"] * bool(handler.form.thought[0])
    template = target.tokenizer.chat_template
    return content | {"template": template if isinstance(template, str) else ""}


def _time(model: OfferedModel) -> str:
    return time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime(model.created))


def _file_bytes(path: Path | None) -> int:
    """The size of the weights' files; 0 if they are not here, or not any more."""
    with suppress(OSError):
        if path is not None:
            files = [path] if path.is_file() else path.glob("*.safetensors")
            return sum(file.stat().st_size for file in files)
    return 0


def _details(target: Target | None, path: Path | None) -> dict[str, Any]:
    """What is known of a model: of its config.json, and of its weights if it is loaded."""
    config, size = {}, ""
    if target is not None:
        config, millions = target.config, get_total_parameters(target.model) / 1e6
        size = f"{millions / 1e3:.3g}B" if millions >= 1e3 else f"{millions:.3g}M"
    elif path is not None and path.is_dir():
        with suppress(ConfigError):
            config = read_json(path / "config.json")
    family, bits = str(config.get("model_type", "")), (config.get("quantization") or {}).get("bits")
    return {
        "format": "mlx",
        "family": family,
        "families": [family],
        "parameter_size": size,
        "quantization_level": f"{bits}-bit"
        if bits
        else str(config.get("dtype") or config.get("torch_dtype") or ""),
    }
