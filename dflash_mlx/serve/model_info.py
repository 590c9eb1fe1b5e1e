"""What the lists of models say, in the formats of all APIs."""

from __future__ import annotations

import hashlib
import time
from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING, Any, Final

from mlx_lm.utils import get_total_parameters

from ..answers.families import AnswerFormat
from ..kernels.shapes import weight_bytes

if TYPE_CHECKING:
    from ..targets import Target

OWNER: Final = "dflash-mlx"
NEVER: Final = "9999-12-31T23:59:59Z"  # when a model is unloaded that nothing unloads


@dataclass(frozen=True)
class ModelInfo:
    """A model that the server offers and has not loaded: little is known of it.

    Attributes:
        name: its name in requests.
        created: when it was offered or loaded, in seconds since 1970.
    """

    name: str
    created: int

    @property
    def _time(self) -> str:
        return time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime(self.created))

    def openai(self) -> dict[str, Any]:
        """The model as OpenAI's and Anthropic's lists have it."""
        return {
            "id": self.name,
            "object": "model",
            "created": self.created,
            "owned_by": OWNER,
            "type": "model",
            "display_name": self.name,
            "created_at": self._time,
            "state": "not-loaded",
        }

    def ollama(self) -> dict[str, Any]:
        """The model as Ollama's lists have it."""
        return {
            "name": self.name,
            "model": self.name,
            "modified_at": self._time,
            "digest": hashlib.sha256(self.name.encode()).hexdigest(),
            "details": {"format": "mlx"},
        }

    def ollama_details(self) -> dict[str, Any]:
        """The model as Ollama's /api/show has it."""
        return {
            "modified_at": self._time,
            "details": {"format": "mlx"},
            "model_info": {"general.basename": self.name},
            "capabilities": ["completion", "tools"],
        }


@dataclass(frozen=True)
class LoadedModelInfo(ModelInfo):
    """A model that is loaded.

    Attributes:
        target: the model.
        form: how it answers.
    """

    target: Target
    form: AnswerFormat

    @cached_property
    def _bytes(self) -> int:
        return weight_bytes(self.target.model)

    @cached_property
    def _parameters(self) -> int:
        return int(get_total_parameters(self.target.model))

    @cached_property
    def _quantization(self) -> str:
        """The bits of a quantized weight, or the type of the others."""
        config = self.target.config
        if "bits" in (found := config.get("quantization") or {}):
            return f"{found['bits']}-bit"
        return str(config.get("dtype") or config.get("torch_dtype") or "")

    @property
    def _architecture(self) -> str:
        return str(self.target.config.get("model_type", ""))

    @property
    def _template(self) -> str:
        template = self.target.tokenizer.chat_template
        return template if isinstance(template, str) else ""

    def openai(self) -> dict[str, Any]:
        """See `ModelInfo`; the context length by the names of other servers' lists."""
        names = ("context_length", "max_model_len", "max_context_length", "loaded_context_length")
        length = self.target.context_length
        more = {"meta": {"n_ctx_train": length}, "state": "loaded"}
        return super().openai() | dict.fromkeys(names, length) | more

    def ollama(self) -> dict[str, Any]:
        """See `ModelInfo`."""
        return super().ollama() | {
            "expires_at": NEVER,
            "size": self._bytes,
            "size_vram": self._bytes,
            "context_length": self.target.context_length,
            "details": self._details(),
        }

    def ollama_details(self) -> dict[str, Any]:
        """See `ModelInfo`."""
        family, thinks = self._architecture, bool(self.form.thought[0])
        return {
            "modified_at": self._time,
            "template": self._template,
            "details": self._details(),
            "model_info": {
                "general.architecture": family,
                "general.basename": self.name,
                "general.parameter_count": self._parameters,
                f"{family}.context_length": self.target.context_length,
                f"{family}.embedding_length": self.target.hidden_size,
            },
            "capabilities": ["completion", "tools", "thinking"][: 2 + thinks],
        }

    def _details(self) -> dict[str, Any]:
        family, millions = self._architecture, self._parameters / 1e6
        return {
            "format": "mlx",
            "family": family,
            "families": [family],
            "parameter_size": f"{millions / 1e3:.3g}B" if millions >= 1e3 else f"{millions:.3g}M",
            "quantization_level": self._quantization,
        }
