"""CPU time of a whole process that writes 8 tokens: ours, and mlx_lm.generate's, in turns.

    python scripts/startup.py
    python scripts/startup.py --turns 21 --core 0

The model is the small embedded target, so that nearly all of the time is the start. A second table
has the phases of our start, with and without the drafter; `generate` without a drafter does not
warm up. Both show medians of CPU time, user and system together. The first turn is not counted,
because it compiles modules to bytecode that pip has not compiled.
"""

from __future__ import annotations

import gc
import os
import resource
import subprocess
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from pathlib import Path
from statistics import median

from experiment import ROOT, in_turns, options_of

TOKENS = 8
PROMPT = "What is 47 plus 38?"
MODEL = ROOT / "dflash_mlx" / "tiny" / "target"
PROGRAMS = Path(sys.executable).parent
OURS = [str(PROGRAMS / "dflash-mlx"), "generate", PROMPT, "-n", str(TOKENS)]
THEIRS = [str(PROGRAMS / "mlx_lm.generate"), "--model", str(MODEL), "--prompt", PROMPT]
COMMANDS = {
    "mlx_lm.generate": [*THEIRS, "--max-tokens", str(TOKENS)],
    "dflash-mlx generate": OURS,
    "dflash-mlx generate --no-draft": [*OURS, "--no-draft"],
}
PHASES = "--phases-of"  # the option with which this script starts itself again


def main() -> None:
    """Print both tables; or list the phases of this process, if it was started for that."""
    if PHASES in sys.argv:
        list_phases(sys.argv[-1])
        return
    options = options_of(__doc__, turns=7)
    calls = {name: partial(cpu_seconds, command) for name, command in COMMANDS.items()}
    in_turns(calls, 1)
    seconds = in_turns(calls, options.turns)
    show_ratios(seconds)
    phases = {kind: partial(phases_of, kind) for kind in ("tiny", "none")}
    show_phases(in_turns(phases, options.turns))


def cpu_seconds(command: Sequence[str]) -> float:
    """CPU seconds of a process, from its first instruction to its end."""
    before = used_by_children()
    subprocess.run(command, env=environment(), capture_output=True, check=True)
    return used_by_children() - before


def used_by_children() -> float:
    """CPU seconds of all child processes that have ended."""
    usage = resource.getrusage(resource.RUSAGE_CHILDREN)
    return usage.ru_utime + usage.ru_stime


def environment() -> Mapping[str, str]:
    """The environment variables, without the one that stops Python from keeping its bytecode."""
    return {name: os.environ[name] for name in os.environ if name != "PYTHONDONTWRITEBYTECODE"}


def show_ratios(seconds: Mapping[str, Sequence[float]]) -> None:
    """Print each command's median, and the median of its ratios to mlx-lm's in the same turn."""
    theirs = seconds["mlx_lm.generate"]
    print(f"{'CPU time of 8 tokens, as a process':34}{'seconds':>9}{'ratio':>8}")
    for name, ours in seconds.items():
        ratio = median(mine / other for mine, other in zip(ours, theirs, strict=True))
        print(f"{name:34}{median(ours):9.2f}{ratio:8.2f}")


def phases_of(draft: str) -> dict[str, float]:
    """CPU seconds of each phase, in a new process that goes through them one after another.

    `draft` is "tiny" for the embedded drafter, or "none".
    """
    before = used_by_children()
    command = [sys.executable, __file__, PHASES, draft]
    printed = subprocess.run(
        command, env=environment(), capture_output=True, text=True, check=True
    ).stdout
    phases = {}
    for line in printed.splitlines():
        name, _, seconds = line.rpartition(" ")
        phases[name] = float(seconds)
    phases["exit"] = used_by_children() - before - sum(phases.values())
    return phases


def show_phases(phases: Mapping[str, Sequence[Mapping[str, float]]]) -> None:
    """Print the median of each phase in milliseconds, with a drafter and without."""
    print(f"\n{'phase, CPU milliseconds':34}{'drafted':>9}{'plain':>8}")
    totals = {kind: 0.0 for kind in phases}
    for name in phases["tiny"][0]:
        times = {kind: 1000 * median(turn[name] for turn in phases[kind]) for kind in phases}
        for kind in phases:
            totals[kind] += times[kind]
        print(f"{name:34}{times['tiny']:9.0f}{times['none']:8.0f}")
    print(f"{'together':34}{totals['tiny']:9.0f}{totals['none']:8.0f}")


def list_phases(draft: str) -> None:
    """Do what `dflash-mlx generate` does, and print the name and CPU seconds of each phase."""
    gc.set_threshold(1_000_000)  # as `cli.main` does; so is gc.freeze() below
    steps: dict[str, float] = {}
    so_far = 0.0

    def done(name: str) -> None:
        nonlocal so_far
        now = time.process_time()
        steps[name] = now - so_far
        so_far = now

    done("Python")
    take_steps(draft, done)
    for name, seconds in steps.items():
        print(name, seconds)
    gc.freeze()


def take_steps(draft: str, done: Callable[[str], None]) -> None:
    """Take the steps of `dflash-mlx generate`; `done` is called with each one's name after it."""
    import dflash_mlx.cli.app

    done("import Typer and Rich")
    import dflash_mlx.cli.generate

    done("import the command")
    dflash_mlx.use_fast_blas()
    done("find the BLAS")
    import mlx.nn  # noqa: F401

    done("import MLX")
    import mlx_lm.utils  # noqa: F401

    done("import mlx-lm (with transformers)")
    load = dflash_mlx.load

    done("import our loaders")
    target, drafter = load("tiny", draft)
    policy = None if drafter is None else dflash_mlx.DraftPolicy.of(target, drafter)
    done("load the target, a drafter")
    from dflash_mlx.prompt import encode_prompt

    prompt = encode_prompt(target, [{"role": "user", "content": PROMPT}])
    done("chat template, tokenizer")
    settings = {} if policy is None else {"policy": policy}
    steps = dflash_mlx.stream_generate(target, drafter, prompt, max_tokens=TOKENS, **settings)
    next(steps)
    done("first token")
    for _ in steps:
        pass
    done("7 more tokens")


if __name__ == "__main__":
    main()
