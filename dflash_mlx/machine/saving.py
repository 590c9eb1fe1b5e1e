"""Write safetensors files atomically."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING

from ..errors import OutputError

if TYPE_CHECKING:
    import mlx.core as mx


def save_arrays(path: Path, arrays: Mapping[str, mx.array], metadata: Mapping[str, str]) -> None:
    """Write a safetensors file. After a crash or a full disk the old file, or none, is there.

    Raises `OutputError`.
    """
    import mlx.core as mx  # not before a model is looked for: `use_fast_blas` comes first

    part = path.with_stem(f"{path.stem}.unfinished")  # MLX wants a name of safetensors
    try:
        mx.save_safetensors(str(part), dict(arrays), metadata=dict(metadata))
        part.replace(path)
    except OSError as error:
        raise OutputError.because(path, error) from error
    except RuntimeError as error:  # MLX raises this when a write fails
        raise OutputError(
            f"{path}: cannot be written ({error}); free disk space and run the same command again."
        ) from error
