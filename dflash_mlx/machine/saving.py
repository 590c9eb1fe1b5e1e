"""Files that are whole or not there."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

import mlx.core as mx

from ..errors import OutputError


def save_arrays(path: Path, arrays: Mapping[str, mx.array], metadata: Mapping[str, str]) -> None:
    """Write a safetensors file in one move: a crash or a full disk leaves the old one, or none.

    Raises `OutputError` when it cannot be written.
    """
    part = path.with_name("unfinished.safetensors")
    try:
        mx.save_safetensors(str(part), dict(arrays), metadata=dict(metadata))
        part.replace(path)
    except OSError as error:
        raise OutputError.because(path, error) from error
    except RuntimeError as error:  # MLX's word for a write that failed
        raise OutputError(
            f"{path}: cannot be written ({error}); make room on the disk, and the same command "
            "goes on from what is whole."
        ) from error
