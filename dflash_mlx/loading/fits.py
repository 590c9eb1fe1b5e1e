"""Whether a model's weights fit into this machine, known from their size before a download."""

from __future__ import annotations

import re
import sys

from .quantization import Quantization
from .weights import machine_memory

YES, NO = "yes", "no"
STORED = 2  # bytes a weight, as published
# How conversions say that they are quantized: Qwen3-8B-4bit, gpt-oss-20b-MXFP4-Q8.
_QUANTIZED = re.compile(r"-(\d[_-]?bits?|q\d|mxfp\d|nvfp4|fp8|awq|dwq)\b")
ON_MAC = sys.platform == "darwin"
WHETHER = f"fits this {'Mac' if ON_MAC else 'machine'}"


def fits(size: float, quantized: bool = False, limit: int | None = None, mac: bool = ON_MAC) -> str:
    """Say "yes", "no", or the option with which a target fits: "with --target-bits 8".

    The limit is that of loading: `NotEnoughMemoryError` comes for weights above it. Off the Mac
    they compute on a CPU, in f32, unless they are quantized.

    Args:
        size: bytes of the weights, as they are stored.
        quantized: whether they are quantized already; else they have two bytes each.
        limit: bytes of memory, None for this machine's.
        mac: whether they are to run on a Mac.
    """
    limit = machine_memory() if limit is None else limit
    if size * (1 if quantized or mac else 2) <= limit:
        return YES
    for bits in () if quantized else (8, 4):
        if Quantization(bits, 64).bytes_of(1) * size / STORED <= limit:
            return f"with --target-bits {bits}"
    return NO


def fits_here(size: float, quantized: bool = False) -> str:
    """The same in words, for this machine."""
    return f"{WHETHER}: {fits(size, quantized)}"


def looks_quantized(name: str) -> bool:
    """Whether a model's name says so; its config does, but that is on the hub."""
    return _QUANTIZED.search(name.lower()) is not None
