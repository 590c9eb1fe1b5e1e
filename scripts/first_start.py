"""The first `generate --compare` of a machine: this checkout and another one, in turns.

    python scripts/first_start.py --against ../before --core 1

Every turn has an empty home folder, so nothing is compiled or cached yet. Prints the seconds until
the first text, which plain decoding writes, and until the end, of both (medians), and ours over
theirs (medians over the turns).
"""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
import time
from functools import partial
from pathlib import Path
from statistics import median

from experiment import ROOT, in_turns, options_of

PROMPT = "What is 47 plus 38?"
START = "from dflash_mlx.cli.main import main; main()"


def main() -> None:
    """Measure and print."""
    options = options_of(__doc__, against="", turns=5)
    if not options.against:
        raise SystemExit("name the other checkout: --against FOLDER")
    checkouts = {"ours": ROOT, "before": Path(options.against).resolve()}
    starts = {name: partial(start, folder) for name, folder in checkouts.items()}
    in_turns(starts, 1)  # compiles the bytecode of both
    seconds = in_turns(starts, options.turns)
    for number, moment in enumerate(("first text", "end")):
        ours, before = ([turn[number] for turn in seconds[name]] for name in checkouts)
        ratio = median(now / then for now, then in zip(ours, before, strict=True))
        print(f"{moment:12}{median(ours):6.2f} s, before {median(before):.2f} s: {ratio:.2f}")


def start(checkout: Path) -> tuple[float, float]:
    """Run a checkout in a new process: seconds until its first text, and until its end."""
    with tempfile.TemporaryDirectory() as home:
        variables = {"HOME": home, "PATH": os.environ["PATH"], "PYTHONPATH": str(checkout)}
        clock = time.perf_counter()
        process = subprocess.Popen(
            [sys.executable, "-c", START, "generate", "--compare", PROMPT],
            env=variables,
            cwd=home,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
        )
        assert process.stdout is not None
        os.read(process.stdout.fileno(), 1)
        first = time.perf_counter() - clock
        process.stdout.read()
        if process.wait():
            raise SystemExit(f"{checkout}: generate has failed")
        return first, time.perf_counter() - clock


if __name__ == "__main__":
    main()
