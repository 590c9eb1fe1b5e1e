"""How a drafter's config and tensors are read, field by field. Needs no MLX and no weights."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, fields, replace
from pathlib import Path
from typing import Any

from ..drafter.config import DraftConfig
from ..drafter.networks import (
    ADAPTER,
    ASSISTANTS,
    DRAFTER_FIELDS,
    EMBEDDING,
    HEAD,
    MASK,
    PACKAGINGS,
    needs_target,
    our_name,
)
from ..validation import read_json, text_config
from .folder import Folder

NETWORKS = {
    "dflash": "DFlash",
    "dflash2": "DFlash2",
    "dspark": "DSpark",
    "lilicorr": "LiLiCorr",
    "eagle3": "EAGLE-3",
}


@dataclass(frozen=True)
class ResolvedField:
    """A field of a config, its value, and where the value was read or derived."""

    field: str
    value: Any
    source: str


def inspect_drafter(path: Path) -> list[ResolvedField]:
    """Every decision about a drafter and its source: from its config, then from its tensors.

    Unused fields of the config come last. `path` is a drafter's folder, or a config.json, whose
    tensors are then left out. Raises: `ConfigError`, `WeightsError`.
    """
    folder = None if path.is_file() else Folder(path)
    raw = read_json(path) if folder is None else folder.config
    if needs_target(raw):
        found = [ResolvedField(name, value, name) for name, value in raw.items()]
        kind = "a Gemma 4 assistant" if raw["model_type"] in ASSISTANTS else "an MTP head"
        return [ResolvedField("network", kind, "model_type"), *found]
    if not DRAFTER_FIELDS & raw.keys():
        from .mtp import head_tensors  # these two start MLX
        from .target import is_language_model

        if is_language_model(raw):
            shown = (name for name in ("model_type", "vocab_size") if name in text_config(raw))
            model = [ResolvedField(name, text_config(raw)[name], name) for name in shown]
            count = 0 if folder is None else len(head_tensors(folder, raw))
            head = ResolvedField("MTP head", f"{count} tensors" if count else "none", "its tensors")
            return [ResolvedField("network", "a draft model", "model_type"), *model, head]
    config = DraftConfig.from_dict(raw, str(path if folder is None else path / "config.json"))
    shapes = {} if folder is None else our_shapes(folder, config)
    if shapes:
        config = settle(config, shapes)
    labels = ("speculators_model_type", "architectures")
    source = next((label for label in labels if label in config.sources), "default")
    resolved = [
        ResolvedField(
            item.name, getattr(config, item.name), config.sources.get(item.name, "default")
        )
        for item in fields(config)
        if item.name not in ("sources", "unused")
        and config.kind in (item.metadata.get("of") or (config.kind,))
    ]
    unused = [ResolvedField(place, value, "not used") for place, value in config.unused.items()]
    network = ResolvedField("network", NETWORKS[config.kind], source)
    return [network, *resolved, *(_parts(config, shapes) if shapes else []), *unused]


def our_shapes(folder: Folder, config: DraftConfig) -> dict[str, tuple[int, ...]]:
    """The shapes of a folder's tensors, by our names. Raises `WeightsError`."""
    names = {our_name(PACKAGINGS[config.packaging], name): name for name in folder.tensors}
    return {ours: folder.tensors[name].shape for ours, name in names.items() if ours is not None}


def settle(config: DraftConfig, shapes: Mapping[str, tuple[int, ...]]) -> DraftConfig:
    """A config completed from the shapes of its tensors, by our names.

    They decide the draft vocabulary if it is left open.
    """
    if not config.sources.get("draft_vocab_size", "default").startswith("default"):
        return config
    drafted = len(shapes.get("d2t", ())) and shapes["d2t"][0]
    source = {"draft_vocab_size": f"{'the' if drafted else 'no'} tensor d2t"}
    return replace(
        config,
        draft_vocab_size=drafted or config.vocab_size,
        sources={**config.sources, **source},
    )


def _parts(config: DraftConfig, shapes: Mapping[str, tuple[int, ...]]) -> list[ResolvedField]:
    """Decisions from the presence of tensors."""
    decisions = []
    for part, tensor in (("embedding", EMBEDDING), ("head", HEAD)):
        if tensor in shapes:
            decisions.append(ResolvedField(part, "its own", f"tensor {tensor}"))
        elif part == "head" and EMBEDDING in shapes and config.tie_word_embeddings:
            decisions.append(ResolvedField(part, "its own embedding", "tie_word_embeddings"))
        else:
            decisions.append(ResolvedField(part, "the target's", f"no tensor {tensor}"))
    if MASK in shapes:
        decisions.append(ResolvedField("masks", "its own embedding", f"tensor {MASK}"))
    if ADAPTER in shapes:
        decisions.append(ResolvedField("taps", "adapted to its width", f"tensor {ADAPTER}"))
    return decisions
