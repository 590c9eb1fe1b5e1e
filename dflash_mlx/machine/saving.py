"""Write safetensors files atomically."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

import mlx.core as mx

from ..errors import OutputError


def save_arrays(path: Path, arrays: Mapping[str, mx.array], metadata: Mapping[str, str]) -> None:
    """Write a safetensors file. After a crash or a full disk the old file, or none, is there.

    Raises `OutputError`.
    """
    part = path.with_name("unfinished.safetensors")
    try:
        mx.save_safetensors(str(part), dict(arrays), metadata=dict(metadata))
        part.replace(path)
    except OSError as error:
        raise OutputError.because(path, error) from error
    except RuntimeError as error:  # MLX raises this when a write fails
        raise OutputError(
            f"{path}: cannot be written ({error}); free disk space and run the same command again."
        ) from error
