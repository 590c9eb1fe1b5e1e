"""Plant small bugs in the kernels, one at a time, and list those that no test notices.

    python scripts/mutate_kernels.py --limit 50 --seed 0
    python scripts/mutate_kernels.py --file metal/block_attention.metal

Some survivors are not bugs: a changed line may mean the same. Read each before writing a test.
Known ones:

- `costs.guess`: `<=` for `<`; two estimated costs that are equal are no reason for either.
- `autotune`: `<` for `<=` and `<=` for `<`; two measured times are never equal to that digit.
- `tensor_tile.h`: where a slice begins of which only the type is asked; a fifth of four elements.
- `selfcheck.TOLERANCES`: twice or half of what is allowed.
- `merge_chunks`: a largest score without the sink; weights then pass 2^128 only where rows are 0.
- `AffineWeights::fetch`: a scale of columns past the end, which are stored nowhere.
- `BlockAttention`: a chunk more; no row sees a key of it. In its check: another scale, or a tree
  elsewhere; both use it.
- `VerifyMatmul._check`: rows per token for rows per expert, and the reverse; one kernel reads both.
- `QueryRows::begin`: ones in rows that are stored nowhere.
- `SlotArray.add`: `>=` for `>`; an array that is full to the last slot is copied once more.
- `KVSlots.arrange`: without its early return; what follows finds nothing to do then.
- `Rows.windows`: windows of one size kept for all; a model's recurrent layers have one size.
- `_readable`: rows past `MOST_NODES`; nothing chooses our kernel for them.
- `WindowCache.visible`: `max_size` alone; models ask for the window of their cache.
- `SlotKVCache`: without `if not rows.own`; rows are split that nobody reads.
- `chosen_together`: `keys` for `merged`; no model's launches share keys in a chain.
- `KernelConv1d`: the rows of one window for all; our convolution takes any number of rows.
"""

import argparse
import random
import re
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from experiment import copy_repository

ROOT = Path(__file__).parents[1]
SECONDS = 900  # for the tests of one mutant

# Names of test files, and the stems of the files whose code they run.
COVERED = {
    "test_kernel_matmul": "fragment fused gated launcher matmul_tile matrix_rows merge_splits "
    "verify_matmul weights",
    "test_kernel_moe": "gated matmul_tile matrix_rows verify_matmul_moe weights",
    "test_kernel_block_attention": "block_attention fragment matrix_rows",
    "test_kernel_delta_rule": "delta_rule",
    "test_kernel_tensor": "tensor_tile verify_matmul_tensor choose autotune modules weights",
    "test_kernel_layers": "attention fused modules shapes",
    "test_kernel_selfcheck": "attention block_attention delta_rule fused modules selfcheck "
    "shapes verify_matmul kernel_plan",
    "test_choose": "choose shapes",
    "test_autotune": "autotune choose shapes kernel_plan",
    "test_kernel_source": "source launcher",
    "test_kernel_models": "attention modules",
    "test_batched test_many_requests": "rows sharing kv_slots",
    "test_tree_attention test_tree_families": "row_cache kv window span intercept tree_attention",
}
FOLDERS = ("metal", "dflash_mlx/kernels", "dflash_mlx/loading", "dflash_mlx/targets")
# (pattern, replacement): each match in a line of code makes one mutant.
SWAPS = [
    (r" \+ ", " - "),
    (r" - ", " + "),
    (r" \* ", " + "),
    (r" / ", " * "),
    (r" < ", " <= "),
    (r" <= ", " < "),
    (r" > ", " >= "),
    (r" >= ", " > "),
    (r" == ", " != "),
    (r" && ", " || "),
    (r" and ", " or "),
    (r"\+=", "-="),
    (r"\b0\b", "1"),
    (r"\b1\b", "0"),
    (r"\b(4|8|16|32)\b", r"(\1 - 1)"),
    (r"\bmax\(", "min("),
    (r"\bmin\(", "max("),
    (r"^\s*(threadgroup_barrier|simdgroup_barrier)\(.*;$", ";"),
]


@dataclass(frozen=True)
class Mutant:
    """A line of a file, and what it becomes."""

    file: str  # from the root of the repository
    number: int  # of the line, from 1
    line: str
    becomes: str


def tests_by_file() -> dict[str, list[str]]:
    """The names of the tests that run each file's code."""
    by_file: dict[str, list[str]] = {}
    for path in sorted(path for folder in FOLDERS for path in (ROOT / folder).iterdir()):
        tests = [names for names, stems in COVERED.items() if path.stem in stems.split()]
        if tests:
            by_file[str(path.relative_to(ROOT))] = " ".join(tests).split()
    return by_file


TESTS = tests_by_file()


def mutants_of(file: str) -> Iterator[Mutant]:
    """Every mutant of a file's code; comments, docstrings, imports and messages are left alone."""
    in_docstring = False  # of several lines
    for number, line in enumerate((ROOT / file).read_text().splitlines(), start=1):
        quotes = line.count('"""')
        if in_docstring or quotes:
            if quotes == 1:  # it begins or ends here
                in_docstring = not in_docstring
            continue
        code = line.strip()
        if code.startswith(("//", "#", "import", "from", "template", "raise")) or 'f"' in line:
            continue
        uncommented = line.split("//")[0].split("  # ")[0]
        for pattern, replacement in SWAPS:
            for match in re.finditer(pattern, uncommented):
                becomes = line[: match.start()] + match.expand(replacement) + line[match.end() :]
                yield Mutant(file, number=number, line=line, becomes=becomes)


def noticed(folder: Path, mutant: Mutant) -> bool:
    """Whether a test fails, or takes too long, with the mutant in `folder`, a copy of the code."""
    path = folder / mutant.file
    text = path.read_text()
    lines = text.splitlines()
    lines[mutant.number - 1] = mutant.becomes
    path.write_text("\n".join(lines) + "\n")
    every_test = folder.glob("tests/*/test_*.py")
    tests = [str(test) for test in every_test if test.stem in TESTS[mutant.file]]
    options = ["-x", "-q", "-p", "no:cacheprovider", "--import-mode=importlib"]
    command = [sys.executable, "-B", "-m", "pytest", *options, *tests]
    try:
        done = subprocess.run(command, cwd=folder, capture_output=True, timeout=SECONDS)
    except subprocess.TimeoutExpired:
        return True
    finally:
        path.write_text(text)
    # pytest ends with 4 or 5 if no test ran; any other code, that of a crash too, is a failure.
    return done.returncode not in (0, 4, 5)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--file", choices=list(TESTS), help="mutants of this file only")
    parser.add_argument("--limit", type=int, default=20, help="how many to run")
    parser.add_argument("--seed", type=int, default=0, help="which ones")
    options = parser.parse_args()
    files = [options.file] if options.file else list(TESTS)
    mutants = [mutant for file in files for mutant in mutants_of(file)]
    chosen = random.Random(options.seed).sample(mutants, min(options.limit, len(mutants)))
    folder = Path(tempfile.mkdtemp(prefix="mutants-"))
    survivors = 0
    copy_repository(folder)
    try:
        for count, mutant in enumerate(chosen, start=1):
            survived = not noticed(folder, mutant)
            survivors += survived
            print(f"{count}/{len(chosen)} {mutant.file}:{mutant.number}", flush=True)
            if survived:
                print(f"  survived:\n  - {mutant.line}\n  + {mutant.becomes}", flush=True)
    finally:
        shutil.rmtree(folder)
    print(f"{len(chosen)} mutants of {len(mutants)} ran, {survivors} survived")


if __name__ == "__main__":
    main()
