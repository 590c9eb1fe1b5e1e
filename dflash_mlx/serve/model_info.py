"""What the lists of models say, in the formats of all APIs."""

from __future__ import annotations

import hashlib
import time
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

from mlx_lm.utils import get_total_parameters

from ..answers.families import AnswerFormat
from ..errors import ConfigError
from ..kernels.shapes import weight_bytes
from ..validation import read_json

if TYPE_CHECKING:
    from ..targets import Target

OWNER: Final = "dflash-mlx"
NEVER: Final = "9999-12-31T23:59:59Z"  # when a model is unloaded that nothing unloads
# The context length, by the names of other servers' lists.
_LENGTHS: Final = "context_length max_model_len max_context_length loaded_context_length".split()


@dataclass(frozen=True)
class ModelInfo:
    """A model that the server offers.

    Attributes:
        name: its name in requests.
        created: when it was offered or loaded, in seconds since 1970.
        target: the model; None while it is not loaded.
        form: how it answers.
        path: its folder or GGUF file; None if it is not on this machine.
    """

    name: str
    created: int
    target: Target | None = None
    form: AnswerFormat | None = None
    path: Path | None = None

    @property
    def _time(self) -> str:
        return time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime(self.created))

    def openai(self) -> dict[str, Any]:
        """The model as OpenAI's and Anthropic's lists have it."""
        content = {
            "id": self.name,
            "object": "model",
            "created": self.created,
            "owned_by": OWNER,
            "type": "model",
            "display_name": self.name,
            "created_at": self._time,
            "state": "not-loaded" if self.target is None else "loaded",
        }
        if self.target is None:
            return content
        length = self.target.context_length
        return content | dict.fromkeys(_LENGTHS, length) | {"meta": {"n_ctx_train": length}}

    def ollama(self) -> dict[str, Any]:
        """The model as Ollama's lists have it."""
        content = {
            "name": self.name,
            "model": self.name,
            "modified_at": self._time,
            "digest": hashlib.sha256(self.name.encode()).hexdigest(),
            "details": self._details,
        }
        if self.target is None:
            return content | {"size": self._file_bytes}
        size, length = weight_bytes(self.target.model), self.target.context_length
        more = {"expires_at": NEVER, "size": size, "size_vram": size, "context_length": length}
        return content | more

    @property
    def _file_bytes(self) -> int:
        """The size of the weights' files; 0 if they are not here, or not any more."""
        path = self.path or Path()
        files = [path] if path.is_file() else [*path.glob("*.safetensors")] if self.path else []
        with suppress(OSError):
            return sum(file.stat().st_size for file in files)
        return 0

    @property
    def _config(self) -> Mapping[str, Any]:
        """The model's config.json; empty if nothing is known of it."""
        if self.target is not None:
            return self.target.config
        with suppress(ConfigError):
            return read_json(self.path / "config.json") if self.path and self.path.is_dir() else {}
        return {}

    def ollama_details(self) -> dict[str, Any]:
        """The model as Ollama's /api/show has it."""
        known: dict[str, Any] = {"general.basename": self.name}
        abilities = ["completion", "tools"]
        content = {"modified_at": self._time, "details": self._details, "model_info": known}
        content["capabilities"] = abilities
        if self.target is None or self.form is None:
            return content
        family, template = self._details["family"], self.target.tokenizer.chat_template
        known["general.architecture"] = family
        known["general.parameter_count"] = get_total_parameters(self.target.model)
        known[f"{family}.context_length"] = self.target.context_length
        known[f"{family}.embedding_length"] = self.target.hidden_size
        abilities += ["thinking"] * bool(self.form.thought[0])
        return content | {"template": template if isinstance(template, str) else ""}

    @property
    def _details(self) -> dict[str, Any]:
        config, size = self._config, ""
        if self.target is not None:
            millions = get_total_parameters(self.target.model) / 1e6
            size = f"{millions / 1e3:.3g}B" if millions >= 1e3 else f"{millions:.3g}M"
        family = str(config.get("model_type", ""))
        bits = (config.get("quantization") or {}).get("bits")
        kind = config.get("dtype") or config.get("torch_dtype") or ""
        return {
            "format": "mlx",
            "family": family,
            "families": [family],
            "parameter_size": size,
            "quantization_level": f"{bits}-bit" if bits else str(kind),
        }
