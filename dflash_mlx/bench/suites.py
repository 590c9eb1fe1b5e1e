"""The benchmarks that people quote, asked as the DFlash paper's own benchmark asks.

Repositories, files and columns are those of the data sets' pages. Files are downloaded whole,
through huggingface-hub and its cache, or read from a folder of one's own.
"""

from __future__ import annotations

import io
import zipfile
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from itertools import chain, zip_longest
from pathlib import Path
from typing import Any

from ..errors import DataError, MissingDependencyError
from ..loading.hub import Hub
from .datasets import BenchPrompt, lines_of, parse_object

Turns = tuple[str, ...]
MATH = "{}\nPlease reason step by step, and put your final answer within \\boxed{{}}."
CODE = (
    "Write a solution to the following problem and make sure that it passes the tests:\n"
    "```python\n{}\n```"
)
ISSUE = "Problem Statement:\n{}\nPlease fix the issue described above."
# LiveCodeBench's own prompt for Python (lcb_runner/prompts/code_generation.py).
CONTEST = (
    "You are an expert Python programmer. You will be given a question (problem specification) and "
    "will generate a correct Python program that matches the specification and passes all tests. "
    "You will NOT return anything except for the program\n\n### Question:\n{}\n\n### Format: {}\n"
    "```python\n{}\n```\n\n### Answer: (use the provided format with backticks)"
)
GIVEN = "Use the following code structure:"
FREE = "Write your code in the following format:"
# Of LongBench's tasks one of each kind that is in English: questions about one text and about
# several, a summary, a search, and code to be completed.
LONG_TASKS = ("multifieldqa_en", "hotpotqa", "gov_report", "passage_retrieval_en", "lcc")


@dataclass(frozen=True)
class Suite:
    """A benchmark on the hub.

    Attributes:
        repository: owner/name of the data set.
        file: the file in it: .jsonl, .parquet, or .zip with .jsonl files in it.
        columns: what `turns` reads of a row; of names parted by a bar, the first that is there.
        turns: a row's columns -> what the user says, one turn after another.
        members: the files inside a .zip.
        more: further files like the first.
    """

    repository: str
    file: str
    columns: tuple[str, ...]
    turns: Callable[..., Turns]
    members: tuple[str, ...] = ()
    more: tuple[str, ...] = ()

    def prompts(self, name: str, path: Path) -> list[BenchPrompt]:
        """The suite's prompts in their order, read from its file at `path`.

        Raises `DataError` for a file that is not what it should be, `MissingDependencyError`.
        """
        found = []
        for number, row in enumerate(_rows(path, self.members), start=1):
            where = f"{name}, row {number} of {path}"
            first, *then = self.turns(*(_column(row, column, where) for column in self.columns))
            question = ({"role": "user", "content": first},)
            found.append(BenchPrompt(name, question, then=tuple(then), source=where))
        if not found:
            raise DataError(f"{path}: there is no prompt in it.")
        return found


def _column(row: dict[str, Any], names: str, where: str) -> Any:
    """A row's value under the first of some names that it has. Raises `DataError`."""
    found = next((name for name in names.split("|") if name in row), None)
    if found is None:
        raise DataError(f"{where}: there is no column {' or '.join(map(repr, names.split('|')))}.")
    return row[found]


def _asked(template: str) -> Callable[[str], Turns]:
    return lambda question: (template.format(question),)


def _alpaca(instruction: str, given: str) -> Turns:
    return (f"{instruction}\n\nInput:\n{given}" if given else instruction,)


def _long(context: str, question: str) -> Turns:
    return (f"{context}\n\n{question}".strip(),)


def _contest(question: str, starter: str) -> Turns:
    return (CONTEST.format(question, GIVEN if starter else FREE, starter or "# YOUR CODE HERE"),)


SUITES = {
    "gsm8k": Suite("openai/gsm8k", "main/test-00000-of-00001.parquet", ("question",), _asked(MATH)),
    "math500": Suite("HuggingFaceH4/MATH-500", "test.jsonl", ("problem",), _asked(MATH)),
    "humaneval": Suite(
        "openai/openai_humaneval",
        "openai_humaneval/test-00000-of-00001.parquet",
        ("prompt",),
        _asked(CODE),
    ),
    "mbpp": Suite(
        "google-research-datasets/mbpp",
        "sanitized/test-00000-of-00001.parquet",
        ("prompt|text",),
        _asked("{}"),
    ),
    "mt-bench": Suite(
        "HuggingFaceH4/mt_bench_prompts", "raw/question.jsonl", ("prompt|turns",), tuple
    ),
    "aime24": Suite(
        "HuggingFaceH4/aime_2024", "data/train-00000-of-00001.parquet", ("problem",), _asked(MATH)
    ),
    "aime25": Suite(
        "MathArena/aime_2025", "data/train-00000-of-00001.parquet", ("problem",), _asked(MATH)
    ),
    "alpaca": Suite(
        "tatsu-lab/alpaca",
        "data/train-00000-of-00001-a09b74b3ef9c3b56.parquet",
        ("instruction", "input"),
        _alpaca,
    ),
    "livecodebench": Suite(
        "livecodebench/code_generation_lite",
        "test.jsonl",
        ("question_content", "starter_code"),
        _contest,
        more=tuple(f"test{number}.jsonl" for number in range(2, 7)),
    ),
    "lbpp": Suite("CohereLabs/lbpp", "python/test.parquet", ("instruction",), _asked("{}")),
    "swe-bench": Suite(
        "princeton-nlp/SWE-bench_Lite",
        "data/test-00000-of-00001.parquet",
        ("problem_statement",),
        _asked(ISSUE),
    ),
    "arena-hard-v2": Suite(
        "lmarena-ai/arena-hard-auto",
        "data/arena-hard-v2.0/question.jsonl",
        ("prompt",),
        _asked("{}"),
    ),
    "longbench": Suite(
        "THUDM/LongBench",
        "data.zip",
        ("context", "input"),
        _long,
        members=tuple(f"data/{task}.jsonl" for task in LONG_TASKS),
    ),
}


def suite_prompts(name: str, hub: Hub, folder: Path | None = None) -> list[BenchPrompt]:
    """The prompts of a suite of `SUITES`, downloaded unless they are on this disk.

    Args:
        folder: where to read it instead; see `local_files`.

    Raises:
        ModelNotFoundError, DownloadError: see `Hub.fetch`.
        MissingDependencyError: a .parquet file, and pyarrow is not installed.
        DataError: a file that is missing from the folder, or not what it should be.
    """
    suite = SUITES[name]
    if folder is not None:
        paths = local_files(name, folder)
    else:
        files = (suite.file, *suite.more)
        paths = [hub.fetch_data(suite.repository, file) for file in files]
    return [prompt for path in paths for prompt in suite.prompts(name, path)]


def local_files(name: str, folder: Path) -> list[Path]:
    """The files of a suite in a folder: those of its repository, or one that is named after it.

    For "mt-bench": mt-bench.jsonl, mt_bench.jsonl, mt_bench_test.jsonl, or .parquet for .jsonl.
    Raises `DataError`.
    """
    suite = SUITES[name]
    published = [folder / file for file in (suite.file, *suite.more)]
    if published[0].is_file():
        return [path for path in published if path.is_file()]
    stems = dict.fromkeys(
        n + part for n in (name, name.replace("-", "_")) for part in ("", "_test")
    )
    for stem in stems:
        for suffix in (".jsonl", ".parquet"):
            if (folder / (stem + suffix)).is_file():
                return [folder / (stem + suffix)]
    raise DataError(f"{folder}: neither {suite.file} nor {name}.jsonl is there.")


def _rows(path: Path, members: tuple[str, ...]) -> Iterator[dict[str, Any]]:
    """The rows of a file, as objects; of several members in turn, one of each."""
    if path.suffix == ".parquet":
        return _parquet(path)
    if path.suffix == ".zip":
        each = _zipped(path, members)
        return (row for row in chain.from_iterable(zip_longest(*each)) if row is not None)
    return (parse_object(line, f"{path}, line {number}") for number, line in lines_of(path))


def _parquet(path: Path) -> Iterator[dict[str, Any]]:
    try:
        from pyarrow import ArrowException, parquet
    except ImportError as error:
        raise MissingDependencyError.of("Reading this suite needs pyarrow", "bench") from error
    try:
        yield from parquet.read_table(path).to_pylist()
    except (ArrowException, OSError) as error:
        raise DataError(f"{path}: not a Parquet file, or not a whole one.") from error


def _zipped(path: Path, members: tuple[str, ...]) -> list[list[dict[str, Any]]]:
    try:
        with zipfile.ZipFile(path) as archive:
            texts = [io.TextIOWrapper(archive.open(name), "utf-8").readlines() for name in members]
    except (zipfile.BadZipFile, KeyError, UnicodeDecodeError) as error:
        raise DataError(f"{path}: not the archive that was expected ({error}).") from error
    return [
        [parse_object(line, f"{path}, {name}, line {n}") for n, line in enumerate(lines, start=1)]
        for name, lines in zip(members, texts, strict=True)
    ]
