"""`dflash-mlx launch`: the settings that it gives to coding agents, and their server."""

import json
import socket
import sys
import tomllib
from contextlib import contextmanager
from types import SimpleNamespace
from unittest.mock import Mock
from urllib.request import Request

import pytest
from typer.testing import CliRunner
from webserver import web_server

from dflash_mlx.bench.server_bench import open_url
from dflash_mlx.cli.app import app
from dflash_mlx.cli.launch import Agent, _server, agent_command
from dflash_mlx.cli.options import Names
from dflash_mlx.errors import ServerError

URL = "http://127.0.0.1:8000"
PROXIES = ("HTTP_PROXY", "http_proxy", "HTTPS_PROXY", "ALL_PROXY")
# Stands for Claude Code: applies settings in the documented order, and reports which server and
# models it would use.
CLAUDE = """#!{python}
import json, os, sys
from pathlib import Path
env = dict(os.environ)
folder = Path(env.get("CLAUDE_CONFIG_DIR") or Path.home() / ".claude")
files = folder / "settings.json", Path(".claude/settings.json"), Path(".claude/settings.local.json")
given = [f.read_text() for f in files if f.exists()]
for settings in map(json.loads, [*given, sys.argv[2]]):
    env |= settings.get("env", {{}})
clouds = [n for n in env if n.startswith("CLAUDE_CODE_USE_") and env[n]]
models = {{env[n] for n in env if n.startswith("ANTHROPIC_") and n.endswith("_MODEL")}}
report = env["ANTHROPIC_BASE_URL"], clouds, sorted(models), env["NO_PROXY"]
Path(env["REPORT"]).write_text(json.dumps(report))
"""


def run(*arguments, **environment):
    done = CliRunner(env={"COLUMNS": "1000", **environment}).invoke(app, arguments)
    assert "Traceback" not in done.output
    return done.exit_code, done.output


@pytest.fixture
def server():
    """A server that lists two models. A test may set:

    - `statuses`: an iterator of the first statuses that it answers with; afterwards 200,
    - `length`: the context length of model "m".

    `paths` are those of the requests.
    """
    state = SimpleNamespace(paths=[], length=None, statuses=iter(()))

    def answer(request):
        state.paths.append(request.path)
        models = [{"id": "m", "context_length": state.length}, {"id": "unloaded"}]
        return next(state.statuses, 200), [json.dumps({"data": models}).encode()], {}

    with web_server(answer) as state.url:
        state.port = state.url.rpartition(":")[2]
        yield state


def install(folder, name, script="#!/bin/sh\nexit 7\n"):
    """Install a program in place of an agent. By default it exits with 7."""
    (folder / name).write_text(script)
    (folder / name).chmod(0o755)


@pytest.mark.parametrize("context", [262_144, 40_960, None])
def test_claude_is_configured_by_its_environment(context):
    """A small context is not passed on: Claude would compact its first prompt at once."""
    command, environment = agent_command(
        Agent.claude, program="/bin/claude", url=URL, model="m", key="k", context=context
    )
    program, option, settings = command
    assert program == "/bin/claude" and option == "--settings"
    assert json.loads(settings)["permissions"]["deny"] == ["WebSearch"]
    assert json.loads(settings)["env"] == environment  # which overrides settings files
    assert environment["ANTHROPIC_AUTH_TOKEN"] == "k"
    limit = environment.get("CLAUDE_CODE_MAX_CONTEXT_TOKENS")
    assert limit == ("262144" if context == 262_144 else None)


@pytest.mark.parametrize("context", [40_960, None])
def test_codex_is_configured_by_its_arguments(context):
    command, environment = agent_command(
        Agent.codex, program="codex", url=URL, model='m"x', key="k", context=context
    )
    settings = {}
    for argument in command[1:]:
        name, _, value = argument.removeprefix("-c").partition("=")
        settings[name] = tomllib.loads(f"x = {value}")["x"]  # as codex reads it
    assert settings["model"] == 'm"x' and settings["model_provider"] == "dflash"
    assert settings["model_providers.dflash.base_url"] == f"{URL}/v1"
    assert environment[settings["model_providers.dflash.env_key"]] == "k"
    assert settings.get("model_context_window") == context
    assert settings["web_search"] == "disabled" and settings["features.view_image"] is False


@pytest.mark.parametrize("context", [40_960, None])
def test_opencode_is_configured_by_its_environment(context):
    _, environment = agent_command(
        Agent.opencode, program="opencode", url=URL, model="m", key="k", context=context
    )
    config = json.loads(environment["OPENCODE_CONFIG_CONTENT"])
    model = config["provider"]["dflash"]["models"]["m"]
    assert config["model"] == "dflash/m" and model["modalities"]["input"] == ["text"]
    assert config["provider"]["dflash"]["options"]["baseURL"] == f"{URL}/v1"
    expected = None if context is None else {"context": 40_960, "output": 5_120}
    assert model.get("limit") == expected


def test_port_0_of_an_agents_server_is_a_free_one(tmp_path, monkeypatch):
    install(tmp_path, "codex")
    addresses = []

    @contextmanager
    def server(url, port, key, names):
        addresses.append((url, port))
        raise ServerError("not started in this test")
        yield

    monkeypatch.setattr("dflash_mlx.cli.launch._server", server)
    code, output = run("launch", "codex", "--port", "0", PATH=str(tmp_path))
    [(url, port)] = addresses
    assert code == 1 and "not started in this test" in output
    assert port > 0 and url == f"http://127.0.0.1:{port}"


def test_an_error_says_how_to_install_a_missing_agent():
    code, output = run("launch", "codex", PATH="/nowhere")
    assert code == 1 and "codex is not installed: npm install -g @openai/codex" in output


def test_a_server_that_does_not_start_says_why(tmp_path):
    install(tmp_path, "codex")
    with socket.socket() as occupied:
        occupied.bind(("127.0.0.1", 0))
        port = str(occupied.getsockname()[1])
        code, output = run("launch", "codex", "--port", port, "--model", "x", PATH=str(tmp_path))
    assert code == 1 and f"{port} cannot be used" in output


@pytest.mark.parametrize(
    ("length", "model"), [(None, "m"), (32_768, "m"), (2048, "m"), (2048, "unloaded")]
)
def test_launch_waits_for_a_server_that_is_loading(length, model, tmp_path, monkeypatch, server):
    """Then the agent starts, unless the model's context cannot hold its prompt."""
    monkeypatch.setattr("dflash_mlx.cli.launch.PAUSE", 0)
    install(tmp_path, "codex")
    server.length = length
    server.statuses = iter([503])
    options = ["--port", server.port, "--model", model]
    code, output = run("launch", "codex", *options, PATH=str(tmp_path))
    assert server.paths == ["/v1/models", "/v1/models"]
    refused = (length, model) == (2048, "m")
    assert code == (2 if refused else 7)
    assert ("m has a context of 2,048 tokens" in output) == refused


def test_launch_does_not_wait_forever_for_a_server_that_is_loading(tmp_path, monkeypatch, server):
    monkeypatch.setattr("dflash_mlx.cli.launch.LONGEST_WAIT", 0)
    monkeypatch.setattr("dflash_mlx.cli.launch.PAUSE", 0)
    install(tmp_path, "codex")
    server.statuses = iter([503] * 1000)
    code, output = run("launch", "codex", "--port", server.port, PATH=str(tmp_path))
    assert code == 1 and "is still loading its model: wait for it" in output


CLOUD = "https://api.example.com"
ELSEWHERE = {"ANTHROPIC_BASE_URL": CLOUD, "ANTHROPIC_DEFAULT_OPUS_MODEL": "opus"}


@pytest.mark.parametrize(
    ("file", "settings", "shell"),
    [
        (None, {}, {}),
        (".claude/settings.json", ELSEWHERE, {}),
        (".claude/settings.local.json", ELSEWHERE, {}),
        ("home/.claude/settings.json", ELSEWHERE, {}),
        ("own/settings.json", {"CLAUDE_CODE_USE_VERTEX": "1"}, {"CLAUDE_CONFIG_DIR": "own"}),
        (None, {}, {"CLAUDE_CODE_USE_BEDROCK": "1"}),
        ("home/.claude/settings.json", {"NO_PROXY": "corp", "HTTP_PROXY": CLOUD}, {}),
        (None, {}, dict.fromkeys(PROXIES, "http://127.0.0.1:1") | {"no_proxy": "corp"}),
    ],
)
def test_claude_stays_on_this_machine(file, settings, shell, tmp_path, monkeypatch, server):
    """Even if its settings files, the shell or a proxy name another server."""
    monkeypatch.chdir(tmp_path)
    for name in (*PROXIES, "NO_PROXY", "no_proxy"):
        monkeypatch.delenv(name, raising=False)
    install(tmp_path, "claude", CLAUDE.format(python=sys.executable))
    if file is not None:
        (tmp_path / file).parent.mkdir(parents=True)
        (tmp_path / file).write_text(json.dumps({"env": settings}))
    shell |= {"HOME": str(tmp_path / "home"), "REPORT": str(tmp_path / "report")}
    code, _ = run("launch", "claude", "--port", server.port, PATH=str(tmp_path), **shell)
    url, clouds, models, no_proxy = json.loads((tmp_path / "report").read_text())
    assert code == 0
    assert (url, clouds, models) == (server.url, [], ["m"])
    assert "127.0.0.1" in no_proxy
    if "no_proxy" in shell:
        assert "corp" in no_proxy


def launch_in_folder(agent, arguments, folder, server):
    """Launch an agent with these arguments, whose settings are in this folder."""
    install(folder, agent)
    settings = dict.fromkeys(("HOME", "CLAUDE_CONFIG_DIR", "CODEX_HOME"), str(folder))
    command = ("launch", agent, "--port", server.port, "--", *arguments)
    return run(*command, PATH=str(folder), **settings)


@pytest.mark.parametrize(
    ("agent", "arguments", "named"),
    [
        ("claude", ["--settings", "x.json"], "--settings"),
        ("codex", ["exec", "-c", "model_provider=other", "hi"], "model_provider"),
        ("codex", ["--profile=work"], "--profile"),
        ("opencode", ["-m", "other/model"], "-m"),
    ],
)
def test_arguments_that_override_those_of_launch_are_refused(
    agent, arguments, named, tmp_path, server
):
    code, output = launch_in_folder(agent, arguments, tmp_path, server)
    assert code == 2 and named in output


@pytest.mark.parametrize(
    ("agent", "file", "content"),
    [
        ("claude", "remote-settings.json", '{"env": {"ANTHROPIC_BASE_URL": ""}}'),
        ("codex", "config.toml", 'model = "m"\n profile = "work"\n'),
    ],
)
def test_files_that_override_the_settings_of_launch_are_refused(
    agent, file, content, tmp_path, server
):
    """As an organization may install them."""
    (tmp_path / file).write_text(content)
    code, output = launch_in_folder(agent, [], tmp_path, server)
    assert code == 2 and str(tmp_path / file) in output


def test_a_profile_that_is_not_codexs_is_no_reason_to_refuse(tmp_path, server):
    """A prompt with the word, and a setting of another table."""
    (tmp_path / "config.toml").write_text('[aws]\nprofile = "work"\n')
    code, _ = launch_in_folder("codex", ["profile my code"], tmp_path, server)
    assert code == 7


@pytest.mark.parametrize(
    ("host", "direct"),
    [
        ("127.0.0.1", True),
        ("localhost", True),
        ("a.localhost", True),
        (socket.gethostname(), True),
        ("192.0.2.1", False),
        ("example.invalid", False),
    ],
)
def test_requests_to_this_machine_use_no_proxy(host, direct, monkeypatch, server):
    """The server of this test is the proxy. It sees the requests that are not `direct`."""
    for name in PROXIES:
        monkeypatch.setenv(name, server.url)
    monkeypatch.delenv("no_proxy", raising=False)
    monkeypatch.delenv("NO_PROXY", raising=False)
    try:
        open_url(Request(f"http://{host}:9/"), 5).close()
    except OSError:
        assert direct  # nothing listens at the port
    proxied = server.paths == [f"http://{host}:9/"]
    assert proxied != direct


def test_a_server_is_started_with_the_drafter_and_the_adapter(monkeypatch):
    """No server runs at first; then the one that was started serves model "mine"."""
    answers = iter([None, ("mine", None)])
    popen = Mock()
    monkeypatch.setattr("dflash_mlx.cli.launch.subprocess.Popen", popen)
    monkeypatch.setattr("dflash_mlx.cli.launch._served", lambda url, key, wanted: next(answers))
    names = Names("m", "lookup", "./mine")
    with _server("http://there", port=1, key="key", names=names) as (model, _):
        assert model == "mine"
    command = popen.call_args.args[0]
    assert command[-3:] == ["--model=m", "--draft=lookup", "--adapter=./mine"]


def test_a_note_says_that_a_running_server_keeps_its_drafter(monkeypatch, capsys):
    monkeypatch.setattr("dflash_mlx.cli.launch._served", lambda url, key, wanted: ("m", None))
    with _server("http://there", port=1, key="key", names=Names("m", "lookup", None)):
        assert "keeps its own drafter, not lookup" in capsys.readouterr().err
