"""`generate`: where its prompt comes from, where its answer goes, and what it reports."""

import errno
import json
import os
import re
import stat
from io import BytesIO, TextIOWrapper

import pytest
import tinymodels
from oracle import Oracle
from typer.testing import CliRunner

import dflash_mlx
from dflash_mlx.bench.results import PLAIN
from dflash_mlx.cli import generate as command
from dflash_mlx.cli.app import app
from dflash_mlx.cli.generate import read_prompt
from dflash_mlx.cli.pair import Pair
from dflash_mlx.loading.load import load
from dflash_mlx.loop import generate
from dflash_mlx.machine.blas import BlasInfo
from dflash_mlx.prompt import encode_prompt

QUESTION = "what is 1 + 2?"
REQUEST = (QUESTION, "-n", "12")
BLAS = BlasInfo("stock", None, "made up")


def invoke(*arguments, stdin: str | bytes = ""):
    """Run `generate` in this process."""
    command_line = ["generate", *map(str, arguments)]
    return CliRunner().invoke(app, command_line, input=stdin, prog_name="dflash-mlx")


def refused(*arguments, stdin: str | bytes = "", code: int = 2) -> str:
    """The one-line error of a run that ends before any model is loaded."""
    done = invoke(*arguments, "--model", "no/such-model", "--offline", stdin=stdin)
    assert done.exit_code == code and not done.stdout and done.stderr.count("\n") == 1
    assert "no/such-model" not in done.stderr
    return done.stderr


@pytest.fixture
def loaded(monkeypatch) -> Pair:
    """The pair that `generate` uses in place of loading one."""
    pair = Pair(tinymodels.target(), drafter=tinymodels.random_drafter(), block_size=4, blas=BLAS)
    monkeypatch.setattr(command, "open_pair", lambda *_, **__: pair)
    return pair


def answer_to(loaded: Pair, question: str = QUESTION) -> str:
    """The first 12 tokens of the answer, decoded without a drafter."""
    messages = [{"role": "user", "content": question}]
    return generate(loaded.target, None, messages, max_tokens=12).text


@pytest.mark.parametrize(
    "arguments, stdin, prompt",
    [
        ([QUESTION], "", QUESTION),
        ([QUESTION], "the notes\n", f"{QUESTION}\n\nthe notes"),
        (["-f", "FILE"], "the notes\n", "of a file\n\nthe notes"),
        ([QUESTION, "-f", "FILE"], "the notes", f"{QUESTION}\n\nof a file\n\nthe notes"),
        (["-", "-f", "FILE"], "the notes", "the notes\n\nof a file"),
        (["-f", "FILE", "-f", "-", "-f", "FILE"], "notes", "of a file\n\nnotes\n\nof a file"),
        ([QUESTION], " \n", QUESTION),
        (["-"], "the notes\r\n", "the notes"),
        (["-f", "FILE"], "", "of a file"),
        (["-"], "\ufeffthe notes", "the notes"),
        ([], "\nthe notes\n\n", "\nthe notes\n"),
    ],
)
def test_the_prompt_joins_the_argument_the_files_and_standard_input(
    arguments, stdin, prompt, loaded, tmp_path
):
    file = tmp_path / "file.txt"
    file.write_text("\ufeffof a file\n", "utf-8")  # with a byte order mark, as on Windows
    arguments = [str(file) if argument == "FILE" else argument for argument in arguments]
    done = invoke(*arguments, "-n", "12", stdin=stdin)
    assert done.exit_code == 0, done.stderr
    assert done.stdout.removesuffix("\n") == answer_to(loaded, prompt)


def test_unreadable_and_empty_prompts_are_refused(tmp_path):
    empty = tmp_path / "empty.txt"
    binary = tmp_path / "binary.txt"
    empty.write_text(" \n")
    binary.write_bytes(b"caf\xe9")
    missing = tmp_path / "nowhere.txt"
    assert f"{missing}: cannot be read (No such file" in refused("--file", missing, code=1)
    assert f"{empty} is empty" in refused("--file", empty)
    assert f"{binary} is not UTF-8" in refused("--file", binary)
    assert "UTF-8" in refused(QUESTION, stdin=b"\xff\xfe")
    assert "The system message is empty" in refused("hi", "--system", " ")


def test_a_note_on_a_terminal_says_how_much_was_read_from_standard_input(monkeypatch, capsys):
    """A shell's `while read line` loop would lose its other lines to the first call unnoticed."""
    monkeypatch.setattr("sys.stderr.isatty", lambda: True)
    monkeypatch.setattr("sys.stdin", TextIOWrapper(BytesIO(b"two\nthree\n")))
    assert read_prompt("one", []) == "one\n\ntwo\nthree"
    assert "With 2 lines of standard input." in capsys.readouterr().err


@pytest.fixture
def scripted(monkeypatch) -> dict[str, object]:
    """Have `generate` use a pair whose steps accept 3, 0, 3 and 2 drafts; return the statistics."""
    target = tinymodels.target()
    ids = encode_prompt(target, [{"role": "user", "content": QUESTION}])
    answer = generate(target, None, ids, max_tokens=13).tokens

    def open_pair(*_, **__) -> Pair:
        drafter = Oracle(ids, answer=answer, vocab_size=target.vocab_size, script=[3, 0, 3, 2])
        return Pair(target, drafter=drafter, block_size=4, blas=BLAS)

    monkeypatch.setattr(command, "open_pair", open_pair)
    return {
        "prompt_tokens": len(ids),
        "reused_tokens": 0,
        "output_tokens": 1 + 4 + 1 + 4 + 3,  # the first is the prefill's
        "rounds": 4,
        "drafted_tokens": 3 + 3 + 3 + 2,  # the last round has room for two
        "accepted_tokens": 3 + 0 + 3 + 2,
        "acceptance_length": 12 / 4,
        "acceptance_rate": 8 / 11,
        "widths": {"3": 1, "4": 3},
        "trees": {},
    }


def test_json_and_stats_show_all_statistics(scripted):
    request = (QUESTION, "-n", "13")
    done = invoke(*request, "--json")
    stats = json.loads(done.stdout)["stats"]
    assert not done.stderr
    assert {name: stats.pop(name) for name in scripted} == scripted
    assert list(stats) == [
        "prefill_seconds",
        "decode_seconds",
        "first_round_seconds",
        "first_token_seconds",
        "peak_bytes",
    ]
    assert all(value > 0 for value in stats.values())
    shown = invoke(*request, "--stats").stderr
    assert "accepted tokens     8\n" in shown and "acceptance rate     0.727\n" in shown
    assert "peak bytes" not in invoke(*request).stderr


def test_a_single_token_has_no_speed_to_compare(loaded):
    """The prefill brings it, so no step is timed."""
    request = ("What is 12 plus 7?", "-n", "1", "--compare")
    done = invoke(*request)
    assert "no step was timed" in done.stderr and "disturbed" not in done.stderr
    content = json.loads(invoke(*request, "--json").stdout)
    assert content["speedup"] is None and content["identical"] is True


def test_it_decodes_once_unless_asked_to_compare(loaded, monkeypatch):
    runs = []

    def compare(comparison, result, warn_if_busy):
        runs.append(comparison.run(PLAIN))

    monkeypatch.setattr(command, "_compare", compare)
    once = invoke(*REQUEST)
    assert not runs and "identical" not in once.stderr and "~" not in once.stderr
    twice = invoke(*REQUEST, "--compare")
    assert len(runs) == 1 and "identical to plain decoding: yes" in twice.stderr
    assert once.stdout == twice.stdout


def test_an_estimated_speedup_is_marked(loaded, monkeypatch):
    """Without --compare, the speed without a drafter is an estimate; here it is far too low."""
    monkeypatch.setattr(Pair, "plain_speed", lambda self: 1e-9)
    stderr = invoke(*REQUEST).stderr
    [plain, drafted] = [line for line in stderr.splitlines() if "tok/s" in line]
    assert "above the tokens of a step" in stderr
    assert re.match(r"\W*plain\b", plain) and " ~" in plain.partition("tok/s")[0]
    assert "drafted" in drafted and "x?" in drafted
    compared = invoke(*REQUEST, "--compare").stderr
    assert "~" not in compared and "identical" in compared


def test_an_answer_replaces_a_file_and_keeps_its_mode(loaded, tmp_path):
    answer = tmp_path / "answer.txt"
    answer.write_text("before")
    answer.chmod(0o600)
    done = invoke(*REQUEST, "--compare", "--output", answer)
    assert done.exit_code == 0 and not done.stdout and "identical" in done.stderr
    assert answer.read_text().removesuffix("\n") == answer_to(loaded)
    assert os.listdir(tmp_path) == ["answer.txt"]
    assert stat.S_IMODE(answer.stat().st_mode) == 0o600
    assert invoke(*REQUEST, "-o", "-").stdout.removesuffix("\n") == answer_to(loaded)


def test_outputs_that_cannot_be_written_are_refused_before_loading(tmp_path):
    nowhere = tmp_path / "no" / "a.txt"
    long = tmp_path / ("a" * 300)
    loop = tmp_path / "loop"
    loop.symlink_to(loop)
    assert "is a folder:" in refused("hi", "--output", tmp_path, code=1)
    assert "cannot be written (No such file" in refused("hi", "--output", nowhere, code=1)
    assert "cannot be written (File name too long)" in refused("hi", "--output", long, code=1)
    assert "cannot be written (Too many" in refused("hi", "--output", loop, code=1)
    assert os.listdir(tmp_path) == ["loop"] and loop.is_symlink()


def test_devices_and_pipes_are_written_to_and_not_replaced(loaded, tmp_path):
    """`-o /dev/null`, and a shell's `-o >(less)`."""
    pipe = tmp_path / "pipe"
    os.mkfifo(pipe)
    reader = os.open(pipe, os.O_RDONLY | os.O_NONBLOCK)
    shown = invoke(*REQUEST).stdout
    for output in (pipe, "/dev/null"):
        done = invoke(*REQUEST, "--output", output)
        assert done.exit_code == 0 and not done.stdout, done.stderr
    assert os.read(reader, 10_000).decode() == shown
    assert stat.S_ISFIFO(pipe.stat().st_mode) and stat.S_ISCHR(os.stat("/dev/null").st_mode)
    os.close(reader)


@pytest.mark.parametrize("exists", [False, True])
def test_a_disk_full_at_the_end_leaves_an_older_file_as_it_was(
    exists, loaded, tmp_path, monkeypatch
):
    answer = tmp_path / "answer.txt"
    if exists:
        answer.write_text("before")

    def fsync(descriptor: int) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(os, "fsync", fsync)
    done = invoke(QUESTION, "-n", "2", "--output", answer)
    assert done.exit_code == 1 and not done.stdout and "the disk is full" in done.stderr
    contents = [path.read_text() for path in tmp_path.iterdir()]
    assert contents == (["before"] if exists else [])


def test_ctrl_c_writes_no_file(loaded, tmp_path, monkeypatch):
    stream_generate = dflash_mlx.stream_generate

    def interrupted(*arguments, **settings):
        yield next(stream_generate(*arguments, **settings))
        raise KeyboardInterrupt

    monkeypatch.setattr(dflash_mlx, "stream_generate", interrupted, raising=False)
    done = invoke(*REQUEST, "--output", tmp_path / "answer.txt")
    assert done.exit_code == 130 and not done.stdout and not list(tmp_path.iterdir())


SCHEMA = {
    "type": "object",
    "properties": {"sum": {"type": "integer", "minimum": 0, "maximum": 99}},
    "required": ["sum"],
    "additionalProperties": False,
    "x-guidance": {"whitespace_flexible": False},
}


def test_an_answer_fits_a_schema(monkeypatch, tmp_path):
    """With --compare, the plain and the drafted run use the same processor."""
    pytest.importorskip("llguidance")
    target, drafter = load("tiny")
    pair = Pair(target, drafter=drafter, block_size=4, blas=BLAS)
    monkeypatch.setattr(command, "open_pair", lambda *_, **__: pair)
    file = tmp_path / "schema.json"
    file.write_text(json.dumps(SCHEMA))
    done = invoke("What is 12 plus 7?", "--json-schema", file, "--compare")
    assert done.exit_code == 0 and "identical to plain decoding: yes" in done.stderr
    assert 0 <= json.loads(done.stdout)["sum"] <= 99
    cut = invoke("What is 12 plus 7?", "--json-schema", file, "-n", 2)
    assert cut.exit_code == 2 and "The JSON is incomplete: cut off" in cut.stderr
