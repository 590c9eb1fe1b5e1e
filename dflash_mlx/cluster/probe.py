"""What a machine has, in a line of JSON; `reach` runs it there."""

from __future__ import annotations

import json
import platform

from ..machine.facts import installed

PACKAGES = ("dflash-mlx", "mlx", "mlx-lm")


def found() -> dict[str, object]:
    """Versions, and which of MLX's backends are there; none of them where MLX is not."""
    versions = {name: installed(name) for name in PACKAGES}
    return {"Python": platform.python_version(), **versions, "backends": _backends()}


def _backends() -> list[str]:
    try:
        import mlx.core as mx
    except ImportError:
        return []
    return [name for name in ("ring", "jaccl", "mpi") if mx.distributed.is_available(name)]


if __name__ == "__main__":
    print(json.dumps(found()))
