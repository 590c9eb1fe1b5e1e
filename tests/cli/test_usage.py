"""What is asked wrongly on the command line: exit code 2, and a message that names the option."""

import shlex
import sys

import pytest
from program import run

ON_LINUX = pytest.mark.skipif(sys.platform == "darwin", reason="this machine's chip is known")


def invoke(*arguments):
    return run(*arguments, COLUMNS="1000", TERM="dumb")


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ("generate hi -n many", "--max-tokens must be a whole number from 0 on, not 'many'."),
        ("generate hi -n -1", "--max-tokens must be a whole number from 0 on,"),
        ("generate hi -b 0", "--block-size must be a whole number from 1 to"),
        (
            "generate hi -t hot",
            "--temperature must be 0 (greedy) or from 1e-20 to",
        ),
        ("serve --port 70000", "--port must be at most 65535, not 70000."),
        ("bench -t -1", "--temperature must be 0 (greedy) or from 1e-20 to 1e20, not -1.0."),
        ("generate hi -t inf", "--temperature must be 0 (greedy) or from"),
        ("generate hi --top-p 0", "--top-p must be above 0 and at most 1"),
        ("generate hi --seed 100000000000000000000", "--seed must be a whole number from 0 to"),
        ("generate hi --stop ''", "--stop must be one or more strings that are not empty"),
        ("bench --repeats 0", "--repeats must be at least 1, not 0."),
        ("bench --suite nope", "--suite must be one of embedded, gsm8k,"),
        (
            "bench --tree-budget many",
            "--tree-budget must be a whole number from 2 to 1,024 or auto, not 'many'.",
        ),
        ("bench --draft none", "--draft must not be none here: name a drafter."),
        ("bench --out ''", "--out: the name is empty."),
        ("train --synthesize 9 --out ''", "--out: the name is empty."),
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
        (
            "generate -p hi --max-new-tokens=-1",
            "--max-tokens must be a whole number from 0 on,",
        ),
        ("generate --prompt=hi --draft-model none --tree-budget 8", "--tree-budget cannot be"),
        (
            "generate hi --no-thinking --reasoning-effort low",
            "--reasoning-effort cannot",
        ),
        ("genrate hi", "No such command 'genrate'. Did you mean 'generate'? See"),
        ("chat --maxtokens 3", "No such option: --maxtokens (Possible options: --kernels, --max-"),
        ("--nope", "No such option: --nope."),
        ("roofline --chip M9", "Unknown chip 'M9': choose one of"),
        pytest.param("roofline", "No step can be predicted on", marks=ON_LINUX),
        pytest.param("models --memory 48", "No step can be predicted on", marks=ON_LINUX),
        (
            "serve --host 0.0.0.0",
            "--host 0.0.0.0 lets other machines in: give --api-key, or",
        ),
        ("serve --api-key ''", "An API key is empty"),
        ("serve --port 0 --no-draft --top-p 0", "--top-p must be above 0"),
        ("generate hi --json-schema 5", "--json-schema takes a JSON schema, such as"),
        (f"generate hi --json-schema {'[' * 300}", "--json-schema takes a JSON schema, such as"),
        ("generate hi --target-bits 8 --quant-mode mxfp4", ""),
    ],
)
def test_what_is_wrong_is_one_line_in_words_for_people(arguments, message):
    """No box, no usage, and no validator's words."""
    done = invoke(*shlex.split(arguments))
    assert done.returncode == (1 if "schema" in arguments else 2), done.stderr
    assert not done.stdout and done.stderr.count("\n") == 1
    assert done.stderr.startswith(f"error: {message}"), done.stderr


@pytest.mark.parametrize(
    ("command", "options"),
    [
        ("generate hi", "--kv-bits 5"),
        ("tune", "--kv-bits 5"),
        ("generate hi", "--target-bits 3"),
        ("roofline --chip M4 --acceptance 3", "--target-bits 3"),
        ("train --out x --synthesize 2", "--target-bits 3"),
        ("generate hi", "--draft-bits 5"),
        ("generate hi --target-bits 4", "--quant-mode nope"),
        ("train --out x --synthesize 2", "--kind nope"),
        ("train --out x --synthesize 2", "--store-bits 5"),
    ],
)
def test_a_wrong_value_fails_before_anything_is_loaded(command, options):
    done = invoke(*command.split(), "--model", "no-such/model", *options.split())
    assert done.returncode == 2 and not done.stdout, done.stderr
    assert options.split()[1] in done.stderr and "Value error" not in done.stderr


@pytest.mark.parametrize(
    ("command", "option", "other"),
    [
        ("generate hi --no-draft", "--draft tiny", "--no-draft"),
        ("generate hi --no-draft", "--block-size 4", "--no-draft"),
        ("chat --no-draft", "--no-policy", "--no-draft"),
        ("serve --no-draft", "--draft-bits 4", "--no-draft"),
        ("serve --no-draft", "--tree-budget 8", "--no-draft"),
        ("generate hi --no-draft", "--compare", "--no-draft"),
        ("generate hi --draft none", "--block-size 4", "--draft none"),
        ("generate hi -d none", "--compare", "--draft none"),
        ("bench --draft lookup", "--tree-budget 8", "--draft lookup"),
        ("generate hi --draft lookup", "--draft-bits 4", "--draft lookup"),
        ("generate hi", "--quant-mode mxfp4", "--target-bits"),
        ("tune", "--group-size 32", "--target-bits"),
        ("generate hi --tree-budget auto", "--block-size 4", "--tree-budget auto"),
        ("bench --tree-budget auto", "--block-size 4", "--tree-budget auto"),
        ("generate hi --no-chat-template", "--system x", "--no-chat-template"),
        ("generate hi --no-chat-template", "--no-think", "--no-chat-template"),
        ("bench --openai http://localhost:1", "--no-think", "--openai"),
        ("bench --openai http://localhost:1", "--adapter x", "--openai"),
        ("chat --server http://localhost:1", "--adapter x", "--server"),
        ("chat --server http://localhost:1", "--draft tiny", "--server"),
        ("chat --server http://localhost:1", "--target-bits 4", "--server"),
        ("chat --server http://localhost:1", "--kv-bits 4", "--server"),
        ("chat", "--api-key k", "--server"),
        ("serve --prefix-cache 0", "--cache-dir x", "--prefix-cache"),
        ("serve --no-auth", "--api-key k", "--no-auth"),
        ("generate hi", "--pipeline", "--hosts"),
        ("generate hi", "--stall-seconds 5", "--hosts"),
        ("bench --openai http://localhost:1", "--draft tiny", "--openai"),
        ("bench --openai http://localhost:1", "--target-bits 4", "--openai"),
        ("bench", "--concurrency 2", "--openai"),
        ("bench --openai http://localhost:1 --concurrency 2", "--out x", "--concurrency"),
        ("bench --protocol zlab", "--prompts x", "--protocol"),
        ("bench --protocol zlab", "--repeats 3", "--protocol"),
        ("bench --prompts x", "--suite gsm8k", "--prompts"),
        ("bench --prompts x", "--data x", "--prompts"),
        ("bench", "--data x", "--suite"),
    ],
)
def test_an_option_without_effect_is_refused(command, option, other):
    done = invoke(*command.split(), *option.split())
    assert done.returncode == 2 and not done.stdout, done.stderr
    assert f"error: {option.split()[0]} " in done.stderr and other in done.stderr


@pytest.mark.parametrize("option", ["--block-size", "--tree-budget"])
def test_more_rows_than_there_can_be(option, pair):
    done = invoke("generate", "hi", "-n", "2", "--no-policy", option, 100_000, *pair)
    assert done.returncode == 2 and done.stderr.startswith("error: "), done.stderr
