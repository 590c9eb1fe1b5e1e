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
        ["generate", "hi", "--kv-bits", "3"],
        ["generate", "hi", "--no-draft", "--draft", "x"],
        ["generate", "hi", "--quant-mode", "mxfp4"],
        ["generate", "hi", "--group-size", "32"],
        ["bench", "--repeats", "0"],
        ["bench", "--out", ""],
        ["train", "--out", "", "--synthesize", "2"],
        ["train", "--kind", "x"],
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


def test_what_is_not_there_is_not_wrong_usage(tmp_path):
    assert invoke("generate", "hi", "--model", tmp_path / "none").exit_code == 1
    assert invoke("generate", "--file", tmp_path / "none").exit_code == 1
    assert invoke("generate", "hi", "--json-schema", tmp_path / "none").exit_code == 1


def test_a_lookup_is_not_told_to_be_trained(pair):
    done = invoke("generate", "hi", "-n", "2", "-b", "200", *pair[:2], "--draft", "lookup")
    assert " that this drafter can have: give less." in done.stderr
    assert "trained" not in done.stderr
