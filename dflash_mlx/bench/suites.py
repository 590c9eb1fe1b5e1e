"""The benchmark suites that papers quote, with the wording of the DFlash paper's own benchmark.

suites.toml describes them. Files are downloaded whole, through huggingface-hub and its cache, or
read from a local folder.
"""

from __future__ import annotations

import tomllib
import zipfile
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from importlib.resources import files
from itertools import product, zip_longest
from pathlib import Path
from typing import Any

from ..errors import DataError, MissingDependencyError
from ..loading.hub import Hub
from .datasets import BenchPrompt, lines_of, parse_object

# One English task of LongBench of each kind: one document, several, summary, search, code.
LONG_TASKS = ("multifieldqa_en", "hotpotqa", "gov_report", "passage_retrieval_en", "lcc")


@dataclass(frozen=True)
class Suite:
    """A benchmark on the hub.

    Attributes:
        repository: owner/name of the data set.
        files: its files: .jsonl, .parquet, or a .zip with a .jsonl of each of `LONG_TASKS`.
        columns: the columns that the template reads. In "a|b" the first that exists counts.
        template: the user's message.
        short_template: the user's message where the last column is empty.
    """

    repository: str
    files: Sequence[str]
    columns: Sequence[str]
    template: str = "{}"
    short_template: str | None = None

    def turns(self, values: Sequence[Any]) -> tuple[str, ...]:
        """The user's messages for a row's values: one per item if the first value is a list."""
        if isinstance(values[0], list):
            return tuple(values[0])
        is_short = self.short_template is not None and not values[-1]
        template = self.short_template if is_short else self.template
        return (str(template).format(*values),)

    def prompts(self, name: str, path: Path) -> list[BenchPrompt]:
        """Read the prompts from the suite's file at `path`, in their order.

        Raises `DataError` for a file of another form, and `MissingDependencyError`.
        """
        found = []
        for number, row in enumerate(_rows(path), start=1):
            where = f"{name}, row {number} of {path}"
            first, *then = self.turns([_column(row, column, where) for column in self.columns])
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


def _read_suites() -> dict[str, Suite]:
    content = files(__package__).joinpath("suites.toml").read_text("utf-8")
    return {name: Suite(**fields) for name, fields in tomllib.loads(content).items()}


SUITES = _read_suites()


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
        paths = [hub.fetch_data(suite.repository, file) for file in suite.files]
    return [prompt for path in paths for prompt in suite.prompts(name, path)]


def local_files(name: str, folder: Path) -> list[Path]:
    """The files of a suite in a folder: those of its repository, or one named after it.

    For "mt-bench": mt-bench.jsonl, mt_bench.jsonl, mt_bench_test.jsonl, or the same as .parquet.
    Raises `DataError`.
    """
    suite = SUITES[name]
    published = [folder / file for file in suite.files]
    if published[0].is_file():
        return [path for path in published if path.is_file()]
    stems = (name, name.replace("-", "_"))
    for parts in product(stems, ("", "_test"), (".jsonl", ".parquet")):
        if (path := folder / "".join(parts)).is_file():
            return [path]
    raise DataError(f"{folder}: neither {suite.files[0]} nor {name}.jsonl is there.")


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
