"""What a drafter's folder holds, and in how many bits it loads."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

from ..drafter.packagings import ARCHITECTURES, DRAFTER_FIELDS
from ..targets.internals import classes_of
from ..validation import read_json
from .checks import read_header
from .quantization import Quantization, is_quantized

LARGE_DRAFTER = 10**9  # parameters


def is_language_model(config: Mapping[str, Any]) -> bool:
    """Whether a config.json is that of a model which mlx-lm loads, and not a drafter's."""
    names = config.get("architectures") or ()
    if DRAFTER_FIELDS & config.keys() or any(name in ARCHITECTURES for name in names):
        return False
    with suppress(KeyError, TypeError, ValueError):  # mlx-lm's, for what it does not know
        return classes_of(dict(config)) is not None
    return False


def quantization_beside(folder: Path, stored: Sequence[Path]) -> Quantization | None:
    """4 bits for a large drafter beside a quantized target: drafts get cheaper, not worse.

    None for a small one, and for one that is quantized already.
    """
    sizes = (tensor["shape"] for file in stored for tensor in read_header(file).values())
    if holds_quantized(folder) or sum(map(math.prod, sizes)) <= LARGE_DRAFTER:
        return None
    return Quantization(4, 64)


def holds_quantized(folder: Path) -> bool:
    """Whether a model's folder says that its weights are quantized."""
    return is_quantized(read_json(folder / "config.json"))
