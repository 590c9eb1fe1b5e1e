"""`generate`: where its prompt comes from, and where its answer goes."""

import json
from pathlib import Path

import pytest
import tinymodels
from program import run
from typer.testing import CliRunner

from dflash_mlx.cli.app import app
from dflash_mlx.cli.output import write_whole
from dflash_mlx.loop import generate


def refused(*arguments: str) -> str:
    """The one-line error of a run that ends before any model is loaded."""
    done = CliRunner().invoke(app, ["generate", *arguments], prog_name="dflash-mlx")
    assert done.exit_code == 1 and not done.stdout and done.stderr.count("\n") == 1
    return done.stderr


def test_a_file_is_asked_and_a_file_is_written(pair, tmp_path):
    question, answer = tmp_path / "question.txt", tmp_path / "answer.json"
    question.write_text("what is 1 + 2?", encoding="utf-8")
    options = ["-n", "8", "--no-compare", "--json", "--system", "be brief", *pair]
    done = run("generate", "--file", question, "--output", answer, *options)
    assert done.returncode == 0 and not done.stdout, done.stderr
    messages = [
        {"role": "system", "content": "be brief"},
        {"role": "user", "content": "what is 1 + 2?"},
    ]
    expected = generate(tinymodels.target(), None, messages, max_tokens=8).text
    assert json.loads(answer.read_text(encoding="utf-8"))["text"] == expected
    assert sorted(path.name for path in tmp_path.iterdir()) == ["answer.json", "question.txt"]


def test_paths_that_cannot_work(tmp_path):
    assert "choose another --output" in refused("hi", "--output", str(tmp_path))
    assert "choose another --output" in refused("hi", "--output", str(tmp_path / "no" / "a.txt"))
    assert "No such file" in refused("--file", str(tmp_path / "nowhere.txt"))


@pytest.mark.parametrize(
    "arguments", [["hi", "--file", "x"], ["hi", "--system", "x", "--no-chat-template"]]
)
def test_options_that_exclude_each_other(arguments):
    done = CliRunner().invoke(app, ["generate", *arguments], prog_name="dflash-mlx")
    assert done.exit_code == 2


def test_a_failed_write_leaves_what_was_there(tmp_path, monkeypatch):
    path = tmp_path / "answer.txt"
    write_whole(path, "before")

    def full(self: Path, text: str, encoding: str) -> None:
        self.touch()
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(Path, "write_text", full)
    with pytest.raises(OSError, match="No space"):
        write_whole(path, "after")
    assert path.read_text() == "before" and list(tmp_path.iterdir()) == [path]
