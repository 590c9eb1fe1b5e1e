"""Checks whether the weights of a model fit into memory."""

from __future__ import annotations

import re
import sys

from ..errors import NotEnoughMemoryError
from ..machine.facts import GB, memory_bytes, usable_bytes
from .quantization import Quantization

YES = "yes"
NO = "no"
ON_MAC = sys.platform == "darwin"
WHETHER = f"fits this {'Mac' if ON_MAC else 'machine'}"
# Names of quantized conversions: Qwen3-8B-4bit, gpt-oss-20b-MXFP4-Q8.
_QUANTIZED = re.compile(r"-(\d[_-]?bits?|q\d|mxfp\d|nvfp4|fp8|awq|dwq)\b")


def check_memory(name: str, needed: int, in_4_bits: int | None = None) -> None:
    """Raise `NotEnoughMemoryError` if the weights do not fit into the usable memory.

    Args:
        name: the name of the model, for the message.
        needed: the size of the weights in bytes.
        in_4_bits: their size if they were quantized to 4 bits; None if they cannot be.
    """
    limit = usable_bytes()
    remedy = "choose a smaller model or one in fewer bits"
    if needed <= limit:
        return
    if in_4_bits is not None:
        even = "" if in_4_bits <= limit else "even "
        remedy = f"{even}quantized to 4 bits they would take {in_4_bits / GB:.1f} GB"
    has = "this machine has" if limit == memory_bytes() else "the GPU may use"
    raise NotEnoughMemoryError(
        f"{name}: the weights take {needed / GB:.1f} GB, {has} {limit / GB:.1f} GB; {remedy}."
    )


def fits(
    size: float, quantized: bool = False, other_bytes: float = 0.0, *, mac: bool = ON_MAC
) -> str:
    """Whether a target fits: "yes", "no", or the option that it needs ("with --target-bits 8").

    The limit is the one that loading enforces. On a CPU, unquantized weights are loaded as f32.

    Args:
        size: the size of the stored weights in bytes.
        quantized: whether they are already quantized; otherwise each takes two bytes.
        other_bytes: bytes that a drafter and the context need.
        mac: whether the target runs on a Mac.
    """
    limit = usable_bytes() - other_bytes
    growth = 1 if quantized or mac else 2  # on a CPU, two bytes become four
    if size * growth <= limit:
        return YES
    if quantized:
        return NO
    for bits in (8, 4):  # of size / 2 weights
        if Quantization(bits, 64).quantized_bytes(1) * size / 2 <= limit:
            return f"with --target-bits {bits}"
    return NO


def fits_here(size: float, quantized: bool = False, other_bytes: float = 0.0) -> str:
    """A phrase for messages that says whether a target of this size fits this machine."""
    return f"{WHETHER}: {fits(size, quantized, other_bytes)}"


def looks_quantized(name: str) -> bool:
    """Whether the name of a model that is not downloaded says that it is quantized."""
    return _QUANTIZED.search(name.lower()) is not None
