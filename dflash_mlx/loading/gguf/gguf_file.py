"""A GGUF file as a folder that mlx-lm loads, converted once and kept in the cache.

On a CPU the weights are unpacked to float32, because MLX's quantized products are slow there;
elsewhere they keep their bits where MLX has such weights, and are unpacked to 16 bits otherwise.
"""

from __future__ import annotations

import hashlib
import json
import shutil
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any

from huggingface_hub.utils import WeakFileLock

from ...errors import MissingDependencyError, OutputError, WeightsError
from ...machine.facts import cache_folder
from ...machine.saving import save_arrays
from ..contents import DRAFTER, Contents, read_contents
from ..folder import INDEX, Folder
from ..memory_check import check_memory
from ..registry import split_files

if TYPE_CHECKING:
    from .conversion import Conversion
    from .gguf_drafter import DrafterConversion

FORMAT = 5  # of the folders; a higher number converts every file again
# What `content_name` hashes: the first bytes of a file, and so many samples of so many bytes.
BEGINNING = 2**20
SAMPLES = 256
SAMPLE = 2**12


def converted(path: Path, unpacked: bool) -> Path:
    """The folder of a GGUF file, converted now unless a file of this content was before.

    Args:
        path: the file, or one of the parts it is split into.
        unpacked: float32 weights instead of the file's own bits.

    Raises:
        WeightsError, ConfigError: a file that is damaged or not supported.
        NotEnoughMemoryError: the weights would not fit into this machine.
        OutputError: no room in the cache, or no permission.
    """
    cache = cache_folder("gguf")
    try:
        cache.mkdir(parents=True, exist_ok=True)
        folder = cache / f"{content_name(path)}-{FORMAT}{'-f32' if unpacked else ''}"
        with WeakFileLock(folder.with_name(f"{folder.name}.lock")):  # one process at a time
            if not _is_complete(folder):
                _convert(path, unpacked, folder)
    except OSError as error:
        raise OutputError.because(cache, error) from error
    return folder


class GGUFFile(Folder):
    """A GGUF file that is not converted yet, or the first of its parts."""

    @property
    def contents(self) -> Contents:
        """What the file contains, by its first keys."""
        return read_contents(self.path)

    @cached_property
    def config(self) -> dict[str, Any]:
        """The config.json if the weights keep their bits. Raises `WeightsError`, `ConfigError`."""
        return _conversion(self.path, unpacked=False).config

    @cached_property
    def files(self) -> list[Path]:
        """The parts that it is split into. Raises `WeightsError` unless all are here."""
        return split_files(self.path)

    def converted(self, unpacked: bool) -> Folder:
        """The folder that the file was converted to. Arguments and errors are `converted`'s."""
        return Folder(converted(self.path, unpacked), self.name)


def _conversion(path: Path, unpacked: bool) -> Conversion | DrafterConversion:
    """Read a file's header. Raises the errors of `Conversion`, and `MissingDependencyError`."""
    try:
        from .conversion import Conversion
        from .gguf_drafter import DrafterConversion
    except ImportError as error:
        if error.name != "gguf":
            raise
        raise MissingDependencyError.of("gguf is not installed", "gguf") from error
    is_drafter = read_contents(path).kind == DRAFTER
    conversion_class = DrafterConversion if is_drafter else Conversion
    return conversion_class(split_files(path), unpacked)


def content_name(path: Path) -> str:
    """A name for a file's content by its size, time and samples: hashing all of it takes long."""
    digest = hashlib.sha256()
    for part in split_files(path):
        state = part.stat()
        digest.update(f"{state.st_size} {state.st_mtime_ns}".encode())
        with part.open("rb") as file:
            digest.update(file.read(BEGINNING))
            # Two trainings of one model may differ in nothing but their weights.
            for offset in range(BEGINNING, state.st_size, max(SAMPLE, state.st_size // SAMPLES)):
                file.seek(offset)
                digest.update(file.read(SAMPLE))
    return digest.hexdigest()[:16]


def _is_complete(folder: Path) -> bool:
    """Whether a folder holds a complete conversion."""
    try:
        _ = Folder(folder).files
    except (OSError, WeightsError):
        return False
    return (folder / "config.json").is_file()


def _convert(path: Path, unpacked: bool, folder: Path) -> None:
    """Convert a file into a folder that appears only when it is complete."""
    conversion = _conversion(path, unpacked)
    check_memory(str(path), conversion.size)
    unfinished = folder.with_name(f"{folder.name}.part")
    shutil.rmtree(unfinished, ignore_errors=True)
    unfinished.mkdir()
    try:
        conversion.save_tokenizer(unfinished)
        _write_json(unfinished / "config.json", conversion.config)
        weight_map: dict[str, str] = {}
        for number, weights in enumerate(conversion.files()):
            file = unfinished / f"model-{number:05}.safetensors"
            save_arrays(file, weights, {"format": "mlx"})
            weight_map |= dict.fromkeys(weights, file.name)
        _write_json(unfinished / INDEX, {"weight_map": weight_map})
        shutil.rmtree(folder, ignore_errors=True)
        unfinished.rename(folder)
    finally:  # what a full disk left
        shutil.rmtree(unfinished, ignore_errors=True)


def _write_json(path: Path, content: dict[str, Any]) -> None:
    path.write_text(json.dumps(content, indent=1) + "\n", encoding="utf-8")
