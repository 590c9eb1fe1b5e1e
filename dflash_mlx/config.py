"""A drafter's config.json, in every published DFlash layout, resolved into one validated form.

Published drafters spell the same fact in several places: the block size at the root or nested in
`dflash_config`, the rope base at the root or in `rope_parameters`, causality as `is_causal` or
`causal`. Reading only one of them is how other ports ran drafters at the wrong block size without
a word. Here a value inside `dflash_config` wins over the root, and what is missing or not
understood is a `ConfigError` that names the field.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from .errors import ConfigError, IncompatibleDrafterError

FULL, SLIDING = "full_attention", "sliding_attention"

_NESTED_FIELDS = {"mask_token_id", "target_layer_ids", "block_size", "causal", "is_causal"}


@dataclass(frozen=True)
class DraftConfig:
    """The resolved configuration of a DFlash drafter (arXiv 2602.06036)."""

    hidden_size: int
    num_hidden_layers: int
    intermediate_size: int
    num_attention_heads: int
    num_key_value_heads: int
    head_dim: int
    vocab_size: int
    block_size: int  # rows of a block: the anchor and block_size - 1 drafted tokens
    mask_token_id: int
    target_layer_ids: tuple[int, ...]  # the layers of the target whose outputs are read
    num_target_layers: int | None  # None: the config does not say
    windows: tuple[int | None, ...]  # per layer: the sliding window, None for full attention
    causal: tuple[bool, ...]  # per layer: do a block's rows see later rows of the block?
    rope_theta: float = 10000.0
    rope_scaling: Mapping[str, Any] | None = None
    max_position_embeddings: int = 40960
    rms_norm_eps: float = 1e-6
    attention_bias: bool = False

    @classmethod
    def from_file(cls, path: str | Path) -> DraftConfig:
        """Read and resolve a config.json. Raises `ConfigError`."""
        try:
            raw = json.loads(Path(path).read_text(encoding="utf-8"))
        except OSError as error:
            raise ConfigError(f"{path}: cannot be read ({error.strerror}).") from error
        except ValueError as error:
            raise ConfigError(f"{path}: not valid JSON ({error}).") from error
        if not isinstance(raw, dict):
            raise ConfigError(f"{path}: a JSON object is expected.")
        return cls.from_dict(raw, where=str(path))

    @classmethod
    def from_dict(cls, raw: Mapping[str, Any], where: str = "drafter config") -> DraftConfig:
        """Resolve a parsed config.json; `where` starts the error messages. Raises `ConfigError`."""
        fields = _Fields(raw, where)
        fields.check_architecture()
        layers = fields.integer("num_hidden_layers")
        windows = fields.windows(layers)
        theta, scaling = fields.rope()
        heads = fields.integer("num_attention_heads")
        hidden = fields.integer("hidden_size")
        config = cls(
            hidden_size=hidden,
            num_hidden_layers=layers,
            intermediate_size=fields.integer("intermediate_size"),
            num_attention_heads=heads,
            num_key_value_heads=fields.integer("num_key_value_heads", heads),
            head_dim=fields.integer("head_dim", hidden // heads),
            vocab_size=fields.integer("vocab_size"),
            block_size=fields.integer("block_size", minimum=2),
            mask_token_id=fields.integer("mask_token_id", minimum=0),
            target_layer_ids=fields.target_layers(layers),
            num_target_layers=fields.target_depth(),
            windows=windows,
            causal=fields.causality(windows),
            rope_theta=theta,
            rope_scaling=scaling,
            max_position_embeddings=fields.integer("max_position_embeddings", 40960),
            rms_norm_eps=fields.number("rms_norm_eps", 1e-6),
            attention_bias=fields.boolean("attention_bias", False),
        )
        if config.num_attention_heads % config.num_key_value_heads:
            raise fields.error("num_key_value_heads", "must divide num_attention_heads")
        if config.mask_token_id >= config.vocab_size:
            raise fields.error("mask_token_id", f"must be less than {config.vocab_size}")
        if config.head_dim % 2:
            raise fields.error("head_dim", "must be even for rotary positions")
        return config

    def check_fits(self, hidden_size: int, vocab_size: int, num_layers: int) -> None:
        """Raise `IncompatibleDrafterError` unless a target of this shape is the drafter's own."""
        pairs = [("hidden_size", self.hidden_size, hidden_size)]
        pairs.append(("vocab_size", self.vocab_size, vocab_size))
        if self.num_target_layers is not None:
            pairs.append(("num_target_layers", self.num_target_layers, num_layers))
        for name, ours, theirs in pairs:
            if ours != theirs:
                raise IncompatibleDrafterError(
                    f"The drafter was made for another target: its {name} is {ours}, "
                    f"this target has {theirs}."
                )
        if max(self.target_layer_ids) >= num_layers:
            raise IncompatibleDrafterError(
                f"The drafter was made for another target: it reads layer "
                f"{max(self.target_layer_ids)} of {num_layers}."
            )


class _Fields:
    """Typed look-ups in a raw config: `dflash_config` first, then the root."""

    def __init__(self, raw: Mapping[str, Any], where: str) -> None:
        nested = raw.get("dflash_config") or {}
        if not isinstance(nested, Mapping):
            raise ConfigError(f"{where}: dflash_config must be an object.")
        unknown = sorted(set(nested) - _NESTED_FIELDS)
        if unknown:
            raise ConfigError(
                f"{where}: dflash_config.{unknown[0]} is not understood by this version."
            )
        self.raw, self.nested, self.where = raw, nested, where

    def error(self, name: str, problem: str) -> ConfigError:
        place = f"dflash_config.{name}" if name in self.nested else name
        return ConfigError(f"{self.where}: {place} {problem}.")

    def get(self, name: str) -> Any:
        value = self.nested.get(name)
        return self.raw.get(name) if value is None else value

    def integer(self, name: str, default: int | None = None, minimum: int = 1) -> int:
        value = self.get(name)
        if value is None and default is not None:
            return default
        if value is None:
            raise self.error(name, "is missing")
        if isinstance(value, bool) or not isinstance(value, int) or value < minimum:
            raise self.error(name, f"must be a whole number of at least {minimum}, not {value!r}")
        return value

    def number(self, name: str, default: float) -> float:
        value = self.get(name)
        if value is None:
            return default
        if isinstance(value, bool) or not isinstance(value, int | float) or value <= 0:
            raise self.error(name, f"must be a positive number, not {value!r}")
        return float(value)

    def boolean(self, name: str, default: bool) -> bool:
        value = self.get(name)
        if value is None:
            return default
        if not isinstance(value, bool):
            raise self.error(name, f"must be true or false, not {value!r}")
        return value

    def check_architecture(self) -> None:
        names = self.raw.get("architectures") or ["DFlashDraftModel"]
        if names != ["DFlashDraftModel"]:
            raise self.error("architectures", f"{names} is not a DFlash drafter of this version")
        if self.raw.get("hidden_act", "silu") != "silu":
            raise self.error("hidden_act", f"must be silu, not {self.raw['hidden_act']!r}")

    def target_depth(self) -> int | None:
        depth = self.get("num_target_layers")
        return None if depth is None else self.integer("num_target_layers")

    def target_layers(self, layers: int) -> tuple[int, ...]:
        """The tapped layers; without a list, evenly spread as the DFlash authors' code does."""
        depth, taps = self.target_depth(), self.get("target_layer_ids")
        if taps is None:
            if depth is None:
                raise self.error("target_layer_ids", "is missing, and num_target_layers too")
            if layers == 1:
                return (depth // 2,)
            return tuple(round(1 + i * (depth - 4) / (layers - 1)) for i in range(layers))
        whole = isinstance(taps, list) and taps and all(type(t) is int and t >= 0 for t in taps)
        if not whole:
            raise self.error("target_layer_ids", f"must be a list of layer numbers, not {taps!r}")
        if depth is not None and max(taps) >= depth:
            raise self.error("target_layer_ids", f"names layer {max(taps)} of {depth}")
        return tuple(taps)

    def windows(self, layers: int) -> tuple[int | None, ...]:
        kinds = self.get("layer_types") or [FULL] * layers
        if not isinstance(kinds, list) or len(kinds) != layers:
            raise self.error("layer_types", f"must name the kind of each of the {layers} layers")
        for kind in kinds:
            if kind not in (FULL, SLIDING):
                raise self.error("layer_types", f"has the unknown kind {kind!r}")
        window = self.integer("sliding_window") if SLIDING in kinds else None
        return tuple(window if kind == SLIDING else None for kind in kinds)

    def causality(self, windows: tuple[int | None, ...]) -> tuple[bool, ...]:
        """An explicit flag rules every layer; without one, sliding layers are causal."""
        for name in ("causal", "is_causal"):
            if self.get(name) is not None:
                return (self.boolean(name, False),) * len(windows)
        return tuple(window is not None for window in windows)

    def rope(self) -> tuple[float, Mapping[str, Any] | None]:
        """The rope base and its scaling (None for the default kind)."""
        parameters = self.get("rope_parameters") or {}
        scaling = self.get("rope_scaling") or parameters
        if not isinstance(parameters, Mapping) or not isinstance(scaling, Mapping):
            raise self.error("rope_parameters", "must be an object")
        theta = parameters.get("rope_theta", self.get("rope_theta"))
        theta = 10000.0 if theta is None else theta
        if isinstance(theta, bool) or not isinstance(theta, int | float) or theta <= 0:
            raise self.error("rope_theta", f"must be a positive number, not {theta!r}")
        kind = scaling.get("rope_type") or scaling.get("type") or "default"
        if kind not in ("default", "linear", "yarn"):
            raise self.error("rope_scaling", f"has the unknown kind {kind!r}")
        if kind != "default" and not isinstance(scaling.get("factor"), int | float):
            raise self.error("rope_scaling", "has no numeric factor")
        return float(theta), (None if kind == "default" else dict(scaling))
