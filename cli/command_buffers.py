"""How many launches MLX puts into a command buffer on Metal: measured by `tune`, set at the start.

MLX reads both numbers once, before its first launch, from the environment. Its own 50 launches or
50 million elements are small for decoding: others measured 58 to 91 tokens a second with larger
ones on an M1 Ultra, and no difference on an M5.
"""

import json
import os
import platform
import subprocess
import sys
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path

from dflash_mlx.machine.facts import cache_folder, installed

NAMES = "MLX_MAX_OPS_PER_BUFFER", "MLX_MAX_MB_PER_BUFFER"
SIZES = None, 100, 200, 400  # of both; None is MLX's own
GAIN, REPEATS, TOKENS = 1.02, 2, 64
PROMPT = "Count from 1 to 40."


def apply_fastest(environment: Mapping[str, str] = os.environ) -> None:
    """Set what won on this Mac, before MLX starts. A setting of the user's own wins."""
    if any(name in environment for name in NAMES):
        return
    with suppress(OSError, ValueError, KeyError, TypeError):
        content = json.loads(_file().read_text(encoding="utf-8"))
        if content["of"] == _identity():
            os.environ.update(dict.fromkeys(NAMES, str(int(content["size"]))))


def find_fastest(options: list[str]) -> dict[int | None, float]:
    """Tokens a second with each size, in processes of their own, in turns; the winner is kept.

    Args:
        options: of `generate`, which name the model.
    """
    _file().unlink(missing_ok=True)
    speeds: dict[int | None, float] = {}
    for _ in range(REPEATS):
        for size in SIZES:
            speeds[size] = max(speeds.get(size, 0.0), _tokens_per_second(options, size))
    best = max(speeds, key=lambda size: speeds[size])
    if best is not None and speeds[best] >= GAIN * speeds[None]:
        with suppress(OSError):
            _file().parent.mkdir(parents=True, exist_ok=True)
            _file().write_text(json.dumps({"of": _identity(), "size": best}), encoding="utf-8")
    return speeds


def _tokens_per_second(options: list[str], size: int | None) -> float:
    """Of a short answer in a process of its own; 0 where it fails."""
    environment = {name: value for name, value in os.environ.items() if name not in NAMES}
    if size is not None:
        environment |= dict.fromkeys(NAMES, str(size))
    arguments = ["generate", *options, "--json", "--max-tokens", str(TOKENS), PROMPT]
    command = [sys.executable, "-m", "dflash_mlx", *arguments]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
    if done.returncode:
        return 0.0
    return float(json.loads(done.stdout.splitlines()[-1])["tokens_per_second"])


def _identity() -> list[str | None]:
    """What the choice depends on, without MLX."""
    return [platform.mac_ver()[0], installed("mlx")]


def _file() -> Path:
    return cache_folder("kernels") / "command-buffers.json"
