"""Functions that scripts share: options, methods that take turns, mlx-lm's decoding, and more."""

from __future__ import annotations

import argparse
import io
import json
import os
import re
import shutil
import subprocess
import sys
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, TypeVar

ROOT = Path(__file__).resolve().parents[1]
# Primitives that read their input in place.
VIEWS = {"AsStrided", "Broadcast", "ExpandDims", "Flatten", "Reshape", "Slice", "Split", "Squeeze"}
VIEWS |= {"StopGradient", "Transpose", "Unflatten", "View"}
Name = TypeVar("Name")
Result = TypeVar("Result")


def options_of(doc: str | None, **defaults: Any) -> argparse.Namespace:
    """Parse the command line: an option for each default, and `--core` to pin this process to."""
    options = argparse.ArgumentParser(
        description=doc, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    options.add_argument("--core", type=int, help="pin this process to it")
    for name, default in defaults.items():
        flag = f"--{name.replace('_', '-')}"
        if isinstance(default, bool):
            options.add_argument(flag, action="store_true")
        else:
            kind = str if default is None else type(default)
            options.add_argument(flag, type=kind, default=default, help=f"default: {default}")
    parsed = options.parse_args()
    if parsed.core is not None:
        os.sched_setaffinity(0, {parsed.core})
    return parsed


def numbers(text: str) -> list[int]:
    """The numbers of an option such as 1,8,32."""
    return [int(number) for number in text.split(",")]


def in_turns(
    methods: Mapping[Name, Callable[[], Result]], repeats: int
) -> dict[Name, list[Result]]:
    """Call all methods `repeats` times, each turn in the opposite order of the one before."""
    results: dict[Name, list[Result]] = {name: [] for name in methods}
    for turn in range(repeats):
        names = list(methods)
        if turn % 2:
            names.reverse()
        for name in names:
            results[name].append(methods[name]())
    return results


class Worker:
    """The script that runs, started again as a process that answers questions.

    Args:
        name: the value of its option `--worker`. The script's other options are given as well.
        folder: where it runs, and what is searched for packages first.
        options: further options, by their names on the command line.
    """

    def __init__(self, name: str, folder: Path, **options: str) -> None:
        command = [sys.executable, str(Path(sys.argv[0]).resolve()), *sys.argv[1:]]
        for option, value in {"worker": name, **options}.items():
            command += [f"--{option}", value]
        self.process = subprocess.Popen(
            command,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            cwd=folder,
            env=os.environ | {"PYTHONPATH": str(folder.resolve())},
        )

    def ask(self, **question: Any) -> dict[str, Any]:
        """The reply to a question: a line of JSON each."""
        assert self.process.stdin is not None and self.process.stdout is not None
        print(json.dumps(question), file=self.process.stdin, flush=True)
        line = self.process.stdout.readline()
        if not line:
            raise SystemExit("A worker has ended; its error is above.")
        reply: dict[str, Any] = json.loads(line)
        return reply


def mlx_lm_tokens(target: Any, prompt: Sequence[int], max_tokens: int) -> Iterator[int]:
    """Decode with mlx-lm and the same model."""
    import mlx.core as mx
    from mlx_lm.generate import generate_step

    for token, _ in generate_step(mx.array(prompt), target.model, max_tokens=max_tokens):
        yield int(token)
        if token in target.tokenizer.eos_token_ids:
            return


def embedded_ids(target: Any) -> list[list[int]]:
    """The embedded prompts as token ids."""
    from dflash_mlx.bench.datasets import embedded_prompts
    from dflash_mlx.prompt import encode_prompt

    return [encode_prompt(target, list(prompt.messages)) for prompt in embedded_prompts()]


def copy_repository(folder: Path) -> None:
    """Copy the repository's files, except those that git ignores."""
    listed = ["git", "ls-files", "-z", "--cached", "--others", "--exclude-standard"]
    names = subprocess.run(listed, cwd=ROOT, capture_output=True, text=True, check=True).stdout
    for name in filter(None, names.split("\0")):
        if (ROOT / name).exists():
            (folder / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copy2(ROOT / name, folder / name, follow_symlinks=False)


def graph_nodes(*arrays: Any) -> Counter[str]:
    """How many nodes of each primitive the graphs of lazy MLX arrays have."""
    import mlx.core as mx

    graph = io.StringIO()
    mx.export_to_dot(graph, *arrays)
    return Counter(re.findall(r'label ="(\w+)"', graph.getvalue()))
