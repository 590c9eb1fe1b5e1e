"""A GGUF file as a folder that mlx-lm loads, converted once and kept in the cache.

On a CPU the weights are unpacked to float32, because MLX's quantized products are slow there;
elsewhere they keep their bits.
"""

from __future__ import annotations

import fcntl
import hashlib
import json
import math
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import mlx.core as mx
import numpy as np

from ...errors import OutputError, WeightsError
from ...machine.facts import cache_folder
from ...machine.saving import save_arrays
from ...validation import ErrorWrapper
from ..checks import check_memory, check_safetensors
from . import tokenizer
from .header import Header, read_header
from .mapping import PERMUTED, ROPE_DIVISORS, check_tensors, convert, quantization, read_config

FORMAT = 1  # of the folders; a higher number converts every file again
TENSORS_PER_FILE = 100
SOURCE = "source.json"  # what a folder was converted from


def converted(path: Path, unpack: bool, cache: Path | None = None) -> Path:
    """The folder of a GGUF file, converted now unless it was before.

    Args:
        path: the file.
        unpack: float32 weights instead of the file's own bits.
        cache: where folders are kept; None is this machine's cache folder.

    Raises:
        WeightsError, ConfigError: a file that is damaged or not supported.
        NotEnoughMemoryError: the weights would not fit into this machine.
        OutputError: no room in the cache, or no permission.
    """
    path = path.resolve()
    header, status = read_header(path), path.stat()
    name = hashlib.sha256(str(path).encode()).hexdigest()[:12]
    folder = (cache or cache_folder("gguf")) / f"{path.stem}-{name}{'-f32' if unpack else ''}"
    source = {
        "form": FORMAT,
        "file": str(path),
        "bytes": status.st_size,
        "changed": status.st_mtime_ns,
    }
    try:
        with _lock(folder):
            if not _is_current(folder, source):
                _convert(path, header, source, unpack, folder)
    except OSError as error:
        raise OutputError.because(folder, error) from error
    return folder


def config_of(path: Path) -> dict[str, Any]:
    """The config.json of a file whose weights keep their bits; reads only its header.

    Raises `WeightsError`, `ConfigError`.
    """
    header = read_header(path)
    check_tensors(path, header.tensors)
    return _config(path, header, unpack=False)


def _is_current(folder: Path, source: dict[str, Any]) -> bool:
    """Whether a folder holds a complete conversion of this state of the file."""
    try:
        if json.loads((folder / SOURCE).read_text(encoding="utf-8")) != source:
            return False
        check_safetensors(folder)
    except (OSError, ValueError, WeightsError):
        return False
    return all((folder / name).is_file() for name in ("config.json", "tokenizer.json"))


@contextmanager
def _lock(folder: Path) -> Iterator[None]:
    """Let one process at a time convert into a folder."""
    folder.parent.mkdir(parents=True, exist_ok=True)
    with folder.with_name(f"{folder.name}.lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        yield


def _convert(
    path: Path, header: Header, source: dict[str, Any], unpack: bool, folder: Path
) -> None:
    check_tensors(path, header.tensors)
    sizes = (4 * math.prod(one.shape) if unpack else one.size for one in header.tensors.values())
    check_memory(str(path), sum(sizes))
    part = folder.with_name(f"{folder.name}.part")
    shutil.rmtree(part, ignore_errors=True)
    part.mkdir()
    _write_json(part / SOURCE, source)
    config = _config(path, header, unpack)
    tokenizer.save(path, header.metadata, part)
    _write_json(part / "config.json", config)
    _write_weights(path, header, config, unpack, part)
    shutil.rmtree(folder, ignore_errors=True)
    part.rename(folder)


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
    """Write the weights, a file for each group of tensors, so that few are in memory at once."""
    names = sorted(set(header.tensors) - {ROPE_DIVISORS})
    groups = [names[i : i + TENSORS_PER_FILE] for i in range(0, len(names), TENSORS_PER_FILE)]
    with ErrorWrapper(WeightsError, f"{path}: MLX cannot read it"):
        arrays: Any = mx.load(str(path), format="gguf")
    heads = {"attn_q": config["num_attention_heads"], "attn_k": config["num_key_value_heads"]}
    if config["model_type"] != PERMUTED:
        heads = {}
    where: dict[str, str] = {}
    for number, group in enumerate(groups, 1):
        file = part / f"model-{number:05}-of-{len(groups):05}.safetensors"
        weights = convert(group, arrays, header.tensors, unpack, heads)
        where |= dict.fromkeys(weights, file.name)
        save_arrays(file, weights, {"format": "mlx"})
    _write_json(part / "model.safetensors.index.json", {"weight_map": where})


def _write_json(path: Path, content: dict[str, Any]) -> None:
    path.write_text(json.dumps(content, indent=1) + "\n", encoding="utf-8")
