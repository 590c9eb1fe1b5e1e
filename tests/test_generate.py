"""`generate`: where its prompt comes from, where its answer goes, and its counters."""

import errno
import json
import os
import stat
import subprocess

import pytest
import tinymodels
from oracle import Oracle
from program import run
from typer.testing import CliRunner

from dflash_mlx.cli.app import app
from dflash_mlx.cli.output import check_writable, write_file
from dflash_mlx.cli.pair import Pair
from dflash_mlx.errors import OutputError
from dflash_mlx.loop import generate
from dflash_mlx.machine.blas import BlasInfo
from dflash_mlx.prompt import encode_prompt

QUESTION = "what is 1 + 2?"
FULL = OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))


def invoke(*arguments, stdin: str | bytes = ""):
    """`generate` in this process."""
    given = ["generate", *map(str, arguments)]
    return CliRunner().invoke(app, given, input=stdin, prog_name="dflash-mlx")


def refused(*arguments, stdin: str | bytes = "", code: int = 2) -> str:
    """The one-line error of a run that ends before any model is loaded."""
    done = invoke(*arguments, "--model", "no/such-model", "--offline", stdin=stdin)
    assert done.exit_code == code and not done.stdout and done.stderr.count("\n") == 1
    assert "no/such-model" not in done.stderr
    return done.stderr


@pytest.fixture
def loaded(monkeypatch) -> Pair:
    """A pair that `generate` finds loaded, so that it can run in this process."""
    blas = BlasInfo("openblas", None, "made up")
    pair = Pair(tinymodels.target(), tinymodels.random_drafter(), 4, blas)
    monkeypatch.setattr("dflash_mlx.cli.generate.open_pair", lambda *_: pair)
    return pair


def expected(loaded: Pair, prompt=None, **settings):
    """What the library itself answers, drafted as the command line does it."""
    prompt = prompt or [{"role": "user", "content": QUESTION}]
    settings = {"max_tokens": 12, "block_size": loaded.block_size} | settings
    return generate(loaded.target, loaded.drafter, prompt, **settings)


def test_a_file_is_asked_and_a_file_is_written(pair, tmp_path):
    question, answer = tmp_path / "question.txt", tmp_path / "answer.json"
    question.write_text(QUESTION, encoding="utf-8")
    options = ["-n", "8", "--json", "--stats", "--system", "be brief", *pair]
    done = run("generate", "--file", question, "--output", answer, *options)
    assert done.returncode == 0 and not done.stdout, done.stderr
    messages = [{"role": "system", "content": "be brief"}, {"role": "user", "content": QUESTION}]
    content = json.loads(answer.read_text(encoding="utf-8"))
    assert content["text"] == generate(tinymodels.target(), None, messages, max_tokens=8).text
    assert content["stats"]["output_tokens"] == 8
    assert sorted(os.listdir(tmp_path)) == ["answer.json", "question.txt"]


@pytest.mark.parametrize("source", ["argument", "file", "stdin", "dash", "file dash"])
def test_every_source_of_a_prompt_is_the_same(source, loaded, tmp_path):
    file = tmp_path / "question.txt"
    file.write_text(QUESTION)
    arguments = {"argument": [QUESTION], "file": ["-f", file], "dash": ["-"]}
    arguments |= {"stdin": [], "file dash": ["--file", "-"]}
    stdin = "" if source in ("argument", "file") else QUESTION
    done = invoke(*arguments[source], "-n", "12", stdin=stdin)
    assert done.exit_code == 0 and done.stdout.removesuffix("\n") == expected(loaded).text


@pytest.mark.parametrize(
    "arguments",
    [
        ["-", "--file", "-"],
        ["hi", "--json", "--json-lines"],
        ["hi", "--system", "x", "--no-chat-template"],
    ],
)
def test_options_that_exclude_each_other(arguments):
    assert invoke(*arguments).exit_code == 2


def test_prompts_that_cannot_be_used(tmp_path):
    empty, binary = tmp_path / "empty.txt", tmp_path / "binary.txt"
    empty.write_text(" \n")
    binary.write_bytes(b"caf\xe9")
    missing = tmp_path / "nowhere.txt"
    assert f"{missing}: cannot be read (No such file" in refused("--file", missing, code=1)
    assert f"{tmp_path}: cannot be read (Is a directory)" in refused("--file", tmp_path, code=1)
    assert f"{empty} is empty" in refused("--file", empty)
    assert f"{binary} is not text in UTF-8" in refused("--file", binary)
    assert "The system message is empty" in refused("hi", "--system", " ")
    assert "The system message is not text" in refused("hi", "--system", "a\udcff")


@pytest.fixture
def scripted(monkeypatch) -> dict[str, object]:
    """A pair for `generate` that keeps 3, 0, 3 and 2 drafts of at most 3, and its counters."""
    target = tinymodels.target()
    ids = encode_prompt(target, [{"role": "user", "content": QUESTION}])
    answer = generate(target, None, ids, max_tokens=13).tokens

    def open_pair(*_, **__) -> Pair:
        oracle = Oracle(ids, answer, target.vocab_size, script=[3, 0, 3, 2])
        return Pair(target, oracle, 4, BlasInfo("openblas", None, "made up"))

    monkeypatch.setattr("dflash_mlx.cli.generate.open_pair", open_pair)
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


def test_the_counters_as_lines(scripted):
    asked = (QUESTION, "-n", "13")
    lines = invoke(*asked, "--stats").stderr.splitlines()
    shown = {line[:18].strip(): line[18:] for line in lines if line[:1].isalpha()}
    counts = {name: shown.pop(name) for name in [*shown][:7]}
    assert counts == {
        "prompt": f"{scripted['prompt_tokens']} tokens, 0 of them reused",
        "output": "13 tokens in 4 rounds",
        "drafted": "11 tokens",
        "accepted": "8 tokens, 72.7% of the drafted",
        "acceptance length": "3.00 tokens per round",
        "rounds x rows": "1 x 3, 3 x 4",
        "of these, trees": "none",
    }
    assert [*shown] == ["prefill", "decode", "first token", "peak memory"]
    assert "acceptance length" not in invoke(*asked).stderr


def test_the_counters_in_json(scripted):
    asked = (QUESTION, "-n", "13", "--json")
    done = invoke(*asked, "--stats")
    counted = json.loads(done.stdout)["stats"]
    assert not done.stderr and {name: counted.pop(name) for name in scripted} == scripted
    assert [*counted] == ["prefill_seconds", "decode_seconds", "first_token_seconds", "peak_bytes"]
    assert all(value > 0 for value in counted.values())
    assert "stats" not in json.loads(invoke(*asked).stdout)


def test_an_answer_in_a_file(loaded, tmp_path):
    answer = tmp_path / "answer.txt"
    answer.write_text("before")
    answer.chmod(0o600)
    done = invoke(QUESTION, "-n", "12", "--compare", "--output", answer)
    assert done.exit_code == 0 and not done.stdout and "identical" in done.stderr
    assert answer.read_text().removesuffix("\n") == expected(loaded).text
    assert os.listdir(tmp_path) == ["answer.txt"]
    assert stat.S_IMODE(answer.stat().st_mode) == 0o600


def test_a_title_has_a_models_folder_and_not_its_whole_path(loaded):
    assert os.path.isabs(loaded.target.name)
    assert loaded.title.startswith(os.path.basename(loaded.target.name) + " · block size 4 · ")


def test_outputs_that_cannot_work(tmp_path):
    nowhere, long = tmp_path / "no" / "a.txt", tmp_path / ("a" * 300)
    assert "is a folder:" in refused("hi", "--output", tmp_path, code=1)
    assert f"{nowhere}: cannot be written (No such file" in refused(
        "hi", "--output", nowhere, code=1
    )
    assert "cannot be written (File name too long)" in refused("hi", "--output", long, code=1)
    assert not os.listdir(tmp_path)


def test_devices_and_pipes_are_written_to_and_not_replaced(loaded, tmp_path):
    """`-o /dev/null`, and a shell's `-o >(less)`."""
    pipe = tmp_path / "pipe"
    os.mkfifo(pipe)
    reader = os.open(pipe, os.O_RDONLY | os.O_NONBLOCK)
    shown = invoke(QUESTION, "-n", "12").stdout
    for place in (pipe, "/dev/null"):
        done = invoke(QUESTION, "-n", "12", "--output", place)
        assert done.exit_code == 0 and not done.stdout, done.stderr
    assert os.read(reader, 10_000).decode() == shown
    assert stat.S_ISFIFO(pipe.stat().st_mode) and stat.S_ISCHR(os.stat("/dev/null").st_mode)
    os.close(reader)
    pipe.chmod(0)
    if os.geteuid():
        assert "Permission denied" in refused("hi", "--output", pipe, code=1)


@pytest.mark.skipif(os.geteuid() == 0, reason="root may write everywhere")
def test_a_folder_without_permission(tmp_path):
    tmp_path.chmod(0o500)
    assert "Permission denied" in refused("hi", "--output", tmp_path / "answer.txt", code=1)


@pytest.mark.parametrize("there", [False, True])
def test_a_disk_full_at_the_end_leaves_what_was_there(there, loaded, tmp_path, monkeypatch):
    answer = tmp_path / "answer.txt"
    if there:
        answer.write_text("before")

    def fsync(descriptor: int) -> None:
        raise FULL

    monkeypatch.setattr(os, "fsync", fsync)
    done = invoke(QUESTION, "-n", "2", "--output", answer)
    assert done.exit_code == 1 and not done.stdout
    assert done.stderr.startswith(f"error: {answer}: the disk is full, nothing was written;")
    assert done.stderr.count("\n") == 1
    assert [path.read_text() for path in tmp_path.iterdir()] == ["before"] * there


def test_a_disk_that_is_really_full(tmp_path):
    mounted = tmp_path / "small"
    mounted.mkdir()
    command = ["mount", "-t", "tmpfs", "-o", "size=16k", "tmpfs", str(mounted)]
    if os.geteuid() or subprocess.run(command, capture_output=True).returncode:
        pytest.skip("mounting is not allowed here")
    try:
        answer = mounted / "answer.txt"
        write_file(answer, "before")
        with pytest.raises(OutputError, match="the disk is full"):
            write_file(answer, "x" * 100_000)
        assert answer.read_text() == "before" and list(mounted.iterdir()) == [answer]
        subprocess.run(["mount", "-o", "remount,ro", str(mounted)], check=True)
        with pytest.raises(OutputError, match="Read-only"):
            check_writable(answer)
    finally:
        subprocess.run(["umount", str(mounted)], check=True)


def test_ctrl_c_writes_no_file(loaded, tmp_path, monkeypatch):
    import dflash_mlx

    def interrupted(*arguments, **settings):
        yield next(stream(*arguments, **settings))
        raise KeyboardInterrupt

    stream = dflash_mlx.stream_generate
    monkeypatch.setattr(dflash_mlx, "stream_generate", interrupted, raising=False)
    done = invoke(QUESTION, "-n", "12", "--output", tmp_path / "answer.txt")
    assert done.exit_code == 130 and not done.stdout and not list(tmp_path.iterdir())
