"""What is asked wrongly on the command line: exit code 2, and a message that names the option."""

import pytest
import tinymodels
from typer.testing import CliRunner

from dflash_mlx.cli.app import app
from dflash_mlx.cli.pair import Pair
from dflash_mlx.machine.blas import BlasInfo


def invoke(*arguments):
    """A run in this process."""
    given = map(str, arguments)
    environment = {"COLUMNS": "1000", "TERM": "dumb"}
    return CliRunner(env=environment).invoke(app, list(given), prog_name="dflash-mlx")


@pytest.fixture
def loaded(monkeypatch) -> Pair:
    """A pair that `generate` finds loaded."""
    blas = BlasInfo("openblas", None, "made up")
    pair = Pair(tinymodels.target(), tinymodels.random_drafter(), None, blas)
    monkeypatch.setattr("dflash_mlx.cli.generate.open_pair", lambda *_: pair)
    return pair


@pytest.mark.parametrize(
    "options",
    [["-t", "inf"], ["-t", "1", "--top-p", "0"], ["-t", "1", "--seed", 10**20], ["--stop", ""]],
)
def test_what_the_library_refuses_of_options_is_wrong_usage(options, loaded):
    done = invoke("generate", "hi", *options)
    assert done.exit_code == 2 and done.stderr.startswith("error: "), done.stderr
    assert done.stderr.count("\n") == 1 and not done.stdout


@pytest.mark.parametrize(
    "arguments",
    [
        ["generate", ""],
        ["generate", "hi", "--max-tokens", "-1"],
        ["generate", "hi", "--block-size", "0"],
        ["generate", "hi", "--no-draft", "--draft", "x"],
        ["generate", "hi", "--quant-mode", "mxfp4"],
        ["bench", "--repeats", "0"],
        ["launch", "x"],
        ["roofline", "--chip", "M9"],
        ["serve", "--host", "0.0.0.0"],
    ],
)
def test_wrong_usage(arguments):
    done = invoke(*arguments)
    assert done.exit_code == 2 and not done.stdout, done.stderr


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["genrate", "hi"], "'generate'"),
        (["chat", "--maxtokens", 3], "--max-tokens"),
        (["chat", "qwen3-8b"], "qwen3-8b"),
        (["generate", "How", "are", "you?"], "are you?"),
    ],
)
def test_a_word_that_is_no_command_or_option_is_named(arguments, said):
    done = invoke(*arguments)
    assert done.exit_code == 2 and said in done.stderr and not done.stdout


@pytest.mark.parametrize("option", ["--block-size", "--tree-budget"])
def test_more_rows_than_there_can_be(option, pair):
    done = invoke("generate", "hi", "-n", "2", "--no-policy", option, 100_000, *pair)
    assert done.exit_code == 2 and done.stderr.startswith("error: "), done.stderr
