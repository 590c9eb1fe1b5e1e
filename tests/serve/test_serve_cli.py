"""`dflash-mlx serve`: errors of its options."""

import socket

import pytest
from typer.testing import CliRunner

from dflash_mlx.cli.app import app
from dflash_mlx.errors import MissingDependencyError


def run(*arguments, **environment):
    done = CliRunner(env={"COLUMNS": "1000", **environment}).invoke(app, arguments)
    assert "Traceback" not in done.output
    return done.exit_code, done.output


@pytest.mark.parametrize(
    ("options", "word", "expected"),
    [
        (["--api-key-file", "no such file"], "cannot be read", 1),
        (["--api-key-file", "blank"], "empty", 2),
        (["--host", "192.0.2.1", "--no-auth"], "give a --host of this machine's", 1),
    ],
)
def test_errors_are_one_line(options, word, expected, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "blank").write_text("\n \n# no key yet\n")
    code, told = run("serve", *options)
    assert code == expected and word in told and told.strip().count("\n") == 0


def test_a_port_that_is_taken_is_told_before_the_weights_are_read():
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = str(taken.getsockname()[1])
        code, told = run("serve", "--port", port, "--model", "no such model")
    assert code == 1 and port in told and "another --port" in told


def test_without_the_extra_it_says_what_to_install(monkeypatch):
    import sys

    for name in [one for one in sys.modules if one.startswith("dflash_mlx.serve")]:
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.setitem(sys.modules, "uvicorn", None)
    code, told = run("serve", "--port", "0", "--model", "no such model")
    assert code == 1 and str(MissingDependencyError.of("", "serve")).strip(": ") in told
