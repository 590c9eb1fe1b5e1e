"""The files that one model is split into."""

from __future__ import annotations

import re
from pathlib import Path

from ...errors import WeightsError

MAX_PARTS = 1000
_PART = re.compile(r"-(\d{5})-of-(\d{5})\.gguf", re.IGNORECASE)


def parts_of(path: Path) -> list[Path]:
    """The files that a model is split into, by the name of one of them (-00001-of-00003.gguf).

    Raises `WeightsError`.
    """
    match = _PART.search(path.name)
    if match is None:
        return [path]
    count, stem = int(match[2]), path.name[: match.start()]
    if not 0 < count <= MAX_PARTS:
        raise WeightsError(f"{path}: {count} parts cannot be.")
    parts = [path.with_name(f"{stem}-{i:05}-of-{count:05}.gguf") for i in range(1, count + 1)]
    for part in parts:
        if not part.is_file():
            raise WeightsError(f"{path} is one of {count} parts, and {part.name} is not beside it.")
    return parts
