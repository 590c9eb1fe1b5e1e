"""A drafter's config.json, in every published layout, resolved into one validated form.

Published drafters spell the same fact in several places: the block size at the root or nested in
`dflash_config`, the rope base at the root or in `rope_parameters`, causality as `is_causal` or
`causal`. Reading only one of them is how other ports ran drafters at the wrong block size without
a word. Here a value inside `dflash_config` wins over the root, every decision remembers the place
it was read from, and what is missing or not understood is a `ConfigError` that names the field.
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from dataclasses import dataclass, field, fields
from pathlib import Path
from typing import Any

from ..errors import ConfigError, IncompatibleDrafterError

FULL, SLIDING = "full_attention", "sliding_attention"
DFLASH, DFLASH2 = "DFlashDraftModel", "DFlash2DraftModel"

# Root fields of the Qwen3 family that change the network: the only value this package computes.
_FIXED = {"hidden_act": "silu", "mlp_bias": False, "partial_rotary_factor": 1, "fc_norm": False}

# The fields of rope_parameters or rope_scaling, by kind: those that must be there, those that may.
_ORIGINAL = "original_max_position_embeddings"
_ROPE_FIELDS: dict[str, tuple[tuple[str, ...], tuple[str, ...]]] = {
    "default": ((), ()),
    "linear": (("factor",), ()),
    "llama3": (("factor", "low_freq_factor", "high_freq_factor", _ORIGINAL), ()),
    "yarn": (
        ("factor",),
        (_ORIGINAL, "beta_fast", "beta_slow", "mscale", "mscale_all_dim")
        + ("attention_factor", "truncate"),
    ),
}


@dataclass(frozen=True)
class Decision:
    """One resolved field of a config: what it is and where that was read or derived."""

    field: str
    value: Any
    source: str


def read_json(path: str | Path) -> dict[str, Any]:
    """The JSON object in a file. Raises `ConfigError`."""
    try:
        content = json.loads(Path(path).read_text(encoding="utf-8"))
    except OSError as error:
        raise ConfigError(f"{path}: cannot be read ({error.strerror}).") from error
    except ValueError as error:
        raise ConfigError(f"{path}: not valid JSON ({error}).") from error
    if not isinstance(content, dict):
        raise ConfigError(f"{path}: a JSON object is expected.")
    return content


@dataclass(frozen=True)
class DraftConfig:
    """The resolved configuration of a DFlash (arXiv 2602.06036) or DFlash2 drafter."""

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
    causal: tuple[bool, ...]  # per layer: are a block's rows blind to later rows of the block?
    rope_theta: float = 10000.0
    rope_scaling: Mapping[str, Any] | None = None  # None, or {"rope_type": "linear" | "yarn", ...}
    max_position_embeddings: int = 40960
    rms_norm_eps: float = 1e-6
    attention_bias: bool = False
    tie_word_embeddings: bool = False  # of a drafter with its own embedding: its head too
    input_embedding_scale: float = 1.0  # on the embeddings of a block
    output_multiplier: float = 1.0  # on the head's logits
    final_logit_softcapping: float | None = None  # then cap * tanh(logits / cap)
    conv_kernel_size: int = 0  # this and the three below: of DFlash2, 0 in a DFlash drafter
    conv_group_size: int = 0  # channels that share a dynamic kernel
    selector_rank: int = 0
    selector_top_k: int = 0  # candidates per drafted token
    quantization: Mapping[str, Any] | None = None  # of weights stored quantized, as mlx-lm says it
    sources: Mapping[str, str] = field(default_factory=dict, compare=False, repr=False)

    @property
    def is_dflash2(self) -> bool:
        """Whether the drafter has DFlash2's convolutions and candidate selector."""
        return self.conv_kernel_size > 0

    @classmethod
    def from_file(cls, path: str | Path) -> DraftConfig:
        """Read and resolve a config.json. Raises `ConfigError`."""
        return cls.from_dict(read_json(path), where=str(path))

    @classmethod
    def from_dict(cls, raw: Mapping[str, Any], where: str = "drafter config") -> DraftConfig:
        """Resolve a parsed config.json; `where` starts the error messages. Raises `ConfigError`."""
        read = _Reader(raw, where)
        architecture = read.architecture()
        layers = read.integer("num_hidden_layers")
        heads = read.integer("num_attention_heads")
        hidden = read.integer("hidden_size")
        vocabulary = read.integer("vocab_size")
        read.check_fixed({"target_hidden_size": hidden, "draft_vocab_size": vocabulary})
        positions = read.integer("max_position_embeddings", 40960)
        windows = read.windows(layers)
        config = cls(
            hidden_size=hidden,
            num_hidden_layers=layers,
            intermediate_size=read.integer("intermediate_size"),
            num_attention_heads=heads,
            num_key_value_heads=read.integer("num_key_value_heads", heads, divides=heads),
            head_dim=read.integer("head_dim", max(hidden // heads, 1)),
            vocab_size=vocabulary,
            block_size=read.integer("block_size", minimum=2),
            mask_token_id=read.integer("mask_token_id", minimum=0, below=vocabulary),
            target_layer_ids=read.target_layers(layers),
            num_target_layers=read.target_depth(),
            windows=windows,
            causal=read.causality(windows),
            rope_theta=read.rope_theta(),
            rope_scaling=read.rope_scaling(positions),
            max_position_embeddings=positions,
            rms_norm_eps=read.number("rms_norm_eps", 1e-6),
            attention_bias=read.boolean("attention_bias"),
            tie_word_embeddings=read.boolean("tie_word_embeddings"),
            input_embedding_scale=read.number("input_embedding_scale", 1.0),
            output_multiplier=read.number("output_multiplier", 1.0),
            final_logit_softcapping=read.optional_number("final_logit_softcapping"),
            **(read.dflash2(hidden, vocabulary) if architecture == DFLASH2 else {}),
            quantization=read.quantization(),
            sources=read.sources,
        )
        if config.head_dim % 2:
            raise read.error("head_dim", "must be even for rotary positions")
        read.check_all_read()
        return config

    def describe(self) -> list[Decision]:
        """Every resolved field with the place it came from, for people to check."""
        names = [item.name for item in fields(self) if item.name != "sources"]
        return [
            Decision(name, getattr(self, name), self.sources.get(name, "default")) for name in names
        ]

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


class _Reader:
    """Typed look-ups in a raw config, `dflash_config` first and then the root.

    `sources` collects the place each field was read from.
    """

    def __init__(self, raw: Mapping[str, Any], where: str) -> None:
        self.raw, self.where = raw, where
        self.sources: dict[str, str] = {}
        self.nested: Mapping[str, Any] = {}
        self.nested = self.mapping("dflash_config")

    def error(self, name: str, problem: str) -> ConfigError:
        place = f"dflash_config.{name}" if name in self.nested else name
        return ConfigError(f"{self.where}: {place} {problem}.")

    def get(self, name: str) -> Any:
        for prefix, values in (("dflash_config.", self.nested), ("", self.raw)):
            if values.get(name) is not None:
                self.sources[name] = prefix + name
                return values[name]
        self.sources.setdefault(name, "default")
        return None

    def mapping(self, name: str) -> Mapping[str, Any]:
        value = self.get(name) or {}
        if not isinstance(value, Mapping):
            raise self.error(name, "must be an object")
        return value

    def integer(
        self,
        name: str,
        default: int | None = None,
        minimum: int = 1,
        below: int | None = None,
        divides: int | None = None,
    ) -> int:
        """A whole number of at least `minimum`, below `below`, that divides `divides`.

        Raises `ConfigError`, naming the field.
        """
        value = self.get(name)
        if value is None:
            value = default
        if value is None:
            raise self.error(name, "is missing")
        if type(value) is not int or value < minimum:
            raise self.error(name, f"must be a whole number of at least {minimum}, not {value!r}")
        if below is not None and value >= below:
            raise self.error(name, f"must be below {below}, not {value}")
        if divides is not None and divides % value:
            raise self.error(name, f"must divide {divides}, {value} does not")
        return value

    def number(self, name: str, default: float) -> float:
        value = self.optional_number(name)
        return default if value is None else value

    def optional_number(self, name: str) -> float | None:
        value = self.get(name)
        if value is not None and not _is_positive(value):
            raise self.error(name, f"must be a positive number, not {value!r}")
        return None if value is None else float(value)

    def boolean(self, name: str) -> bool:
        value = self.get(name)
        if value is not None and not isinstance(value, bool):
            raise self.error(name, f"must be true or false, not {value!r}")
        return bool(value)

    def architecture(self) -> str:
        names = self.get("architectures") or [DFLASH]
        if names not in ([DFLASH], [DFLASH2]):
            raise self.error("architectures", f"{names} is not a DFlash or DFlash2 drafter")
        return str(names[0])

    def check_fixed(self, more: Mapping[str, Any]) -> None:
        """Refuse what would need another network: fields that are there with another value."""
        for name, expected in {**_FIXED, **more}.items():
            value = self.get(name)
            if value is not None and value != expected:
                raise self.error(name, f"must be {expected!r}, not {value!r}")

    def check_all_read(self) -> None:
        """Refuse a nested field that nothing has asked for: it would be ignored silently."""
        for name, value in self.nested.items():
            if value is not None and name not in self.sources:
                raise self.error(name, "is not understood by this version")

    def dflash2(self, hidden: int, vocabulary: int) -> dict[str, int]:
        """The sizes of DFlash2's convolutions and of its candidate selector."""
        return {
            "conv_kernel_size": self.integer("conv_kernel_size"),
            "conv_group_size": self.integer("conv_group_size", divides=hidden),
            "selector_rank": self.integer("selector_rank"),
            "selector_top_k": self.integer("selector_top_k", below=vocabulary + 1),
        }

    def quantization(self) -> Mapping[str, Any] | None:
        """How mlx-lm quantized the stored weights (its converters write both spellings)."""
        name = "quantization" if self.get("quantization") else "quantization_config"
        stored = self.mapping(name)
        sizes = [type(stored.get(size)) is int for size in ("bits", "group_size")]
        if stored and ("quant_method" in stored or not all(sizes)):
            raise self.error(name, "is not one of mlx-lm's, with bits and group_size")
        self.sources["quantization"] = name if stored else "default"
        return stored or None

    def target_depth(self) -> int | None:
        depth = self.get("num_target_layers")
        return None if depth is None else self.integer("num_target_layers")

    def target_layers(self, layers: int) -> tuple[int, ...]:
        """The tapped layers; without a list, evenly spread as the DFlash authors' code does."""
        depth, taps = self.target_depth(), self.get("target_layer_ids")
        if taps is None:
            if depth is None:
                raise self.error("target_layer_ids", "is missing, and num_target_layers too")
            self.sources["target_layer_ids"] = "derived from num_target_layers, num_hidden_layers"
            steps = max(layers - 1, 1)
            spread = [round(1 + i * (depth - 4) / steps) for i in range(layers)]
            taps = spread if layers > 1 else [depth // 2]
        if not (isinstance(taps, list) and taps and all(type(t) is int and t >= 0 for t in taps)):
            raise self.error("target_layer_ids", f"must be a list of layer numbers, not {taps!r}")
        if depth is not None and max(taps) >= depth:
            raise self.error("target_layer_ids", f"names layer {max(taps)} of {depth}")
        return tuple(taps)

    def windows(self, layers: int) -> tuple[int | None, ...]:
        """Each layer's window, from `layer_types` or, in older files, `use_sliding_window`."""
        kinds = self.get("layer_types")
        source = self.sources["layer_types"]
        if kinds is None:
            kinds = [FULL] * layers
            if self.boolean("use_sliding_window"):
                # Transformers' own rule for Qwen3 files without a list.
                first = self.integer("max_window_layers", minimum=0)
                kinds = [SLIDING if layer >= first else FULL for layer in range(layers)]
                source = "derived from use_sliding_window, max_window_layers"
        if not isinstance(kinds, list) or len(kinds) != layers:
            raise self.error("layer_types", f"must name the kind of each of the {layers} layers")
        for kind in kinds:
            if kind not in (FULL, SLIDING):
                raise self.error("layer_types", f"has the unknown kind {kind!r}")
        window = self.integer("sliding_window") if SLIDING in kinds else None
        self.sources["windows"] = source if window is None else f"{source}, sliding_window"
        return tuple(window if kind == SLIDING else None for kind in kinds)

    def causality(self, windows: tuple[int | None, ...]) -> tuple[bool, ...]:
        """An explicit flag rules every layer; without one, sliding layers are causal."""
        for values in (self.nested, self.raw):
            flags = [name for name in ("causal", "is_causal") if values.get(name) is not None]
            if flags:
                causal = [self.boolean(name) for name in flags]
                if causal[0] != causal[-1]:
                    raise self.error("is_causal", "contradicts causal")
                self.sources["causal"] = self.sources[flags[0]]
                return (causal[0],) * len(windows)
        self.sources["causal"] = "rule: sliding layers are causal, full ones are not"
        return tuple(window is not None for window in windows)

    def rope_theta(self) -> float:
        """The base of the rotary frequencies; `rope_parameters` wins over the root."""
        theta = self.number("rope_theta", 10000.0)
        for name in ("rope_scaling", "rope_parameters"):
            value = self.mapping(name).get("rope_theta")
            if value is not None and not _is_positive(value):
                raise self.error(f"{name}.rope_theta", f"must be a positive number, not {value!r}")
            if value is not None:
                theta = float(value)
                self.sources["rope_theta"] = f"{name}.rope_theta"
        return theta

    def rope_scaling(self, positions: int) -> Mapping[str, Any] | None:
        """How the rotary frequencies are stretched, None for the default kind."""
        place = "rope_scaling" if self.mapping("rope_scaling") else "rope_parameters"
        values = {key: value for key, value in self.mapping(place).items() if value is not None}
        kind = values.pop("type", "default")
        kind = values.pop("rope_type", kind)
        if not isinstance(kind, str) or kind not in _ROPE_FIELDS:
            raise self.error(f"{place}.rope_type", f"has the unknown kind {kind!r}")
        values.pop("rope_theta", None)
        if values.pop("partial_rotary_factor", 1) != 1:
            raise self.error(f"{place}.partial_rotary_factor", "must be 1")
        required, optional = _ROPE_FIELDS[kind]
        for name in required:
            if name not in values:
                raise self.error(f"{place}.{name}", "is missing")
        for name, value in values.items():
            if name not in required + optional:
                raise self.error(f"{place}.{name}", f"is not understood for {kind} rope")
            if name == "truncate":
                if not isinstance(value, bool):
                    raise self.error(f"{place}.{name}", f"must be true or false, not {value!r}")
            elif not _is_positive(value) and not (value == 0 and name.startswith("mscale")):
                raise self.error(f"{place}.{name}", f"must be a positive number, not {value!r}")
        self.sources["rope_scaling"] = "default" if kind == "default" else place
        if kind == "yarn":
            values.setdefault(_ORIGINAL, positions)
        return None if kind == "default" else {"rope_type": kind, **values}


def _is_positive(value: Any) -> bool:
    number = isinstance(value, int | float) and not isinstance(value, bool)
    return number and math.isfinite(value) and value > 0
