"""Quantizing weights on load: bit widths, group sizes, modes and their memory."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, NamedTuple

from ..errors import ConfigError, SettingsError
from ..validation import brief, is_integer

if TYPE_CHECKING:
    import mlx.nn as nn


class _Mode(NamedTuple):
    """What a mode of `mx.quantize` allows.

    Attributes:
        bits: the bits of a weight.
        group_sizes: how many weights share a scale; the default comes first.
        group_bytes: bytes of the scale, and the bias if there is one, of a group.
    """

    bits: tuple[int, ...]
    group_sizes: tuple[int, ...]
    group_bytes: int


_MODES = {
    "affine": _Mode((4, 8), (64, 32, 128), 4),  # a scale and a bias in half precision
    "mxfp4": _Mode((4,), (32,), 1),
    "mxfp8": _Mode((8,), (32,), 1),
    "nvfp4": _Mode((4,), (16,), 1),
}
# A drafter with more parameters is loaded in 4 bits if its target is quantized.
LARGE_DRAFTER = 10**9
# Suffixes of tensor names that only packed weights have, in any library's format.
_PACKED_SUFFIXES = (
    ".qweight",
    ".scales",
    "weight_scale",
    "weight_packed",
    "weight_scale_inv",
    "absmax",
)
_PLAIN = {"F64", "F32", "F16", "BF16"}
_MODELOPT_ALGORITHM = "NVFP4"


def read_modelopt(content: Mapping[str, Any], file: object) -> dict[str, Any] | None:
    """Convert a hf_quant_config.json of NVIDIA's ModelOpt to a `quantization_config`.

    The file has the form {"producer", "quantization": {"quant_algo", ...}}. Returns None if it
    names no algorithm: the weights are plain then. Raises `ConfigError` for an algorithm other than
    NVFP4.
    """
    settings = content.get("quantization", content)
    if not isinstance(settings, Mapping) or "quant_algo" not in settings:
        raise ConfigError(f"{file}: there is no quantization.quant_algo in it.")
    algorithm = settings["quant_algo"]
    if algorithm is None:
        return None
    if algorithm != _MODELOPT_ALGORITHM:
        raise ConfigError(
            f"{file}: quant_algo is {brief(algorithm)}; only {_MODELOPT_ALGORITHM} can be loaded."
        )
    return {"quant_method": "modelopt", **settings}


def are_plain(tensors: Mapping[str, str]) -> bool:
    """Whether weights are plain floats. `tensors` has safetensors' types by tensor names."""
    packed = any(name.endswith(_PACKED_SUFFIXES) for name in tensors)
    return bool(tensors) and not packed and set(tensors.values()) <= _PLAIN


def is_quantized(config: Mapping[str, Any]) -> bool:
    """Whether a config.json says that weights are quantized, also once they are loaded."""
    return "quantization" in config or ("quantization_config" in config and not is_fp8(config))


def is_fp8(config: Mapping[str, Any]) -> bool:
    """Whether a config.json says that weights are 8-bit floats, which become 16-bit ones."""
    stored = config.get("quantization_config")
    if not isinstance(stored, dict) or stored.get("quant_method") != "fp8":
        return False
    # Blocks of 32 whose scales are powers of two are MXFP8, which MLX computes with.
    return stored.get("scale_fmt") != "ue8m0" or stored.get("weight_block_size") != [32, 32]


def stored_quantization(config: Mapping[str, Any]) -> Quantization | None:
    """How mlx-lm quantized the weights of a config.json; None if it did not."""
    stored = config.get("quantization")
    if not isinstance(stored, dict) or not {"bits", "group_size"} <= stored.keys():
        return None
    return Quantization(stored["bits"], stored["group_size"], stored.get("mode", "affine"))


def stored_mode(bits: int, group_size: int, has_byte_scales: bool) -> str:
    """The mode of stored weights. Only "affine" has scales that are floats, not bytes."""
    if not has_byte_scales:
        return "affine"
    for name, mode in _MODES.items():
        if name != "affine" and bits in mode.bits and group_size in mode.group_sizes:
            return name
    return "affine"


@dataclass(frozen=True)
class Quantization:
    """How weights are quantized on load, in the terms of MLX (`mx.quantize`)."""

    bits: int
    group_size: int
    mode: str = "affine"

    @classmethod
    def of(
        cls, bits: int | None, mode: str = "affine", group_size: int | None = None
    ) -> Quantization | None:
        """Check the settings. Returns None if `bits` is None. Raises `SettingsError`."""
        if bits is None:
            return None
        if not isinstance(mode, str) or mode not in _MODES:
            raise SettingsError(f"Quantization modes are {', '.join(_MODES)}, not {brief(mode)}.")
        allowed_bits = _MODES[mode].bits
        if not is_integer(bits) or bits not in allowed_bits:
            raise SettingsError(
                f"Mode {mode} quantizes to {_either(allowed_bits)} bits, not {brief(bits)}."
            )
        allowed_sizes = _MODES[mode].group_sizes
        if group_size is None:
            group_size = allowed_sizes[0]
        if not is_integer(group_size) or group_size not in allowed_sizes:
            raise SettingsError(
                f"Mode {mode} has groups of {_either(allowed_sizes)} weights, not "
                f"{brief(group_size)}."
            )
        return cls(int(bits), int(group_size), mode)

    def apply(self, model: nn.Module) -> None:
        """Quantize a model in place, lazily, respecting its own `quant_predicate`."""
        import mlx.nn as nn

        model_predicate = getattr(model, "quant_predicate", None)

        def choose(path: str, module: nn.Module) -> bool | dict[str, Any]:
            if not hasattr(module, "to_quantized"):
                return False
            choice = True if model_predicate is None else model_predicate(path, module)
            group_size = self.group_size
            if isinstance(choice, dict):
                group_size = choice.get("group_size") or self.group_size
            # Rows that do not divide into groups stay as they are.
            divides = module.weight.shape[-1] % group_size == 0
            return choice if divides else False

        nn.quantize(model, self.group_size, self.bits, mode=self.mode, class_predicate=choose)

    def quantized_bytes(self, weights: float) -> float:
        """Bytes that this number of quantized weights takes."""
        return weights * (self.bits / 8 + _MODES[self.mode].group_bytes / self.group_size)


def _either(numbers: Sequence[int]) -> str:
    """Write alternatives in words, such as "32 or 64"."""
    return " or ".join(map(str, sorted(numbers)))
