"""The suites of the hub, downloaded from a loopback server or read from a folder."""

import json
import sys
import zipfile
from pathlib import Path

import pyarrow
import pyarrow.parquet
import pytest
from hubserver import HubServer
from program import run

from dflash_mlx.bench.datasets import LONG_TASKS, SUITES, local_files, suite_prompts
from dflash_mlx.errors import DataError, DownloadError, MissingDependencyError, ModelNotFoundError
from dflash_mlx.loading.hub import Hub

PROBLEM = {"problem": "Find {x}.", "answer": "3", "solution": "..."}
ROWS = {  # rows with the real columns of the data sets: one, or two that differ
    "gsm8k": {"question": "How many?", "answer": "...#### 3"},
    "math500": PROBLEM | {"subject": "Algebra", "level": 2, "unique_id": "a/1"},
    "humaneval": {"task_id": "0", "prompt": "def f():\n", "canonical_solution": "", "test": ""},
    "mbpp": {"task_id": 2, "prompt": "Write f.", "code": "", "test_list": ["assert f()"]},
    "mt-bench": {"prompt": ["Write.", "Again."], "prompt_id": 1, "category": "writing"},
    "aime24": PROBLEM | {"id": 60, "url": "", "year": "2024"},
    "aime25": {"problem_idx": 1, "problem": "Find {x}.", "answer": 3, "problem_type": []},
    "alpaca": [
        {"instruction": "Sort.", "input": "3 1", "output": "1 3", "text": ""},
        {"instruction": "Say hi.", "input": "", "output": "hi", "text": ""},
    ],
    "livecodebench": [
        {"question_content": "Add.", "starter_code": "", "platform": "atcoder"},
        {"question_content": "Add.", "starter_code": "def add():", "platform": "leetcode"},
    ],
    "lbpp": {"task_id": "lbpp/0", "instruction": "Write g.", "completion": ""},
    "swe-bench": {"instance_id": "a__b-1", "problem_statement": "It {fails}.", "patch": ""},
    "arena-hard-v2": {"uid": "1", "category": "hard_prompt", "prompt": "Plan it."},
    "longbench": {"input": "Who?", "context": "A long text.", "answers": ["he"], "length": 9},
}
BOXED = "\nPlease reason step by step, and put your final answer within \\boxed{}."
FIRST_MESSAGES = {  # the first message of the first row's prompt
    "gsm8k": "How many?" + BOXED,
    **dict.fromkeys(("math500", "aime24", "aime25"), "Find {x}." + BOXED),
    "humaneval": "Write a solution to the following problem and make sure that it passes the "
    "tests:\n```python\ndef f():\n\n```",
    "mbpp": "Write f.",
    "mt-bench": "Write.",
    "livecodebench": "You are an expert Python programmer. You will be given a question (problem "
    "specification) and will generate a correct Python program that matches the specification and "
    "passes all tests. You will NOT return anything except for the program\n\n### Question:\nAdd."
    "\n\n### Format: Write your code in the following format:\n```python\n# YOUR CODE HERE\n```\n\n"
    "### Answer: (use the provided format with backticks)",
    "lbpp": "Write g.",
    "swe-bench": "Problem Statement:\nIt {fails}.\nPlease fix the issue described above.",
    "arena-hard-v2": "Plan it.",
    "alpaca": "Sort.\n\nInput:\n3 1",
    "longbench": "A long text.\n\nWho?",
}


def write(name: str, file: Path, rows: list[dict]) -> None:
    """Write a suite's file in the format that its suffix says."""
    file.parent.mkdir(parents=True)
    lines = "\n".join(map(json.dumps, rows))
    if file.suffix == ".parquet":
        pyarrow.parquet.write_table(pyarrow.Table.from_pylist(rows), file)
    elif file.suffix == ".zip":
        with zipfile.ZipFile(file, "w") as archive:
            for task in LONG_TASKS:
                archive.writestr(f"data/{task}.jsonl", lines.replace("Who?", f"Who? {task}"))
    else:
        file.write_text(lines)


@pytest.fixture
def local(tmp_path):
    """A hub server on the loopback, and a hub client with an empty cache."""
    server = HubServer()
    with server.running():
        yield server, Hub(endpoint=server.url, cache=tmp_path / "cache")


def serve(server: HubServer, name: str, folder: Path, rows: list[dict]) -> None:
    """Let the server have a suite: `rows` in its first file, one other row in each further file."""
    suite = SUITES[name]
    write(name, folder / suite.files[0], rows)
    for number, file in enumerate(suite.files[1:]):
        changed = [rows[0] | {"number": number}]  # files of equal content would be fetched once
        write(name, folder / f"more{number}" / file, changed)
        (folder / f"more{number}" / file).rename(folder / file)
    server.repositories[suite.repository] = folder


@pytest.mark.parametrize("name", SUITES)
def test_a_suite_is_downloaded_once_and_gives_its_prompts(name, local, tmp_path):
    server, hub = local
    rows = ROWS[name] if isinstance(ROWS[name], list) else [ROWS[name]] * 2
    serve(server, name=name, folder=tmp_path / "repository", rows=rows)
    prompts = suite_prompts(name, hub)
    assert {prompt.category for prompt in prompts} == {name}
    files = SUITES[name].files
    first = prompts[0].question
    if name == "longbench":  # its tasks alternate
        tasks = [prompt.question.rpartition(" ")[2] for prompt in prompts]
        assert tasks == [*LONG_TASKS, *LONG_TASKS]
        first = first.removesuffix(f" {LONG_TASKS[0]}")
    else:
        assert len(prompts) == 1 + len(files)
    assert first == FIRST_MESSAGES[name]
    assert prompts[0].then == (("Again.",) if name == "mt-bench" else ())
    assert suite_prompts(name, hub) == prompts
    assert server.fetched() == {Path(file).name: 1 for file in files}
    assert suite_prompts(name, Hub(cache=hub.cache, offline=True)) == prompts


def test_a_suite_that_cannot_be_downloaded_is_an_error(local, tmp_path):
    server, hub = local
    with pytest.raises(ModelNotFoundError, match="openai/gsm8k"):
        suite_prompts("gsm8k", hub)
    with pytest.raises(DownloadError, match="openai/gsm8k is not downloaded"):
        suite_prompts("gsm8k", Hub(cache=hub.cache, offline=True))
    result = run("bench", "--suite", "gsm8k", "--offline")
    assert result.returncode == 1 and result.stderr.count("\n") == 1


@pytest.mark.parametrize(
    "name, content",
    [
        ("gsm8k", b"PAR1 broken"),
        ("math500", b'{"problem": "fine"}\n{"problem'),
        ("math500", b'{"question": "no such column"}'),
        ("math500", b""),
        ("longbench", b"PK broken"),
    ],
)
def test_the_error_for_a_damaged_file_names_it(name, content, tmp_path):
    file = tmp_path / Path(SUITES[name].files[0]).name
    file.write_bytes(content)
    with pytest.raises(DataError, match=file.name) as error:
        SUITES[name].prompts(name, file)
    assert "\n" not in str(error.value)


def test_without_pyarrow_the_error_says_what_to_install(tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "pyarrow", None)
    with pytest.raises(MissingDependencyError, match=r'pip install -e ".\[bench\]"'):
        SUITES["gsm8k"].prompts("gsm8k", tmp_path / "a.parquet")


@pytest.mark.parametrize(
    ("suite", "file", "row"),
    [
        ("gsm8k", "gsm8k_test.jsonl", {"question": "How\u2028many?"}),
        ("mt-bench", "mt_bench.jsonl", {"turns": ["How\u2028many?", "And now?"]}),
        ("mbpp", "mbpp.jsonl", {"text": "How\u2028many?", "task_id": 2}),
        ("math500", "test.jsonl", {"problem": "How\u2028many?"}),
        ("arena-hard-v2", "arena-hard-v2.jsonl", {"prompt": "How\u2028many?"}),
    ],
)
def test_suites_are_read_from_a_folder(tmp_path, suite, file, row):
    """A line separator in a text does not end a line of the file."""
    line = json.dumps(row, ensure_ascii=False)
    (tmp_path / file).write_text(f"{line}\n\n{line}\n", encoding="utf-8")
    prompts = suite_prompts(suite, Hub(offline=True), tmp_path)
    assert len(prompts) == 2 and prompts[0].question.startswith("How\u2028many?")
    assert prompts[0].then == (("And now?",) if suite == "mt-bench" else ())


def test_local_files_of_published_names_are_preferred(tmp_path):
    with pytest.raises(DataError, match="neither test.jsonl nor livecodebench.jsonl"):
        local_files("livecodebench", tmp_path)
    for name in ("livecodebench.jsonl", "test.jsonl", "test3.jsonl"):
        (tmp_path / name).write_text("{}")
    names = [path.name for path in local_files("livecodebench", tmp_path)]
    assert names == ["test.jsonl", "test3.jsonl"]


def test_the_error_for_a_missing_column_has_its_possible_names(tmp_path):
    (tmp_path / "mbpp.jsonl").write_text('{"question": "?"}')
    with pytest.raises(DataError, match="'prompt' or 'text'"):
        suite_prompts("mbpp", Hub(offline=True), tmp_path)
