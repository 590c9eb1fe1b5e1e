"""How heavy the project is: lines by room, and the Python that one short answer runs.

    python scripts/weight.py            # everything
    python scripts/weight.py --lines    # the lines alone, without loading a model

The answer is the embedded pair's to "What is 47 plus 38?", with the default policy. The functions
are counted by a profiler while it is generated again, after a first answer has warmed it up.
"""

from __future__ import annotations

import argparse
import ast
import sys
from collections.abc import Iterable, Iterator
from pathlib import Path
from statistics import median
from types import CodeType, FrameType

ROOT = Path(__file__).resolve().parent.parent
PACKAGE = ROOT / "dflash_mlx"
PROMPT = "What is 47 plus 38?"
MAX_TOKENS = 77


def lines(files: Iterable[Path]) -> int:
    """Lines of all files together."""
    return sum(file.read_text().count("\n") for file in files)


def public_functions(tree: ast.AST) -> Iterator[ast.FunctionDef | ast.AsyncFunctionDef]:
    """Public functions and public methods of public classes, nested functions left out."""
    for node in ast.iter_child_nodes(tree):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            if not node.name.startswith("_"):
                yield node
        elif isinstance(node, ast.ClassDef) and not node.name.startswith("_"):
            yield from public_functions(node)


def rooms() -> dict[str, list[Path]]:
    """The files of each room. "package" has those of the package's folders and the command line."""
    by_room = {"root": [*PACKAGE.glob("*.py")]}
    for folder in (*sorted(PACKAGE.iterdir()), ROOT / "cli"):
        files = [] if folder.is_symlink() else [*folder.rglob("*.py")]
        if files:
            by_room[folder.name] = files
    return by_room | {
        "package": [file for files in by_room.values() for file in files],
        "metal": [*(ROOT / "metal").glob("*.[mh]*")],
        "tests": [*(ROOT / "tests").rglob("*.py")],
        "docs": [*(ROOT / "docs").rglob("*.md"), ROOT / "CHANGELOG.md"],
        "scripts": [file for file in (ROOT / "scripts").iterdir() if file.is_file()],
    }


def print_lines() -> None:
    """Print the table of lines."""
    for room, files in rooms().items():
        print(f"{room:10} {lines(files):6,}")

    package = rooms()["package"]
    texts = [line for file in package for line in file.read_text().splitlines() if line.strip()]
    public = [
        function for file in package for function in public_functions(ast.parse(file.read_text()))
    ]
    documented = sum(ast.get_docstring(function) is not None for function in public)
    print(f"{len(package)} files, median line {median(map(len, texts)):.0f} characters,")
    print(
        f"{len(public)} public functions, {documented / len(public):.1%} of them with a docstring"
    )


def print_calls() -> None:
    """Print how many functions one answer runs, and how many calls a step makes."""
    import dflash_mlx as dm

    dm.use_fast_blas()  # as the command line: with MLX's own BLAS, drafts often do not pay
    target, drafter = dm.load("tiny")
    policy = dm.DraftPolicy.of(target, drafter)
    messages = [{"role": "user", "content": PROMPT}]

    def answer() -> dm.Result:
        return dm.generate(target, drafter, messages, max_tokens=MAX_TOKENS, policy=policy)

    answer()
    counts: dict[CodeType, int] = {}  # calls of each function

    def count(frame: FrameType, event: str, _: object) -> None:
        if event == "call":
            counts[frame.f_code] = counts.get(frame.f_code, 0) + 1

    sys.setprofile(count)
    result = answer()
    sys.setprofile(None)
    package = str(PACKAGE)
    ours = {code: n for code, n in counts.items() if code.co_filename.startswith(package)}
    files = {code.co_filename for code in ours}
    calls = sum(counts.values())
    steps = max(1, result.stats.rounds)
    print(f"an answer of {len(result.tokens)} tokens in {steps} steps:")
    print(f"{len(ours)} functions of ours in {len(files)} files ({len(counts)} with libraries')")
    print(f"{sum(ours.values()) / steps:.0f} calls of ours per step ({calls / steps:.0f} of all)")


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--lines", action="store_true", help="count lines, load no model")
    options = parser.parse_args()
    print_lines()
    if not options.lines:
        print_calls()
