"""What was timed and checked on this machine: which kernel runs, at how many rows.

`autotune` times whole verifies when a model is first loaded here. What won, and which
launches gave what their references give, is kept in one small file per machine, macOS, MLX and text
of our kernels. What was not timed is MLX's.
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

Rows = Mapping[str, frozenset[int]]  # the rows at which ours run, by form
NONE: frozenset[int] = frozenset()

WIDEST = 16  # rows of a tile, and of the widest chain
ROWS = (1, 2, 3, 4, 6, 8, 12, 16)  # that are timed
DEPTHS = (1024, 4096)  # keys up to which attention was timed behind no context, and behind one


def attention_rows(rows: Rows, key: str, depth: int) -> frozenset[int]:
    """The queries for which our attention runs, over `depth` keys. `key`: of `attention_key`."""
    near, far = DEPTHS
    return rows.get(key_at(key, near if depth <= near else far), NONE)


def key_at(key: str, depth: int) -> str:
    """The name of attention over so many keys."""
    return f"{key} at {depth}"


def chosen(won: Container[int], most: int = WIDEST) -> frozenset[int]:
    """All rows at which ours run, where it `won` at these of `ROWS`.

    Other numbers of rows are decided by the next one in `ROWS`, and more than 16 by 16.
    """

    def runs(rows: int) -> bool:
        return next((each for each in ROWS if rows <= each), WIDEST) in won

    return frozenset(filter(runs, range(1, most + 1)))


def has_tensor_units(device: Mapping[str, Any], macos: str) -> bool:
    """Whether a GPU multiplies bfloat16 by 4 bits in tensor units: an M5's, from macOS 26.4 on.

    The architecture is asked as in MLX's is_nax_available (mlx/backend/metal/device.cpp). 4-bit
    tensors came with macOS 26.4. MLX compiles custom kernels as Metal 4.0 or later there.

    Args:
        device: as of `mx.device_info`.
        macos: the version, "26.4"; "" elsewhere.
    """
    found = re.fullmatch(r"applegpu_g(\d+)(\w)", str(device.get("architecture")))
    if found is None or int(found[1]) < (18 if found[2] == "p" else 17):
        return False
    return tuple(map(int, re.findall(r"\d+", macos)[:2])) >= (26, 4)


def tensor_key(key: str) -> str:
    """The name of weights on tensor units. In `Rows`, they run on those at all rows of `key`."""
    return f"{key} on tensor units"


def is_large(chip: str) -> bool:
    """Whether a chip has so many cores that products need smaller tiles."""
    return bool({"Max", "Ultra"} & set(chip.split()))


def read_choices(forms: Iterable[str]) -> Rows | None:
    """What was timed here for a model with these forms; None where nothing was."""
    try:
        rows = _read()["timed"][_model(forms)]
        return {key: frozenset(map(int, of)) for key, of in rows.items()}
    except (ValueError, KeyError, TypeError, AttributeError):
        return None  # never timed, or not readable


def store_choices(forms: Iterable[str], rows: Rows) -> None:
    """Keep the choices, if the folder can be written; else the next load times again."""
    _add("timed", {_model(forms): {key: sorted(of) for key, of in rows.items()}})


def read_proofs() -> set[str]:
    """The launches that passed their check here."""
    try:
        return set(map(str, _read()["proven"]))
    except (KeyError, TypeError):
        return set()


def store_proofs(proven: Collection[str]) -> None:
    """Keep these, too."""
    _add("proven", dict.fromkeys(proven, True))


def _model(forms: Iterable[str]) -> str:
    """A short name of a model with these forms."""
    return hashlib.sha256(repr(sorted(Counter(forms).items())).encode()).hexdigest()[:16]


def _read() -> dict[str, Any]:
    """The file of this machine; an empty one where there is none."""
    identity, path = _identity()
    with suppress(OSError, ValueError):
        content = json.loads(path.read_text(encoding="utf-8"))
        if isinstance(content, dict) and content.get("of") == identity:
            return content
    return {"of": identity}


def _add(part: str, entries: Mapping[str, Any]) -> None:
    """Add entries to a part of the file, beside what other processes have written."""
    path = _identity()[1]
    content = _read()
    content[part] = {**content.get(part, {}), **entries}
    with suppress(OSError):
        path.parent.mkdir(parents=True, exist_ok=True)
        whole = path.with_suffix(f".{os.getpid()}")
        whole.write_text(json.dumps(content), encoding="utf-8")
        whole.replace(path)


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
        "macos": platform.mac_ver()[0],  # its compiler, and what it offers of tensor units
        "mlx": version("mlx"),
        "kernels": hashlib.sha256("".join(sources).encode()).hexdigest(),
    }
    name = hashlib.sha256(repr(identity).encode()).hexdigest()[:16]
    return identity, cache_folder("kernels") / f"{name}.json"
