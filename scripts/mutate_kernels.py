"""Plant small bugs in the kernels and their wrappers, one at a time, and see which tests notice.

    python scripts/mutate_kernels.py --limit 300 --seed 0
    python scripts/mutate_kernels.py --file metal/block_attention.metal
    python scripts/mutate_kernels.py --report

A mutant is one change to one line: an operator, a bound, a constant, a barrier, a stride, a dtype,
a condition or a statement that is gone. It is planted in a copy of the repository, and the tests
that touch the file run until one fails: a quick one of each kernel, those that have noticed the
most so far, then all. What a compiler refuses proves nothing about the tests and is counted apart.
Results are added to a log, one JSON object a line, and a mutant in the log is not run again, so a
run can be stopped and gone on with.

Survivors are printed. Each one is either a test that is missing or no bug at all; the latter are
listed with their reason in scripts/equivalent_mutants.toml and no longer count.
"""

import argparse
import json
import random
import sys
import time
import tomllib
from collections import Counter
from dataclasses import asdict, dataclass
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent))
from mutants import Mutant, mutants_of
from mutation_copy import Copy

ROOT = Path(__file__).parents[1]
EQUIVALENT = Path(__file__).with_name("equivalent_mutants.toml")
LOG = ROOT / "build" / "mutants.jsonl"
SECONDS = 90  # of the processor's, for the tests of one mutant: what takes longer never ends
HANDFUL = 8  # mutants of every file, before the long ones get more

_OFFSETS = "test_kernel_offsets"
_PRODUCT = ["test_kernel_matmul_edges", "test_kernel_matmul", _OFFSETS]
_BESIDE = ["test_kernel_fused"]
_EXPERTS = ["test_kernel_moe_edges", "test_kernel_moe", _OFFSETS]
_ATTENTION = ["test_kernel_attention_edges", "test_kernel_block_attention", _OFFSETS]
_DELTA = ["test_kernel_delta_edges", "test_kernel_delta_replay"]
_RULES, _STRICT = ["test_kernel_refusals", "test_kernel_geometry"], ["test_metal_strict"]
_WIRING = ["test_kernel_layers", "test_kernel_wiring", "test_kernel_models"]
# The tests that touch a file, the most specific first.
TESTS = {
    "metal/block_attention.metal": _ATTENTION,
    "metal/delta_replay.metal": _DELTA,
    "metal/fragment.h": [*_PRODUCT, *_ATTENTION],
    "metal/gated.h": [*_PRODUCT, *_EXPERTS],
    "metal/language.h": _STRICT,
    "metal/matmul_tile.h": [*_PRODUCT, *_EXPERTS],
    "metal/matrix_rows.h": [*_PRODUCT, *_EXPERTS],
    "metal/merge_splits.metal": [*_PRODUCT, *_BESIDE],
    "metal/verify_qkv.metal": _BESIDE,
    "metal/verify_matmul.metal": _PRODUCT,
    "metal/verify_matmul_moe.metal": _EXPERTS,
    "dflash_mlx/kernels/block_attention.py": [*_RULES, *_ATTENTION, *_STRICT],
    "dflash_mlx/kernels/delta_replay.py": [*_RULES, *_DELTA, *_STRICT],
    "dflash_mlx/kernels/source.py": ["test_kernel_source", *_PRODUCT, *_ATTENTION, *_DELTA],
    "dflash_mlx/kernels/beside.py": [*_BESIDE, *_WIRING],
    "dflash_mlx/kernels/gated.py": _WIRING,
    "dflash_mlx/kernels/modules.py": _WIRING,
    "dflash_mlx/kernels/selfcheck.py": ["test_kernel_selfcheck", *_WIRING],
    "dflash_mlx/kernels/verify_qkv.py": [*_RULES, *_BESIDE, *_STRICT],
    "dflash_mlx/kernels/verify_matmul.py": [*_RULES, *_PRODUCT, *_EXPERTS, *_STRICT],
    "dflash_mlx/kernels/verify_matmul_moe.py": [*_RULES, *_EXPERTS, *_STRICT],
    "dflash_mlx/kernels/weights.py": [*_RULES, *_PRODUCT, *_EXPERTS, *_ATTENTION, *_STRICT],
}
# One test of each module that asks much of a kernel and takes a second.
_MIXED = "tests/test_kernel_matmul_edges.py::test_one_rounding_in_every_mix_of_dtypes"
_ROUNDING = "tests/test_kernel_attention_edges.py::test_one_rounding"
QUICK = {
    "test_kernel_matmul_edges": [
        f"{_MIXED}[None-0-dtype0-stored0]",
        f"{_MIXED}[4-32-dtype4-stored4]",
    ],
    "test_kernel_attention_edges": [f"{_ROUNDING}[True-quantized1-dtype0]"],
    "test_kernel_moe": ["tests/test_kernel_moe.py::test_one_row_per_token_and_expert"],
    "test_kernel_delta_replay": [
        "tests/test_kernel_delta_replay.py::test_a_node_of_a_tree_has_the_bits_of_its_path_alone",
    ],
    "test_kernel_fused": [
        "tests/test_kernel_fused.py::test_a_row_has_the_same_bits_in_every_call[columns2-1024]"
    ],
}
# What changes no result is for those who read kernels, not for those who run them.
READ = ("space", "unroll")


@dataclass(frozen=True)
class Result:
    """What became of a mutant.

    Attributes:
        outcome: "killed", "refused" (by a compiler), "endless" or "survived".
        by: the test that noticed it.
        seconds: of its tests.
    """

    mutant: Mutant
    outcome: str
    by: str
    seconds: float


def every_mutant(only: str | None) -> list[Mutant]:
    """Of all files, or of one."""
    files = [only] if only else list(TESTS)
    return [mutant for file in files for mutant in mutants_of(file, (ROOT / file).read_text())]


def known(log: Path) -> dict[str, Result]:
    """The results in the log, by the mutant's key."""
    results = {}
    for line in log.read_text().splitlines() if log.exists() else ():
        row = json.loads(line)
        mutant = Mutant(**row.pop("mutant"))
        results[mutant.key] = Result(mutant, **row)
    return results


def equivalent() -> dict[str, str]:
    """Why mutants are no bugs, by their key."""
    rows = tomllib.loads(EQUIVALENT.read_text())["mutant"] if EQUIVALENT.exists() else []
    return {f"{row['file']}: {row['line']} -> {row['becomes']}": row["reason"] for row in rows}


def run(mutant: Mutant, copy: Copy, killers: Counter[str]) -> Result:
    """Plant a mutant and run its tests until one fails."""
    begin = time.monotonic()
    names = _STRICT if mutant.kind in READ else TESTS[mutant.file]
    modules = [f"tests/{name}.py" for name in names]
    if not all((copy.folder / module).exists() for module in modules):
        raise FileNotFoundError(f"{mutant.file}: not all of {modules} exist")
    quick = [test for name in names for test in QUICK.get(name, ())]
    likely = [test for test, _ in killers.most_common(40) if test.split("::")[0] in modules][:4]
    with copy.planted(mutant):
        try:
            for tests in filter(None, (quick, likely, modules)):
                failed, said = copy.test(tests, SECONDS)
                if tests is modules and not failed and " passed" not in said:
                    raise RuntimeError(f"no test ran:\n{said[-2000:]}")
                if failed:
                    killers[failed] += 1
                    refused = "CompilationError" in said or "SyntaxError" in said
                    outcome = "refused" if refused and mutant.kind not in READ else "killed"
                    return Result(mutant, outcome, failed, time.monotonic() - begin)
        except TimeoutError:
            return Result(mutant, "endless", "", time.monotonic() - begin)
    return Result(mutant, "survived", "", time.monotonic() - begin)


def chosen(mutants: list[Mutant], limit: int | None, seed: int) -> list[Mutant]:
    """So many of them, at random: a handful of every file, the others as they come."""
    handfuls, others = [], []
    of_file: Counter[str] = Counter()
    for mutant in random.Random(seed).sample(mutants, len(mutants)):
        of_file[mutant.file] += 1
        (handfuls if of_file[mutant.file] <= HANDFUL else others).append(mutant)
    return (handfuls + others)[:limit]


def report(results: dict[str, Result]) -> None:
    """Print the figures, and every survivor that is not known to be equivalent."""
    reasons, counts = equivalent(), Counter(result.outcome for result in results.values())
    survivors = [r for r in results.values() if r.outcome == "survived"]
    unexplained = [r for r in survivors if r.mutant.key not in reasons]
    ran = sum(counts.values()) - counts["refused"]
    print(f"{ran} mutants ran, {counts['refused']} more were refused by a compiler")
    print(f"{counts['killed']} were noticed, {counts['endless']} never ended")
    print(f"{len(survivors)} survived: {len(unexplained)} are not explained, the rest equivalent")
    for result in sorted(unexplained, key=lambda r: (r.mutant.file, r.mutant.number)):
        mutant = result.mutant
        print(f"\n{mutant.file}:{mutant.number} ({mutant.kind})")
        print(f"  - {mutant.line}\n  + {mutant.becomes}")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--file", choices=list(TESTS), help="mutants of this file alone")
    parser.add_argument("--limit", type=int, help="how many to run; all by default")
    parser.add_argument("--seed", type=int, default=0, help="which ones")
    parser.add_argument("--log", type=Path, default=LOG, help="where results are kept")
    parser.add_argument("--again", action="store_true", help="run the survivors in the log again")
    parser.add_argument("--report", action="store_true", help="print the log's figures and end")
    options = parser.parse_args()
    results = known(options.log)
    if options.report:
        report(results)
        return
    mutants = chosen(every_mutant(options.file), options.limit, options.seed)
    reasons = equivalent()
    if options.again:
        survivors = (r.mutant for r in results.values() if r.outcome == "survived")
        mutants = [mutant for mutant in survivors if mutant.key not in reasons]
    else:
        mutants = [mutant for mutant in mutants if mutant.key not in {*results, *reasons}]
    killers = Counter(result.by for result in results.values() if result.by)
    options.log.parent.mkdir(parents=True, exist_ok=True)
    with Copy(ROOT) as copy, options.log.open("a") as log:
        failed, said = copy.test([test for tests in QUICK.values() for test in tests], SECONDS)
        if failed or "passed" not in said:
            sys.exit(f"{failed} fails without a mutant:\n{said[-2000:]}")
        for count, mutant in enumerate(mutants, 1):
            result = run(mutant, copy, killers)
            log.write(json.dumps(asdict(result)) + "\n")
            log.flush()
            results[mutant.key] = result
            where = f"{mutant.file}:{mutant.number}"
            print(f"{count}/{len(mutants)} {result.outcome:8} {result.seconds:5.1f} s  {where}")
    report(results)


if __name__ == "__main__":
    main()
