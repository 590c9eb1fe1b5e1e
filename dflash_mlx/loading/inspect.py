"""How a drafter is understood, field by field, without MLX: no weight is read, only headers."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

from ..drafter.config import DraftConfig
from ..drafter.fields import Decision
from ..drafter.packagings import ADAPTER, CONFIDENCE, EMBEDDING, HEAD, MASK, PACKAGINGS, our_name
from .checks import check_safetensors, read_header

NETWORKS = {"dflash": "DFlash", "dflash2": "DFlash2", "dspark": "DSpark"}


def inspect_drafter(path: Path) -> list[Decision]:
    """Every decision taken on a drafter, and where it came from: its config's, then its tensors'.

    What is in the config and not used comes last. `path` is a drafter's folder, or a config.json
    alone, whose tensors then go unmentioned. Raises: `ConfigError`, `WeightsError`.
    """
    config = DraftConfig.from_file(path if path.is_file() else path / "config.json")
    shapes = {} if path.is_file() else _shapes(path, config)
    if shapes:
        config = settle(config, shapes)
    source = "architectures" if "architectures" in config.sources else "default"
    source = config.sources.get("speculators_model_type", source)
    network = Decision("network", NETWORKS[config.kind], source)
    decisions = [network, *config.describe()]
    return [*decisions, *(_parts(config, shapes) if shapes else []), *config.unused]


def settle(config: DraftConfig, shapes: Mapping[str, tuple[int, ...]]) -> DraftConfig:
    """A config with what its tensors decide: sizes that it leaves open, and the confidence head.

    shapes are of the tensors, by our names.
    """
    sources, changes = dict(config.sources), dict[str, Any]()
    if config.kind == "dspark" and config.confidence != (CONFIDENCE in shapes):
        changes["confidence"] = CONFIDENCE in shapes
        sources["confidence"] = f"{'the' if CONFIDENCE in shapes else 'no'} tensor {CONFIDENCE}"
    drafted = len(shapes.get("d2t", ())) and shapes["d2t"][0]
    if sources.get("draft_vocab_size", "default").startswith("default"):
        changes["draft_vocab_size"] = drafted or config.vocab_size
        sources["draft_vocab_size"] = f"{'the' if drafted else 'no'} tensor d2t"
    return replace(config, **changes, sources=sources)


def _parts(config: DraftConfig, shapes: Mapping[str, tuple[int, ...]]) -> list[Decision]:
    """What the tensors say about embedding and head."""
    decisions = []
    for part, tensor in (("embedding", EMBEDDING), ("head", HEAD)):
        if tensor in shapes:
            decisions.append(Decision(part, "its own", f"tensor {tensor}"))
        elif part == "head" and EMBEDDING in shapes and config.tie_word_embeddings:
            decisions.append(Decision(part, "its own embedding", "tie_word_embeddings"))
        else:
            decisions.append(Decision(part, "the target's", f"no tensor {tensor}"))
    if MASK in shapes:
        decisions.append(Decision("masks", "its own embedding", f"tensor {MASK}"))
    if ADAPTER in shapes:
        decisions.append(Decision("taps", "adapted to its width", f"tensor {ADAPTER}"))
    return decisions


def _shapes(folder: Path, config: DraftConfig) -> dict[str, tuple[int, ...]]:
    """The shapes of a folder's tensors, by our names."""
    shapes: dict[str, tuple[int, ...]] = {}
    for file in check_safetensors(folder):
        for name, tensor in read_header(file).items():
            ours = our_name(PACKAGINGS[config.packaging], name)
            if ours is not None:
                shapes[ours] = tuple(tensor["shape"])
    return shapes
