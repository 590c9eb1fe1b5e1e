"""The size of MLX's command buffers on Metal: `tune` measures it, and later runs set it.

MLX reads the limits once, before its first launch, from the environment. Its defaults of 50
launches or 50 million elements are small for decoding: with larger buffers, others measured 91
tokens per second instead of 58 on an M1 Ultra, and no difference on an M5.
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

NAMES = ("MLX_MAX_OPS_PER_BUFFER", "MLX_MAX_MB_PER_BUFFER")  # environment variables of MLX
SIZES = (None, 100, 200, 400)  # the values of both variables to try; None is MLX's default
MIN_SPEEDUP = 1.02  # over MLX's default; a smaller one is not kept
REPEATS = 2
TOKENS = 64
PROMPT = "Count from 1 to 40."


def apply_fastest(environment: Mapping[str, str] = os.environ) -> None:
    """Set the size that was fastest on this Mac, before MLX starts.

    If the user has set one of the variables, nothing changes.
    """
    if any(name in environment for name in NAMES):
        return
    with suppress(OSError, ValueError, KeyError, TypeError):
        content = json.loads(_file().read_text(encoding="utf-8"))
        if content["of"] == _identity():
            os.environ.update(dict.fromkeys(NAMES, str(int(content["size"]))))


def find_fastest(options: list[str]) -> dict[int | None, float]:
    """Measure tokens per second with each size, in turns, and keep the fastest size.

    Each measurement runs in a new process, because MLX reads the variables once.

    Args:
        options: options of `generate` that name the model.
    """
    _file().unlink(missing_ok=True)
    speeds: dict[int | None, float] = {}
    for _ in range(REPEATS):
        for size in SIZES:
            speeds[size] = max(speeds.get(size, 0.0), _tokens_per_second(options, size))
    fastest = max(speeds, key=lambda size: speeds[size])
    if fastest is not None and speeds[fastest] >= MIN_SPEEDUP * speeds[None]:
        with suppress(OSError):
            _file().parent.mkdir(parents=True, exist_ok=True)
            _file().write_text(json.dumps({"of": _identity(), "size": fastest}), encoding="utf-8")
    return speeds


def _tokens_per_second(options: list[str], size: int | None) -> float:
    """Measure the speed of a short answer in a new process; 0 if that fails."""
    environment = {name: value for name, value in os.environ.items() if name not in NAMES}
    if size is not None:
        environment |= dict.fromkeys(NAMES, str(size))
    arguments = ["generate", *options, "--json", "--max-tokens", str(TOKENS), PROMPT]
    command = [sys.executable, "-m", "dflash_mlx", *arguments]
    process = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
    if process.returncode:
        return 0.0
    return float(json.loads(process.stdout.splitlines()[-1])["tokens_per_second"])


def _identity() -> list[str | None]:
    """Return the versions that a measurement holds for, without importing MLX."""
    return [platform.mac_ver()[0], installed("mlx")]


def _file() -> Path:
    return cache_folder("kernels") / "command-buffers.json"
