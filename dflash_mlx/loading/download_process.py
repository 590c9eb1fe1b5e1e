"""The process of a download: it prints one JSON object with the folder, or with the error."""

from __future__ import annotations

import json
import os
import sys
import threading
from typing import Any

from huggingface_hub import snapshot_download

from ..errors import DFlashError
from .hub import Hub


def answer(settings: dict[str, Any]) -> dict[str, str]:
    """Download with these settings of `snapshot_download`."""
    try:
        with Hub(settings["endpoint"]).explained(settings["repo_id"]):
            return {"folder": snapshot_download(**settings)}
    except DFlashError as error:
        return {"error": type(error).__name__, "message": str(error)}


def _end_with_parent() -> None:
    """End when the process that waits for this one has ended."""
    sys.stdin.read()
    os._exit(1)


if __name__ == "__main__":
    threading.Thread(target=_end_with_parent, daemon=True).start()
    print(json.dumps(answer(json.loads(sys.argv[1]))))
