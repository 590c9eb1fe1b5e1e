"""How a drafter is understood, field by field, without MLX: no weight is read, only headers."""

from __future__ import annotations

from pathlib import Path

from ..drafter.config import Decision, DraftConfig
from .weights import check_safetensors, read_header

EMBEDDING, HEAD = "embed_tokens.weight", "lm_head.weight"


def inspect_drafter(path: Path) -> list[Decision]:
    """Every decision taken on a drafter, and where it came from: its config's, then its tensors'.

    `path` is a drafter's folder, or a config.json alone, whose tensors then go unmentioned.
    Raises: `ConfigError`, `WeightsError`.
    """
    config = DraftConfig.from_file(path if path.is_file() else path / "config.json")
    network = "DFlash2" if config.is_dflash2 else "DFlash"
    source = config.sources.get("architectures", "default")
    decisions = [Decision("network", network, source), *config.describe()]
    if path.is_file():
        return decisions
    tensors = {name for file in check_safetensors(path) for name in read_header(file)}
    for part, tensor in (("embedding", EMBEDDING), ("head", HEAD)):
        if tensor in tensors:
            decisions.append(Decision(part, "its own", f"tensor {tensor}"))
        elif part == "head" and EMBEDDING in tensors and config.tie_word_embeddings:
            decisions.append(Decision(part, "its own embedding", "tie_word_embeddings"))
        else:
            decisions.append(Decision(part, "the target's", f"no tensor {tensor}"))
    return decisions
