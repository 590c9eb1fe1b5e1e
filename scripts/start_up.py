"""`generate hi` as a whole process, beside `mlx_lm.generate` on the same model, in turns.

    python scripts/start_up.py [--repeats 7] [--max-tokens 32]

Printed are the medians of the CPU seconds and of the seconds that a person waits, and their ratios.
Ours is run once before anything counts, so that what it keeps in the cache folder is there.
"""

from __future__ import annotations

import argparse
import resource
import subprocess
import sys
import time
from importlib.resources import files
from statistics import median


def run(*arguments: str) -> tuple[float, float]:
    """The CPU seconds and the seconds of `python -m` with these arguments."""
    before, clock = resource.getrusage(resource.RUSAGE_CHILDREN), time.perf_counter()
    subprocess.run([sys.executable, "-m", *arguments], capture_output=True, check=True)
    seconds, after = time.perf_counter() - clock, resource.getrusage(resource.RUSAGE_CHILDREN)
    return after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime, seconds


def main() -> None:
    """Measure and print."""
    options = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    options.add_argument("--repeats", type=int, default=7)
    options.add_argument("--max-tokens", type=int, default=32)
    asked = options.parse_args()
    tokens, model = str(asked.max_tokens), str(files("dflash_mlx.tiny") / "target")
    sides = {
        "dflash-mlx generate": ["dflash_mlx", "generate", "hi", "-n", tokens],
        "mlx_lm generate": ["mlx_lm", "generate", "--model", model, "--prompt", "hi"]
        + ["--max-tokens", tokens],
    }
    for arguments in sides.values():
        run(*arguments)
    found: dict[str, list[tuple[float, float]]] = {name: [] for name in sides}
    for number in range(asked.repeats):
        for name in reversed(sides) if number % 2 else sides:
            found[name].append(run(*sides[name]))
    ours, theirs = ([median(kind) for kind in zip(*runs, strict=True)] for runs in found.values())
    for name, (cpu, wall) in zip(sides, (ours, theirs), strict=True):
        print(f"{name:20} {cpu:6.2f} s of CPU  {wall:6.2f} s")
    print(f"ratio: {ours[0] / theirs[0]:.2f} of CPU, {ours[1] / theirs[1]:.2f} waited")


if __name__ == "__main__":
    main()
