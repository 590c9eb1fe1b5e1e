"""Wrong use of the command line: exit code 2, and a message that names the option."""

import shlex
import socket
import sys

import pytest
from program import run
from typer import Exit

from dflash_mlx.cli.app import FREE_TEXT, Commands
from dflash_mlx.cli.failures import one_line_errors
from dflash_mlx.errors import MissingDependencyError, SettingsError


def invoke(*arguments):
    return run(*arguments, COLUMNS="1000", TERM="dumb")


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ("generate hi -n many", "--max-tokens must be a whole number from 0 on, not 'many'."),
        ("generate hi -n -1", "--max-tokens must be a whole number from 0 on,"),
        ("generate hi -b 0", "--block-size must be a whole number from 1 to"),
        ("generate hi -t hot", "--temperature must be 0 (greedy) or from 1e-20 to"),
        ("serve --port 70000", "--port must be at most 65535, not 70000."),
        ("bench -t -1", "--temperature must be 0 (greedy) or from 1e-20 to 1e20, not -1.0."),
        ("generate hi -t inf", "--temperature must be 0 (greedy) or from"),
        ("generate hi --top-p 0", "--top-p must be above 0 and at most 1"),
        ("generate hi --seed 100000000000000000000", "--seed must be a whole number from 0 to"),
        ("generate hi --stop ''", "--stop: the value is empty."),
        ("bench --repeats 0", "--repeats must be at least 1, not 0."),
        ("bench --suite nope", "--suite must be one of embedded, gsm8k,"),
        (
            "bench --tree-budget many",
            "--tree-budget must be a whole number from 2 to 1,024 or auto, not 'many'.",
        ),
        ("bench --draft none", "--draft must not be none here: name a drafter."),
        ("launch x", "AGENT: 'x' is not one of 'claude', 'codex', 'opencode'."),
        ("pull", "NAME is missing."),
        ("generate ''", "The prompt is empty"),
        ("generate -n", "Option '-n' requires an argument."),
        ("generate How are you?", "Got unexpected extra argument(s) (are you?): put quotes around"),
        ("run tiny hi", "There is no command 'run': dflash-mlx chat --model NAME."),
        ("download tiny", "There is no command 'download': dflash-mlx pull NAME."),
        (
            "generate hi --temp -1",
            "--temperature must be 0 (greedy) or from 1e-20 to 1e20, not -1.0.",
        ),
        ("generate hi --top-k=-1", "--top-k must be a whole number from 0 on,"),
        ("generate -p hi --max-new-tokens=-1", "--max-tokens must be a whole number from 0 on,"),
        ("generate --prompt=hi --draft-model none --tree-budget 8", "--tree-budget cannot be"),
        ("generate hi --no-thinking --reasoning-effort low", "--reasoning-effort cannot"),
        ("genrate hi", "No such command 'genrate'. Did you mean 'generate'? See"),
        ("chat --maxtokens 3", "No such option: --maxtokens. Did you mean --max-tokens? See"),
        ("generate hi --no-policyy", "No such option: --no-policyy. Did you mean --no-policy? See"),
        ("generate", "No prompt: give one as an argument, or pipe it in."),
        ("--nope", "No such option: --nope."),
        ("models --chip M9", "Unknown chip 'M9': choose one of"),
        ("models --inspect . --chip M4", "--chip cannot be combined with --inspect"),
        ("serve --host 0.0.0.0", "--host 0.0.0.0 lets other machines in: give --api-key, or"),
        ("serve --api-key ''", "--api-key: the value is empty."),
        ("serve --port 0 --no-draft --top-p 0", "--top-p must be above 0"),
        ("generate hi --json-schema 5", "--json-schema takes a JSON schema, such as"),
        (f"generate hi --json-schema {'[' * 300}", "--json-schema takes a JSON schema, such as"),
        ("generate hi --target-bits 8 --quant-mode mxfp4", ""),
    ],
)
def test_wrong_arguments_give_one_line(arguments, message):
    """It has no box, no usage text, and no wording of a validator."""
    done = invoke(*shlex.split(arguments))
    assert done.returncode == (1 if "schema" in arguments else 2), done.stderr
    assert not done.stdout and done.stderr.count("\n") == 1
    assert done.stderr.startswith(f"error: {message}"), done.stderr


NAMED = [(command, parameter) for command in Commands().values() for parameter in command.params]


@pytest.mark.parametrize(
    ("command", "parameter"),
    [
        pytest.param(command, parameter, id=f"{command.name} {parameter.opts[0]}")
        for command, parameter in NAMED
        if not getattr(parameter, "is_flag", False) and parameter.name not in FREE_TEXT
    ],
)
def test_an_empty_value_is_refused(command, parameter):
    """A script's unset variable: an empty name would be ignored, an empty path mean `.`."""
    is_option = parameter.opts[0].startswith("-")
    given = (f"{parameter.opts[0]}=",) if is_option else ("",)
    shown = parameter.opts[0] if is_option else (parameter.metavar or parameter.name).upper()
    done = invoke(command.name, *given)
    assert done.returncode == 2 and not done.stdout
    expected = f"error: {shown}: the value is empty. See 'dflash-mlx {command.name} --help'.\n"
    assert done.stderr == expected


def test_completion_goes_on_after_an_empty_value():
    """A shell completes a line that is not finished, in which nothing is refused yet."""
    arguments = ["--model", "", "--draft"]
    context = Commands()["generate"].make_context("generate", arguments, resilient_parsing=True)
    assert context.params["model"] == ""


def test_help_comes_before_an_empty_value():
    """Somebody who asks for help gets it, whatever else the line says."""
    done = invoke("generate", "--model", "", "--help")
    assert done.returncode == 0 and "--model" in done.stdout and not done.stderr


def test_an_agent_gets_empty_arguments():
    context = Commands()["launch"].make_context("launch", ["codex", "--", "exec", ""])
    assert [*context.params["arguments"]] == ["exec", ""]


@pytest.mark.parametrize(
    "arguments",
    [
        "generate hi --model",
        "generate hi --draft",
        "generate hi --adapter",
        "serve --port 0 --api-key-file",
        "chat --resume",
        "doctor --hosts",
        "models --inspect",
    ],
)
def test_the_home_folder_of_an_unknown_user_is_one_line(arguments):
    done = invoke(*arguments.split(), "~no-such-user/x")
    assert done.returncode in (1, 2) and not done.stdout, done.stderr
    assert done.stderr.count("\n") == 1 and "~no-such-user/x" in done.stderr


TRAIN = "train --out x --synthesize 2"


@pytest.mark.parametrize(
    ("command", "options"),
    [
        ("generate hi", "--kv-bits 5"),
        ("tune", "--kv-bits 5"),
        ("generate hi", "--target-bits 3"),
        ("generate hi", "--draft-bits 5"),
        ("generate hi --target-bits 4", "--quant-mode nope"),
        (TRAIN, "--target-bits 3"),
        (TRAIN, "--kind nope"),
        (TRAIN, "--store-bits 5"),
    ],
)
def test_a_wrong_value_fails_before_anything_is_loaded(command, options):
    done = invoke(*command.split(), "--model", "no-such/model", *options.split())
    assert done.returncode == 2 and not done.stdout, done.stderr
    assert options.split()[1] in done.stderr and "Value error" not in done.stderr


SERVED = "http://localhost:1"
WITHOUT_EFFECT = {  # per command: an option, and the options refused together with it
    "generate hi --no-draft": ("--no-draft", "--draft tiny, --block-size 4, --compare"),
    "chat --no-draft": ("--no-draft", "--no-policy"),
    "serve --no-draft": ("--no-draft", "--draft-bits 4, --tree-budget 8"),
    "generate hi -d none": ("--draft none", "--block-size 4, --compare"),
    "bench --draft lookup": ("--draft lookup", "--tree-budget 8, --draft-bits 4"),
    "generate hi": ("--target-bits", "--quant-mode mxfp4, --group-size 32"),
    "tune": ("--target-bits", "--group-size 32"),
    "generate hi --tree-budget auto": ("--tree-budget auto", "--block-size 4"),
    "bench --tree-budget auto": ("--tree-budget auto", "--block-size 4"),
    "generate hi --no-chat-template": ("--no-chat-template", "--system x, --no-think"),
    f"bench --openai {SERVED}": ("--openai", "--no-think, --adapter x, --draft tiny"),
    f"bench --openai {SERVED} -n 9": ("--openai", "--target-bits 4"),
    f"chat --server {SERVED}": ("--server", "--adapter x, --draft tiny, --target-bits 4"),
    f"chat --server {SERVED} -n 9": ("--server", "--kv-bits 4"),
    "chat": ("--server", "--api-key k"),
    "serve --prefix-cache 0": ("--prefix-cache", "--cache-dir x"),
    "serve --no-auth": ("--no-auth", "--api-key k"),
    "generate hi -n 9": ("--hosts", "--pipeline, --stall-seconds 5"),
    "bench": ("--openai", "--concurrency 2"),
    f"bench --openai {SERVED} --concurrency 2": ("--concurrency", "--out x"),
    "bench --protocol zlab": ("--protocol", "--prompts x, --repeats 3"),
    "bench --prompts x": ("--prompts", "--suite gsm8k, --data x"),
    "bench -n 9": ("--suite", "--data x"),
}


@pytest.mark.parametrize("command", WITHOUT_EFFECT)
def test_an_option_without_effect_is_refused(command):
    other, options = WITHOUT_EFFECT[command]
    for option in options.split(", "):
        done = invoke(*command.split(), *option.split())
        assert done.returncode == 2 and not done.stdout, done.stderr
        assert f"error: {option.split()[0]} " in done.stderr and other in done.stderr


@pytest.mark.parametrize("option", ["--block-size", "--tree-budget"])
def test_a_block_or_tree_of_too_many_rows_is_refused(option, pair):
    done = invoke("generate", "hi", "-n", "2", "--no-policy", option, 100_000, *pair)
    assert done.returncode == 2 and done.stderr.startswith("error: "), done.stderr


@pytest.mark.parametrize(
    ("options", "code", "word"),
    [
        ("--api-key-file none", 1, "cannot be read"),
        ("--api-key-file blank", 2, "empty"),
        ("--host 192.0.2.1 --no-auth", 1, "give a --host that this machine has"),
        ("--host 'no such host' --no-auth", 1, "--host no such host: "),
        ("--port PORT", 1, "PORT cannot be used"),  # told before the weights are read
    ],
)
def test_options_that_a_server_cannot_use_are_one_line(options, code, word, tmp_path):
    """An unreadable or empty key file, a host or a port that is not free to use."""
    (tmp_path / "blank").write_text("\n \n# no key yet\n")
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = str(taken.getsockname()[1])
        options = options.replace("PORT", port).replace("file ", f"file {tmp_path}/")
        word = word.replace("PORT", port)
        done = invoke("serve", "--model", "no such model", *shlex.split(options))
    assert done.returncode == code and word in done.stderr and done.stderr.count("\n") == 1


def test_a_server_without_its_extra_says_what_to_install(monkeypatch):
    for name in [module for module in sys.modules if module.startswith("dflash_mlx.serve")]:
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.setitem(sys.modules, "uvicorn", None)
    done = invoke("serve", "--port", "0", "--model", "no such model")
    assert done.returncode == 1
    assert str(MissingDependencyError.of("", "serve")).strip(": ") in done.stderr


def test_errors_of_the_library_name_options_instead_of_settings_where_there_is_one(capsys):
    with pytest.raises(Exit), one_line_errors():
        raise SettingsError("max_tokens: logits_processors or logit_bias")
    assert capsys.readouterr().err == "error: --max-tokens: logits_processors or logit_bias\n"
