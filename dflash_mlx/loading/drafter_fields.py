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
    EMBEDDING,
    HEAD,
    MASK,
    NETWORKS,
    PACKAGINGS,
    needs_target,
    our_name,
)
from ..errors import ConfigError
from ..validation import path_kind, read_json, text_config
from .contents import DRAFTER, MODEL, config_contents, read_contents
from .folder import Folder, StoredTensor


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
    is_file = path_kind(path) == "file"
    kind, words = read_contents(path)
    if kind not in (MODEL, DRAFTER) and not (is_file and path.suffix == ".json"):
        raise ConfigError(f"{path} is {words}, not a drafter.")
    folder = None if is_file else Folder(path)
    raw = _config_of_file(path) if folder is None else folder.config
    if needs_target(raw):
        target_fields = [ResolvedField(name, value, name) for name, value in raw.items()]
        network_kind = "a Gemma 4 assistant" if raw["model_type"] in ASSISTANTS else "an MTP head"
        return [ResolvedField("network", network_kind, "model_type"), *target_fields]
    if config_contents(raw).kind == MODEL:
        from .mtp_loader import head_tensors  # this import and the next start MLX
        from .target_loader import is_language_model

        if is_language_model(raw):
            names = (name for name in ("model_type", "vocab_size") if name in text_config(raw))
            model_fields = [ResolvedField(name, text_config(raw)[name], name) for name in names]
            count = 0 if folder is None else len(head_tensors(folder, raw))
            head = ResolvedField("MTP head", f"{count} tensors" if count else "none", "its tensors")
            return [ResolvedField("network", "a draft model", "model_type"), *model_fields, head]
    config = DraftConfig.from_dict(raw, str(path if folder is None else path / "config.json"))
    tensors = {} if folder is None else our_tensors(folder, config)
    if tensors:
        config = with_tensor_facts(config, tensors)
    labels = ("speculators_model_type", "architectures")
    source = next((label for label in labels if label in config.sources), "default")
    resolved = []
    for item in fields(config):
        if item.name not in ("sources", "unused"):
            place = config.sources.get(item.name, "default")
            resolved.append(ResolvedField(item.name, getattr(config, item.name), place))
    unused = [ResolvedField(place, value, "not used") for place, value in config.unused.items()]
    network = ResolvedField("network", NETWORKS[config.kind][1], source)
    parts = _parts(config, tensors) if tensors else []
    return [network, *resolved, *parts, *unused]


def _config_of_file(path: Path) -> dict[str, Any]:
    """A config.json, or what a GGUF file has in its place."""
    if path.suffix == ".json":
        return read_json(path)
    from .gguf.gguf_file import GGUFFile

    return GGUFFile(path).config


def our_tensors(folder: Folder, config: DraftConfig) -> dict[str, StoredTensor]:
    """The tensors that a network uses, by our names. Raises `WeightsError`."""
    packaging = PACKAGINGS[config.packaging]
    ours = {our_name(packaging, name): tensor for name, tensor in folder.tensors.items()}
    return {name: tensor for name, tensor in ours.items() if name is not None}


def with_tensor_facts(config: DraftConfig, tensors: Mapping[str, StoredTensor]) -> DraftConfig:
    """A config completed from its tensors: they decide the draft vocabulary if it is left open."""
    if not config.sources.get("draft_vocab_size", "default").startswith("default"):
        return config
    # d2t has a number for each token that can be drafted.
    drafted = tensors["d2t"].shape[:1] if "d2t" in tensors else ()
    source = {"draft_vocab_size": f"{'the' if drafted else 'no'} tensor d2t"}
    return replace(
        config,
        draft_vocab_size=drafted[0] if drafted else config.vocab_size,
        sources={**config.sources, **source},
    )


def _parts(config: DraftConfig, tensors: Mapping[str, StoredTensor]) -> list[ResolvedField]:
    """Decisions from the presence of tensors."""
    decisions = []
    for part, tensor, value in (
        ("embedding", EMBEDDING, "its own"),
        ("head", HEAD, "its own"),
        ("masks", MASK, "its own embedding"),
        ("taps", ADAPTER, "adapted to its width"),
    ):
        if tensor in tensors:
            decisions.append(ResolvedField(part, value, f"tensor {tensor}"))
        elif tensor == HEAD and EMBEDDING in tensors and config.tie_word_embeddings:
            decisions.append(ResolvedField(part, "its own embedding", "tie_word_embeddings"))
        elif tensor in (EMBEDDING, HEAD):
            decisions.append(ResolvedField(part, "the target's", f"no tensor {tensor}"))
    return decisions
