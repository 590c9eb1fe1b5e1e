"""Time a cold start on a busy machine: first token against mlx-lm, and the final draft length.

    python scripts/cold_start.py [--model smollm2] [--max-tokens 256] [--busy N]

Each run is a fresh process. N processes (default: one per core) keep the cores busy; 0 leaves the
machine as it is. The home folder is a temporary one, so nothing was measured before. Prints seconds
from loading to the first token, for mlx-lm's own `stream_generate` and for ours with the default
drafter and policy, and the draft lengths of our last steps.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

PROMPT = "Write a Python function that tells whether a number is prime, and explain it."
LAST_STEPS = 20


def answer(model: str, max_tokens: int, plain: bool) -> dict[str, Any]:
    """One answer in this process: seconds to the first token, seconds in all, drafts per step."""
    import dflash_mlx as dm

    dm.use_fast_blas()
    from mlx_lm import stream_generate

    started, first, drafted = time.perf_counter(), 0.0, list[int]()
    prompt = [{"role": "user", "content": PROMPT}]
    if plain:
        target = dm.load_target(model)
        ids = target.tokenizer.apply_chat_template(prompt, add_generation_prompt=True)
        for _ in stream_generate(target.model, target.tokenizer, ids, max_tokens=max_tokens):
            first = first or time.perf_counter() - started
    else:
        target, drafter = dm.load(model)
        policy = dm.DraftPolicy.of(target, drafter)
        settings = {"policy": policy, "max_tokens": max_tokens}
        for event in dm.stream_generate(target, drafter, prompt, **settings):
            first = first or time.perf_counter() - started
            drafted.append(event.drafted)
    return {"first": first, "all": time.perf_counter() - started, "drafted": drafted}


def in_a_process(model: str, max_tokens: int, plain: bool, home: Path) -> dict[str, Any]:
    """`answer` in a process of its own, which has measured nothing yet."""
    for folder in home.rglob("dflash-mlx/costs"):
        shutil.rmtree(folder)
    command = [sys.executable, __file__, "--child", "--model", model]
    command += ["--max-tokens", str(max_tokens), *(["--plain"] if plain else [])]
    environment = os.environ | {"HOME": str(home)}
    done = subprocess.run(command, check=True, env=environment, stdout=subprocess.PIPE, text=True)
    result: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    return result


@contextmanager
def load(processes: int) -> Iterator[None]:
    """Keep the cores busy."""
    busy = [subprocess.Popen([sys.executable, "-c", "while 1: pass"]) for _ in range(processes)]
    try:
        yield
    finally:
        for each in busy:
            each.kill()


def main() -> None:
    """Run it."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--model", default="smollm2")
    parser.add_argument("--max-tokens", type=int, default=256)
    parser.add_argument("--busy", type=int, default=os.cpu_count())
    parser.add_argument("--child", action="store_true", help=argparse.SUPPRESS)
    parser.add_argument("--plain", action="store_true", help=argparse.SUPPRESS)
    given = parser.parse_args()
    if given.child:
        print(json.dumps(answer(given.model, given.max_tokens, given.plain)))
        return
    with TemporaryDirectory() as home:
        in_a_process(given.model, 1, True, Path(home))  # unpacks a GGUF file
        for busy in dict.fromkeys([given.busy, 0]):
            with load(busy):
                theirs = in_a_process(given.model, given.max_tokens, True, Path(home))
                ours = in_a_process(given.model, given.max_tokens, False, Path(home))
            lengths = Counter(ours["drafted"][-LAST_STEPS:]).most_common()
            print(f"{busy} busy processes: first token {ours['first']:.1f} s, mlx-lm's")
            print(f"  {theirs['first']:.1f} s; all {ours['all']:.1f} s and {theirs['all']:.1f} s")
            print(
                f"  last {LAST_STEPS} steps: {', '.join(f'{n} x {k} drafted' for k, n in lengths)}"
            )


if __name__ == "__main__":
    main()
