"""A GGUF file as a folder that mlx-lm loads, made once and kept in the cache.

On a CPU the weights are unpacked to float32, for MLX's quantized products are slow there; elsewhere
they keep their bits. The folder appears whole or not at all. A conversion that was interrupted
goes on where it stopped, and one of a file that has changed since is made again.
"""

from __future__ import annotations

import fcntl
import hashlib
import json
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import mlx.core as mx
import numpy as np

from ...errors import OutputError, WeightsError
from ...machine.folders import cache_folder
from ...machine.saving import save_arrays
from ..checks import check_memory, check_safetensors, machine_memory
from . import tokenizer
from .config import ARCHITECTURES, read_config
from .header import Header, read_header
from .weights import ROPE_DIVISORS, check_tensors, convert, converted_bytes, quantization

FORM = 1  # of what is written: a higher number makes every folder anew
TENSORS_OF_A_FILE = 100
SPARE = 1 << 24  # bytes, for the tokenizer and the config
SOURCE = "source.json"  # says what a folder was made of


def converted(path: Path, unpack: bool, cache: Path | None = None) -> Path:
    """The folder of a GGUF file, converted now unless it was before.

    Args:
        path: the file.
        unpack: float32 weights instead of the file's own bits.
        cache: where folders are kept; None is this machine's cache folder.

    Raises:
        WeightsError, ConfigError: a file that is damaged, or not understood.
        NotEnoughMemoryError: the weights would not fit into this machine.
        OutputError: no room in the cache, or no permission.
    """
    path = path.resolve()
    header = read_header(path)
    name = hashlib.sha256(str(path).encode()).hexdigest()[:12]
    folder = (cache or cache_folder("gguf")) / f"{path.stem}-{name}{'-f32' if unpack else ''}"
    source = _source(path)
    try:
        with _alone(folder):
            if not _is_made_of(folder, source):
                _make(path, header, source, unpack, folder)
    except OSError as error:
        raise OutputError.because(folder, error) from error
    return folder


def config_of(path: Path) -> dict[str, Any]:
    """The config.json of a file whose weights keep their bits; only its header is read.

    Raises the errors of `converted` about files.
    """
    header = read_header(path)
    check_tensors(path, header.tensors)
    return _config(path, header, unpack=False)


def _source(path: Path) -> dict[str, Any]:
    """What tells one state of a file from another."""
    status = path.stat()
    return {"form": FORM, "file": str(path), "bytes": status.st_size, "changed": status.st_mtime_ns}


def _is_made_of(folder: Path, source: dict[str, Any]) -> bool:
    """Whether a folder holds a whole conversion of this very file."""
    try:
        if json.loads((folder / SOURCE).read_text(encoding="utf-8")) != source:
            return False
        check_safetensors(folder)
    except (OSError, ValueError, WeightsError):
        return False
    return all((folder / name).is_file() for name in ("config.json", "tokenizer.json"))


@contextmanager
def _alone(folder: Path) -> Iterator[None]:
    """One process at a time converts into a folder; the others wait, and find it made."""
    folder.parent.mkdir(parents=True, exist_ok=True)
    with folder.with_name(f"{folder.name}.lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        yield


def _make(path: Path, header: Header, source: dict[str, Any], unpack: bool, folder: Path) -> None:
    check_tensors(path, header.tensors)
    needed = converted_bytes(header.tensors, unpack)
    check_memory(str(path), needed, machine_memory(), [])
    part = folder.with_name(f"{folder.name}.part")
    if part.exists() and not _began_with(part, source):
        shutil.rmtree(part)
    part.mkdir(exist_ok=True)
    _check_room(part, needed)
    _write_json(part / SOURCE, source)
    config = _config(path, header, unpack)
    tokenizer.save(path, header.metadata, part)
    _write_json(part / "config.json", config)
    _write_weights(path, header, config, unpack, part)
    if _source(path) != source:
        raise WeightsError(f"{path}: it changed while it was read; try again.")
    if folder.exists():
        shutil.rmtree(folder)
    part.rename(folder)


def _check_room(part: Path, needed: int) -> None:
    """Raise `OutputError` unless the disk has room for what is not written yet."""
    needed += SPARE - sum(file.stat().st_size for file in part.iterdir())
    if (free := shutil.disk_usage(part).free) < needed:
        raise OutputError(
            f"{part}: {needed / 1e6:,.0f} MB are needed and {free / 1e6:,.0f} MB are free; "
            "make room, and the same command goes on."
        )


def _began_with(part: Path, source: dict[str, Any]) -> bool:
    """Whether an unfinished folder is of the same state of the same file."""
    try:
        return bool(json.loads((part / SOURCE).read_text(encoding="utf-8")) == source)
    except (OSError, ValueError):
        return False


def _config(path: Path, header: Header, unpack: bool) -> dict[str, Any]:
    divisors = None
    if ROPE_DIVISORS in header.tensors:
        tensor = header.tensors[ROPE_DIVISORS]
        if tensor.type != "F32":
            raise WeightsError(f"{path}: {ROPE_DIVISORS} is stored as {tensor.type}, not as F32.")
        divisors = np.fromfile(path, np.float32, tensor.size // 4, offset=tensor.start)
    names, rows = frozenset(header.tensors), header.tensors["token_embd.weight"].shape[0]
    config = read_config(path, header.metadata, names, rows, divisors)
    config["eos_token_id"] = tokenizer.end_tokens(path, header.metadata)
    bits = None if unpack else quantization(header.tensors)
    return config if bits is None else config | {"quantization": bits}


def _write_weights(
    path: Path, header: Header, config: dict[str, Any], unpack: bool, part: Path
) -> None:
    """The weights in several files, of which those that are whole stay as they are."""
    names = sorted(set(header.tensors) - {ROPE_DIVISORS})
    groups = [names[i : i + TENSORS_OF_A_FILE] for i in range(0, len(names), TENSORS_OF_A_FILE)]
    try:
        arrays: Any = mx.load(str(path), format="gguf")
    except (RuntimeError, ValueError) as error:
        raise WeightsError(f"{path}: MLX cannot read it ({str(error)[:200]}).") from error
    heads = {}
    if ARCHITECTURES[config["model_type"]]:
        heads = {
            "attn_q": config["num_attention_heads"],
            "attn_k": config["num_key_value_heads"],
        }
    where: dict[str, str] = {}
    for number, group in enumerate(groups, 1):
        file = part / f"model-{number:05}-of-{len(groups):05}.safetensors"
        weights = convert(group, arrays, header.tensors, unpack, heads)
        where |= dict.fromkeys(weights, file.name)
        if not file.exists():
            save_arrays(file, weights, {"format": "mlx"})
    _write_json(part / "model.safetensors.index.json", {"weight_map": where})


def _write_json(path: Path, content: dict[str, Any]) -> None:
    path.write_text(json.dumps(content, indent=1) + "\n", encoding="utf-8")
