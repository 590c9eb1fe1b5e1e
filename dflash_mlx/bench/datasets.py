"""The prompts of a benchmark: the embedded ones, a JSONL file, or suites that papers quote.

suites.toml describes the suites. Their files are downloaded whole, through huggingface-hub and its
cache, or read from a local folder.
"""

from __future__ import annotations

import tomllib
import zipfile
from collections import defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from importlib.resources import files
from itertools import count, product, zip_longest
from pathlib import Path
from random import Random
from typing import Any

from ..errors import DataError, MissingDependencyError
from ..loading.contents import check_is_text
from ..loading.hub import Hub
from ..validation import UTF8, is_message, parse_json, path_kind

PROTOCOL_SEED = 42
PROTOCOL_PROMPTS = 128
PROTOCOL_MAX_TOKENS = 2048
# One English task of LongBench of each kind: one document, several, summary, search, code.
LONG_TASKS = ("multifieldqa_en", "hotpotqa", "gov_report", "passage_retrieval_en", "lcc")


@dataclass(frozen=True)
class BenchPrompt:
    """One conversation to answer.

    Attributes:
        category: results are summed up by it.
        messages: chat messages ({"role", "content"}), the last one the user's.
        answer: the only right answer, where there is one.
        then: what the user says next, after each answer.
        source: where the prompt comes from, for error messages.
    """

    category: str
    messages: tuple[dict[str, str], ...]
    answer: str | None = None
    then: tuple[str, ...] = ()
    source: str = field(default="", compare=False)

    @property
    def question(self) -> str:
        """The last message."""
        return self.messages[-1]["content"]

    def answered(self, text: str) -> BenchPrompt | None:
        """The conversation with this answer and the user's next turn; None when it is over."""
        if not self.then:
            return None
        turns = ({"role": "assistant", "content": text}, {"role": "user", "content": self.then[0]})
        return replace(self, messages=(*self.messages, *turns), answer=None, then=self.then[1:])


def embedded_prompts() -> list[BenchPrompt]:
    """The held-out prompts of the embedded pair."""
    return read_prompts(Path(str(files("dflash_mlx").joinpath("tiny", "prompts.jsonl"))))


def read_prompts(path: Path) -> list[BenchPrompt]:
    """Read JSON lines of {"prompt": text} or {"messages": [...]}.

    "category" and "answer" are optional, empty lines are skipped. Raises `DataError`, which names
    the line.
    """
    prompts = []
    for number, line in numbered_lines(path):
        source = f"{path}, line {number}"
        prompts.append(_parse(parse_object(line, source), source))
    if not prompts:
        raise DataError(f"{path}: there is no prompt in it.")
    return prompts


def numbered_lines(path: Path) -> Iterator[tuple[int, str]]:
    """The lines of a text file that are not empty, with their numbers, one at a time.

    Raises `DataError`.
    """
    check_is_text(path)
    try:
        with path.open(encoding=UTF8, newline="\n") as file:
            for number, line in enumerate(file, start=1):
                if line.strip():
                    yield number, line
    except OSError as error:
        raise DataError(f"{path}: cannot be read ({error.strerror}).") from error
    except UnicodeDecodeError as error:
        raise DataError(f"{path}: not a text file in UTF-8.") from error


def parse_object(text: str, source: str) -> dict[str, Any]:
    """Parse a JSON object. Raises `DataError`, which names the source."""
    row = parse_json(text, source, DataError)
    if not isinstance(row, dict):
        raise DataError(f"{source}: a JSON object is expected.")
    return row


def limit_per_category(prompts: list[BenchPrompt], limit: int) -> list[BenchPrompt]:
    """The first `limit` prompts of each category, in their order."""
    numbers: dict[str, Iterator[int]] = defaultdict(count)
    return [prompt for prompt in prompts if next(numbers[prompt.category]) < limit]


def choose_protocol_prompts(suite: Sequence[BenchPrompt]) -> list[BenchPrompt]:
    """The prompts of z-lab's protocol (github.com/z-lab/dflash, dflash/benchmark.py).

    The first `PROTOCOL_PROMPTS` of a shuffled suite; a smaller suite keeps its order.
    """
    chosen = list(suite)
    if len(chosen) > PROTOCOL_PROMPTS:
        Random(PROTOCOL_SEED).shuffle(chosen)
    return chosen[:PROTOCOL_PROMPTS]


def _parse(row: dict[str, Any], source: str) -> BenchPrompt:
    if ("prompt" in row) == ("messages" in row):
        raise DataError(f'{source}: an object with either "prompt" or "messages" is expected.')
    messages = row.get("messages", [{"role": "user", "content": row.get("prompt")}])
    valid = isinstance(messages, list) and messages and all(map(is_message, messages))
    if not valid or not all(message["content"].strip() for message in messages):
        raise DataError(f'{source}: messages need a "role" and a "content" that is not empty.')
    category = row.get("category", "prompts")
    answer = row.get("answer")
    if not isinstance(category, str) or not isinstance(answer, str | None):
        raise DataError(f'{source}: "category" and "answer" must be text.')
    return BenchPrompt(category, tuple(messages), answer, source=source)


# Suites


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

    def prompts(self, name: str, path: Path) -> list[BenchPrompt]:
        """Read the prompts from the suite's file at `path`, in their order.

        A row's user messages are one per item if the first column is a list. Raises `DataError` for
        a file of another form, and `MissingDependencyError`.
        """
        prompts = []
        for number, row in enumerate(_rows(path), start=1):
            where = f"{name}, row {number} of {path}"
            values: list[Any] = []
            for names in self.columns:
                present = [column for column in names.split("|") if column in row]
                if not present:
                    either = " or ".join(map(repr, names.split("|")))
                    raise DataError(f"{where}: there is no column {either}.")
                values.append(row[present[0]])
            template = self.template
            if self.short_template is not None and not values[-1]:
                template = self.short_template
            turns = values[0] if isinstance(values[0], list) else [template.format(*values)]
            question = ({"role": "user", "content": turns[0]},)
            prompts.append(BenchPrompt(name, question, then=tuple(turns[1:]), source=where))
        if not prompts:
            raise DataError(f"{path}: there is no prompt in it.")
        return prompts


_SUITES = tomllib.loads(files(__package__).joinpath("suites.toml").read_text("utf-8"))
SUITES = {name: Suite(**fields) for name, fields in _SUITES.items()}


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
    downloads = (hub.fetch_data(suite.repository, file) for file in suite.files)
    paths = downloads if folder is None else local_files(name, folder)
    return [prompt for path in paths for prompt in suite.prompts(name, path)]


def local_files(name: str, folder: Path) -> list[Path]:
    """The files of a suite in a folder: those of its repository, or one named after it.

    For "mt-bench": mt-bench.jsonl, mt_bench.jsonl, mt_bench_test.jsonl, or the same as .parquet.
    Raises `DataError`.
    """
    suite = SUITES[name]
    published = [folder / file for file in suite.files]
    if path_kind(published[0]) == "file":
        return [path for path in published if path_kind(path) == "file"]
    stems = (name, name.replace("-", "_"))
    for parts in product(stems, ("", "_test"), (".jsonl", ".parquet")):
        path = folder / "".join(parts)
        if path_kind(path) == "file":
            return [path]
    raise DataError(f"{folder}: neither {suite.files[0]} nor {name}.jsonl is there.")


def _rows(path: Path) -> Iterator[dict[str, Any]]:
    if path.suffix == ".parquet":
        return _parquet(path)
    if path.suffix == ".zip":
        return _zipped_tasks(path)
    return (parse_object(line, f"{path}, line {number}") for number, line in numbered_lines(path))


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
