"""What is asked wrongly on the command line: exit code 2, and a message that names the option."""

import pytest
import tinymodels
from typer.testing import CliRunner

from dflash_mlx.cli.app import ELSEWHERE, app
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
        ["generate", "hi", "--quant-mode", "mxfp4"],
        ["roofline", "--chip", "M9"],
        ["roofline", "--chip", "M4", "--acceptance", "0"],
        ["roofline", "--chip", "M4", "--acceptance", "4", "--machines", "2", "--link", "foo"],
        ["serve", "--host", "0.0.0.0"],
    ],
)
def test_so_it_is_for_every_command(arguments):
    done = invoke(*arguments)
    assert done.exit_code == 2 and not done.stdout, done.stderr


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["chat", "qwen3-8b"], "If it is a model: dflash-mlx chat --model qwen3-8b"),
        (["bench", "-n", 8, "tiny"], "If it is a model: dflash-mlx bench --model tiny"),
        (["chat", "How are you?"], "'chat' takes options alone, and 'How are you?' is none."),
        (["models", "tiny"], "'models' takes options alone, and 'tiny' is none."),
    ],
)
def test_a_word_where_only_options_are_is_told_where_a_models_name_belongs(arguments, said):
    done = invoke(*arguments)
    assert done.exit_code == 2 and said in done.stderr and not done.stdout
    assert ("model:" in said) == ("--model" in done.stderr)


@pytest.mark.parametrize(
    ("word", "said"),
    [
        ("run", "Did you mean 'chat --model NAME'?"),
        ("genrate", "Did you mean 'generate'?"),
        ("tiny", "A model stands behind a command: dflash-mlx chat --model tiny"),
        ("a/model", "A model stands behind a command: dflash-mlx chat --model a/model"),
        ("How are you?", "dflash-mlx generate 'How are you?'"),
        ("xyz", "No such command 'xyz'. dflash-mlx -h lists them."),
    ],
)
def test_a_first_word_that_is_no_command_is_told_what_was_likely_meant(word, said):
    done = invoke(word, "hi")
    assert done.exit_code == 2 and said in done.stderr and not done.stdout


def test_every_hint_at_another_programs_command_is_one_of_ours():
    for hint in ELSEWHERE.values():
        assert invoke(hint.split()[0], "--help").exit_code == 0, hint


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["generate", "-p", "hi"], "A prompt needs none: dflash-mlx generate TEXT"),
        (["generate", "--prompt", "hi"], "A prompt needs none: dflash-mlx generate TEXT"),
        (["chat", "--maxtokens", 3], "(Possible options: --max-tokens)"),
        (["chat", "--json"], "No such option: --json"),
    ],
)
def test_an_option_that_is_none_is_told_what_is_like_it_or_nothing(arguments, said):
    done = invoke(*arguments)
    assert done.exit_code == 2 and said in done.stderr
    assert ("Possible" in said) == ("Possible" in done.stderr)


@pytest.mark.parametrize("option", ["--block-size", "--tree-budget"])
def test_more_rows_than_there_can_be(option, pair):
    done = invoke("generate", "hi", "-n", "2", "--no-policy", option, 100_000, *pair)
    assert done.exit_code == 2 and done.stderr.startswith("error: "), done.stderr


@pytest.mark.parametrize("command", [["generate", "hi"], ["chat"], ["serve"], ["bench"], ["tune"]])
@pytest.mark.parametrize("option", [["--quant-mode", "mxfp4"], ["--group-size", "32"]])
def test_how_to_quantize_says_which_options_it_goes_with(command, option):
    done = invoke(*command, "--model", "/nowhere", *option)
    assert done.exit_code == 2, done.stderr
    assert f"{option[0]}: goes with --target-bits or --draft-bits" in done.stderr


def test_what_is_not_there_is_not_wrong_usage(tmp_path):
    assert invoke("generate", "hi", "--model", tmp_path / "none").exit_code == 1
    assert invoke("generate", "--file", tmp_path / "none").exit_code == 1
    assert invoke("generate", "hi", "--json-schema", tmp_path / "none").exit_code == 1


def test_a_lookup_is_not_told_to_be_trained(pair):
    done = invoke("generate", "hi", "-n", "2", "-b", "200", *pair[:2], "--draft", "lookup")
    assert " that this drafter can have: give less." in done.stderr
    assert "trained" not in done.stderr


@pytest.mark.parametrize(
    "arguments, said",
    [
        (["generate", "hi", "--kv-bits", "3"], "'--kv-bits': '3' is not one of '4', '8'."),
        (["generate", "hi", "--quant-mode", "x"], "'--quant-mode': 'x' is not one of 'affine'"),
        (["train", "--kind", "x"], "'--kind': 'x' is not one of"),
        (["bench", "--protocol", "x"], "'--protocol': 'x' is not one of"),
        (["launch", "x"], "'agent': 'x' is not one of 'claude'"),
    ],
)
def test_a_wrong_value_is_told_in_plain_words(arguments, said):
    done = invoke(*arguments)
    assert done.exit_code == 2 and f"Invalid value for {said}" in done.stderr, done.stderr


@pytest.mark.parametrize(
    "typed, meant, never", [("--temp", "--temperature", "--stop"), ("--sed", "--seed", "--temp")]
)
def test_an_option_that_is_not_there_may_be_the_beginning_of_one_that_is(typed, meant, never):
    done = invoke("generate", "hi", typed, "1")
    assert done.exit_code == 2 and f"No such option: {typed}" in done.stderr
    assert meant in done.stderr.partition(typed)[2] and never not in done.stderr, done.stderr
