"""Quantizing weights on load: bit widths, group sizes, modes and their memory."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from ..errors import ConfigError, SettingsError
from ..validation import brief, is_integer

if TYPE_CHECKING:
    import mlx.nn as nn

# Per mode: bit widths, group sizes (the default first), and bytes of scales and biases per group.
_MODES: dict[str, tuple[tuple[int, ...], tuple[int, ...], int]] = {
    "affine": ((4, 8), (64, 32, 128), 4),  # a scale and a bias in half precision
    "mxfp4": ((4,), (32,), 1),
    "mxfp8": ((8,), (32,), 1),
    "nvfp4": ((4,), (16,), 1),
}
# A drafter with more parameters is loaded in 4 bits if its target is quantized.
LARGE_DRAFTER = 10**9


# The ends of the names of tensors that only packed weights have, in any library's form.
_OF_PACKED = (".qweight", ".scales", "weight_scale", "weight_packed", "weight_scale_inv", "absmax")
_PLAIN = {"F64", "F32", "F16", "BF16"}
_MODELOPT = "NVFP4"


def of_modelopt(content: Mapping[str, Any], file: object) -> dict[str, Any] | None:
    """The `quantization_config` that a hf_quant_config.json of NVIDIA's ModelOpt stands for.

    Its own form is {"producer", "quantization": {"quant_algo", ...}}; None if that names no
    algorithm, so the weights are plain. Raises `ConfigError` for one that is not read.
    """
    settings = content.get("quantization", content)
    if not isinstance(settings, Mapping) or "quant_algo" not in settings:
        raise ConfigError(f"{file}: there is no quantization.quant_algo in it.")
    algorithm = settings["quant_algo"]
    if algorithm is None:
        return None
    if algorithm != _MODELOPT:
        raise ConfigError(
            f"{file}: quant_algo is {brief(algorithm)}; of ModelOpt's, {_MODELOPT} is read."
        )
    return {"quant_method": "modelopt", **settings}


def are_plain(tensors: Mapping[str, str]) -> bool:
    """Whether weights are plain floats, by their names and safetensors' names of their types."""
    packed = any(name.endswith(_OF_PACKED) for name in tensors)
    return bool(tensors) and not packed and {*tensors.values()} <= _PLAIN


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


def mode_of(bits: int, group_size: int, bytes_as_scales: bool) -> str:
    """The mode of stored weights; "affine" has scales in floating point."""
    if not bytes_as_scales:
        return "affine"
    for mode, (widths, groups, _) in _MODES.items():
        if mode != "affine" and bits in widths and group_size in groups:
            return mode
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
        """Check the settings; None when `bits` is None. Raises `SettingsError`."""
        if bits is None:
            return None
        if not isinstance(mode, str) or mode not in _MODES:
            raise SettingsError(f"Quantization modes are {', '.join(_MODES)}, not {brief(mode)}.")
        widths, groups, _ = _MODES[mode]
        group_size = groups[0] if group_size is None else group_size
        for value, allowed, what in (
            (bits, widths, "quantizes to {} bits"),
            (group_size, groups, "has groups of {} weights"),
        ):
            if not is_integer(value) or value not in allowed:
                said = what.format(" or ".join(map(str, sorted(allowed))))
                raise SettingsError(f"Mode {mode} {said}, not {brief(value)}.")
        return cls(int(bits), int(group_size), mode)

    def apply(self, model: nn.Module) -> None:
        """Quantize a model in place, lazily, respecting its own `quant_predicate`."""
        import mlx.nn as nn

        model_predicate = getattr(model, "quant_predicate", None)

        def choose(path: str, module: nn.Module) -> bool | dict[str, Any]:
            if not hasattr(module, "to_quantized"):
                return False
            choice = True if model_predicate is None else model_predicate(path, module)
            group = choice.get("group_size") if isinstance(choice, dict) else self.group_size
            # Rows that do not divide into groups stay as they are.
            return choice if module.weight.shape[-1] % (group or self.group_size) == 0 else False

        nn.quantize(model, self.group_size, self.bits, mode=self.mode, class_predicate=choose)

    def bytes_of(self, weights: float) -> float:
        """Bytes that this number of quantized weights takes."""
        return weights * (self.bits / 8 + _MODES[self.mode][2] / self.group_size)
