"""The benchmark suites that papers quote, with the wording of the DFlash paper's own benchmark.

Repositories, files and columns are those of the data sets' pages. Files are downloaded whole,
through huggingface-hub and its cache, or read from a local folder.
"""

from __future__ import annotations

import zipfile
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from itertools import zip_longest
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
WITH_STARTER = "Use the following code structure:"
WITHOUT_STARTER = "Write your code in the following format:"
# One English task of LongBench of each kind: one document, several, summary, search, code.
LONG_TASKS = ("multifieldqa_en", "hotpotqa", "gov_report", "passage_retrieval_en", "lcc")


@dataclass(frozen=True)
class Suite:
    """A benchmark on the hub.

    Attributes:
        repository: owner/name of the data set.
        file: the file in it: .jsonl, .parquet, or .zip with a .jsonl of each of `LONG_TASKS`.
        columns: the columns that `turns` reads. In "a|b" the first that exists counts.
        turns: a row's columns -> the user's messages, one per turn.
        more: further files like the first.
    """

    repository: str
    file: str
    columns: tuple[str, ...]
    turns: Callable[..., Turns]
    more: tuple[str, ...] = ()

    def prompts(self, name: str, path: Path) -> list[BenchPrompt]:
        """Read the prompts from the suite's file at `path`, in their order.

        Raises `DataError` for a file of another form, and `MissingDependencyError`.
        """
        found = []
        for number, row in enumerate(_rows(path), start=1):
            where = f"{name}, row {number} of {path}"
            first, *then = self.turns(*(_column(row, column, where) for column in self.columns))
            question = ({"role": "user", "content": first},)
            found.append(BenchPrompt(name, question, then=tuple(then), source=where))
        if not found:
            raise DataError(f"{path}: there is no prompt in it.")
        return found


def _column(row: dict[str, Any], names: str, where: str) -> Any:
    """A row's value under the first of the names that it has. Raises `DataError`."""
    found = next((name for name in names.split("|") if name in row), None)
    if found is None:
        raise DataError(f"{where}: there is no column {' or '.join(map(repr, names.split('|')))}.")
    return row[found]


def _template(template: str) -> Callable[[str], Turns]:
    return lambda question: (template.format(question),)


def _alpaca(instruction: str, inputs: str) -> Turns:
    return (f"{instruction}\n\nInput:\n{inputs}" if inputs else instruction,)


def _long(context: str, question: str) -> Turns:
    return (f"{context}\n\n{question}".strip(),)


def _contest(question: str, starter: str) -> Turns:
    form = WITH_STARTER if starter else WITHOUT_STARTER
    return (CONTEST.format(question, form, starter or "# YOUR CODE HERE"),)


SUITES = {
    "gsm8k": Suite(
        "openai/gsm8k", "main/test-00000-of-00001.parquet", ("question",), _template(MATH)
    ),
    "math500": Suite("HuggingFaceH4/MATH-500", "test.jsonl", ("problem",), _template(MATH)),
    "humaneval": Suite(
        "openai/openai_humaneval",
        "openai_humaneval/test-00000-of-00001.parquet",
        ("prompt",),
        _template(CODE),
    ),
    "mbpp": Suite(
        "google-research-datasets/mbpp",
        "sanitized/test-00000-of-00001.parquet",
        ("prompt|text",),
        _template("{}"),
    ),
    "mt-bench": Suite(
        "HuggingFaceH4/mt_bench_prompts", "raw/question.jsonl", ("prompt|turns",), tuple
    ),
    "aime24": Suite(
        "HuggingFaceH4/aime_2024",
        "data/train-00000-of-00001.parquet",
        ("problem",),
        _template(MATH),
    ),
    "aime25": Suite(
        "MathArena/aime_2025", "data/train-00000-of-00001.parquet", ("problem",), _template(MATH)
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
    "lbpp": Suite("CohereLabs/lbpp", "python/test.parquet", ("instruction",), _template("{}")),
    "swe-bench": Suite(
        "princeton-nlp/SWE-bench_Lite",
        "data/test-00000-of-00001.parquet",
        ("problem_statement",),
        _template(ISSUE),
    ),
    "arena-hard-v2": Suite(
        "lmarena-ai/arena-hard-auto",
        "data/arena-hard-v2.0/question.jsonl",
        ("prompt",),
        _template("{}"),
    ),
    "longbench": Suite("THUDM/LongBench", "data.zip", ("context", "input"), _long),
}


def suite_prompts(name: str, hub: Hub, folder: Path | None = None) -> list[BenchPrompt]:
    """The prompts of a suite of `SUITES`, downloaded unless they are cached.

    Args:
        folder: where to read it instead; see `local_files`.

    Raises:
        ModelNotFoundError, DownloadError: see `Hub.fetch`.
        MissingDependencyError: pyarrow is not installed and the file is a .parquet.
        DataError: a file is missing from the folder or has another form.
    """
    suite = SUITES[name]
    if folder is not None:
        paths = local_files(name, folder)
    else:
        files = (suite.file, *suite.more)
        paths = [hub.fetch_data(suite.repository, file) for file in files]
    return [prompt for path in paths for prompt in suite.prompts(name, path)]


def local_files(name: str, folder: Path) -> list[Path]:
    """The files of a suite in a folder: those of its repository, or one named after it.

    For "mt-bench": mt-bench.jsonl, mt_bench.jsonl, mt_bench_test.jsonl, or the same as .parquet.
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


def _rows(path: Path) -> Iterator[dict[str, Any]]:
    if path.suffix == ".parquet":
        return _parquet(path)
    if path.suffix == ".zip":
        return _zipped_tasks(path)
    return (parse_object(line, f"{path}, line {number}") for number, line in lines_of(path))


def _parquet(path: Path) -> Iterator[dict[str, Any]]:
    try:
        from pyarrow import ArrowException, parquet
    except ImportError as error:
        raise MissingDependencyError.of("Reading this suite needs pyarrow", "bench") from error
    try:
        yield from parquet.read_table(path).to_pylist()
    except (ArrowException, OSError) as error:
        raise DataError(f"{path}: not a complete Parquet file.") from error


def _zipped_tasks(path: Path) -> Iterator[dict[str, Any]]:
    """The rows of all tasks in turns, so that a few rows have some of each."""
    try:
        with zipfile.ZipFile(path) as archive:
            tasks = [archive.read(f"data/{task}.jsonl").decode() for task in LONG_TASKS]
    except (zipfile.BadZipFile, KeyError, UnicodeDecodeError) as error:
        raise DataError(f"{path}: not the expected archive ({error}).") from error
    for lines in zip_longest(*(task.split("\n") for task in tasks), fillvalue=""):
        yield from (parse_object(line, str(path)) for line in lines if line)
