"""What was timed and checked on this machine: which kernel runs, at how many rows.

`autotune` times whole verification forwards when a model is first loaded here. What won, and which
launches returned what their references return, is kept in one small file per machine, macOS, MLX
and text of our kernels. What was not timed runs on MLX's kernels.
"""

from __future__ import annotations

import hashlib
import json
import os
import platform
import re
from collections import Counter
from collections.abc import Collection, Container, Iterable, Mapping
from contextlib import suppress
from importlib.metadata import version
from importlib.resources import files
from pathlib import Path
from typing import Any

import mlx.core as mx

from ..machine.facts import cache_folder

# For each form of weights or attention, the numbers of rows at which our kernel runs.
Rows = Mapping[str, frozenset[int]]
NONE: frozenset[int] = frozenset()

# The number of rows in a tile, and in the widest chain.
WIDEST = 16
# The numbers of rows that are timed.
ROWS = (1, 2, 3, 4, 6, 8, 12, 16)
# Attention is timed on an empty cache, and that result is used up to the first number of keys. It
# is timed again with the second number of keys, and that result is used beyond.
DEPTHS = (1024, 4096)


def attention_rows(rows: Rows, key: str, depth: int) -> frozenset[int]:
    """The numbers of queries for which our attention runs.

    Args:
        rows: the choices of the model.
        key: the form of attention, from `attention_key`.
        depth: the number of keys.
    """
    short, long = DEPTHS
    return rows.get(key_at(key, short if depth <= short else long), NONE)


def key_at(key: str, depth: int) -> str:
    """The key of a form of attention over `depth` keys."""
    return f"{key} at {depth}"


def chosen(won: Container[int], most: int = WIDEST) -> frozenset[int]:
    """The numbers of rows at which our kernel runs.

    A number that was not timed is decided by the next larger one in `ROWS`, or by the largest.

    Args:
        won: the numbers in `ROWS` at which our kernel was faster.
        most: the largest number of rows.
    """

    def decided_by(rows: int) -> int:
        return next((timed for timed in ROWS if rows <= timed), WIDEST)

    return frozenset(rows for rows in range(1, most + 1) if decided_by(rows) in won)


def has_tensor_units(device: Mapping[str, Any], macos: str) -> bool:
    """Whether a GPU multiplies bfloat16 by 4 bits in tensor units: an M5's, from macOS 26.4 on.

    The architecture is recognized as in MLX's is_nax_available (mlx/backend/metal/device.cpp).
    4-bit tensors came with macOS 26.4, where MLX compiles custom kernels as Metal 4.0 or later.

    Args:
        device: the result of `mx.device_info`.
        macos: the version of macOS ("26.4"), or "" on another system.
    """
    match = re.fullmatch(r"applegpu_g(\d+)(\w)", str(device.get("architecture")))
    if match is None:
        return False
    generation = int(match[1])
    is_phone = match[2] == "p"
    if generation < (18 if is_phone else 17):
        return False
    return tuple(map(int, re.findall(r"\d+", macos)[:2])) >= (26, 4)


def tensor_key(key: str) -> str:
    """The key of weights on tensor units. In `Rows`, it applies to all rows of `key`."""
    return f"{key} on tensor units"


def is_large(chip: str) -> bool:
    """Whether a chip has so many cores that products need smaller tiles."""
    return bool({"Max", "Ultra"} & set(chip.split()))


def read_choices(forms: Iterable[str]) -> Rows | None:
    """The choices for a model with these forms; None if it was not timed on this machine."""
    try:
        choices = _read()["timed"][_model(forms)]
        return {key: frozenset(map(int, rows)) for key, rows in choices.items()}
    except (ValueError, KeyError, TypeError, AttributeError):
        return None  # never timed, or not readable


def store_choices(forms: Iterable[str], rows: Rows) -> None:
    """Save the choices. If the folder cannot be written, the next load times again."""
    choices = {key: sorted(numbers) for key, numbers in rows.items()}
    _add("timed", {_model(forms): choices})


def read_passed_checks() -> set[str]:
    """The keys of the checks that passed on this machine."""
    try:
        return set(map(str, _read()["proven"]))
    except (KeyError, TypeError):
        return set()


def store_passed_checks(passed: Collection[str]) -> None:
    """Save the keys of checks that passed."""
    _add("proven", dict.fromkeys(passed, True))


def _model(forms: Iterable[str]) -> str:
    """A short name of a model with these forms."""
    return hashlib.sha256(repr(sorted(Counter(forms).items())).encode()).hexdigest()[:16]


def _read() -> dict[str, Any]:
    """The content of this machine's file, or an empty one if there is none."""
    identity, path = _identity()
    with suppress(OSError, ValueError):
        content = json.loads(path.read_text(encoding="utf-8"))
        if isinstance(content, dict) and content.get("of") == identity:
            return content
    return {"of": identity}


def _add(part: str, entries: Mapping[str, Any]) -> None:
    """Add entries to a part of the file, and keep what other processes have written."""
    path = _identity()[1]
    content = _read()
    content[part] = {**content.get(part, {}), **entries}
    with suppress(OSError):
        path.parent.mkdir(parents=True, exist_ok=True)
        unfinished = path.with_suffix(f".{os.getpid()}")
        unfinished.write_text(json.dumps(content), encoding="utf-8")
        unfinished.replace(path)


def _identity() -> tuple[dict[str, Any], Path]:
    """What timings and checks depend on, and their file."""
    sources = sorted(
        path.read_text("utf-8")
        for path in files("dflash_mlx.metal").iterdir()
        if path.name.endswith((".metal", ".h"))
    )
    device = mx.device_info()
    identity = {
        "machine": [str(device.get(name)) for name in ("device_name", "memory_size")],
        "macos": platform.mac_ver()[0],  # decides the compiler, and the use of tensor units
        "mlx": version("mlx"),
        "kernels": hashlib.sha256("".join(sources).encode()).hexdigest(),
    }
    name = hashlib.sha256(repr(identity).encode()).hexdigest()[:16]
    return identity, cache_folder("kernels") / f"{name}.json"
