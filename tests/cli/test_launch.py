"""`dflash-mlx launch`: settings of agents, which win over their own, and the server they use."""

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
# Applies settings in the documented order of Claude Code, and says where it would go.
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
said = env["ANTHROPIC_BASE_URL"], clouds, sorted(models), env["NO_PROXY"]
Path(env["REPORT"]).write_text(json.dumps(said))
"""


def run(*arguments, **environment):
    done = CliRunner(env={"COLUMNS": "1000", **environment}).invoke(app, arguments)
    assert "Traceback" not in done.output
    return done.exit_code, done.output


@pytest.fixture
def server():
    """A server of ours that answers with its `statuses`, then 200; `asked` are the paths."""
    state = SimpleNamespace(asked=[], length=None, statuses=iter(()))

    def answer(request):
        state.asked.append(request.path)
        models = [{"id": "m", "context_length": state.length}, {"id": "unloaded"}]
        return next(state.statuses, 200), [json.dumps({"data": models}).encode()], {}

    with web_server(answer) as state.url:
        state.port = state.url.rpartition(":")[2]
        yield state


def install(folder, name, script="#!/bin/sh\nexit 7\n"):
    (folder / name).write_text(script)
    (folder / name).chmod(0o755)


@pytest.mark.parametrize("context", [262_144, 40_960, None])
def test_claude_is_told_by_its_environment(context):
    """A limit that leaves no room after its first prompt would make it compact at once."""
    command, environment = agent_command(
        Agent.claude, program="/bin/claude", url=URL, model="m", key="k", context=context
    )
    program, option, settings = command
    assert program == "/bin/claude" and option == "--settings"
    assert json.loads(settings)["permissions"]["deny"] == ["WebSearch"]
    assert json.loads(settings)["env"] == environment  # which wins over settings files
    assert environment["ANTHROPIC_AUTH_TOKEN"] == "k"
    told = environment.get("CLAUDE_CODE_MAX_CONTEXT_TOKENS")
    assert told == ("262144" if context == 262_144 else None)


@pytest.mark.parametrize("context", [40_960, None])
def test_codex_is_told_by_its_arguments(context):
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
def test_opencode_is_told_by_its_environment(context):
    _, environment = agent_command(
        Agent.opencode, program="opencode", url=URL, model="m", key="k", context=context
    )
    config = json.loads(environment["OPENCODE_CONFIG_CONTENT"])
    model = config["provider"]["dflash"]["models"]["m"]
    assert config["model"] == "dflash/m" and model["modalities"]["input"] == ["text"]
    assert config["provider"]["dflash"]["options"]["baseURL"] == f"{URL}/v1"
    assert model.get("limit") == (context and {"context": 40_960, "output": 5_120})


def test_port_0_of_an_agents_server_is_a_free_one(tmp_path, monkeypatch):
    install(tmp_path, "codex")
    asked = []

    @contextmanager
    def server(url, port, key, names):
        asked.append((url, port))
        raise ServerError("no more is needed")
        yield

    monkeypatch.setattr("dflash_mlx.cli.launch._server", server)
    code, told = run("launch", "codex", "--port", "0", PATH=str(tmp_path))
    [(url, port)] = asked
    assert code == 1 and "no more is needed" in told
    assert port > 0 and url == f"http://127.0.0.1:{port}"


def test_an_agent_that_is_not_there():
    code, told = run("launch", "codex", PATH="/nowhere")
    assert code == 1 and "codex is not installed: npm install -g @openai/codex" in told


def test_a_server_that_does_not_start_says_why(tmp_path):
    install(tmp_path, "codex")
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = str(free.getsockname()[1])
        code, told = run("launch", "codex", "--port", port, "--model", "x", PATH=str(tmp_path))
    assert code == 1 and f"{port} cannot be used" in told


@pytest.mark.parametrize(
    ("length", "model"), [(None, "m"), (32_768, "m"), (2048, "m"), (2048, "unloaded")]
)
def test_a_server_that_loads_is_waited_for(length, model, tmp_path, monkeypatch, server):
    """An agent is not started on a model whose context cannot hold its prompt."""
    monkeypatch.setattr("dflash_mlx.cli.launch.PAUSE", 0)
    install(tmp_path, "codex")
    server.length = length
    server.statuses = iter([503])
    options = ["--port", server.port, "--model", model]
    code, told = run("launch", "codex", *options, PATH=str(tmp_path))
    assert server.asked == ["/v1/models", "/v1/models"]
    refused = (length, model) == (2048, "m")
    assert code == (2 if refused else 7)
    assert ("m has a context of 2,048 tokens" in told) == refused


def test_a_server_that_never_loads_is_not_waited_for_without_end(tmp_path, monkeypatch, server):
    monkeypatch.setattr("dflash_mlx.cli.launch.LONGEST_WAIT", 0)
    monkeypatch.setattr("dflash_mlx.cli.launch.PAUSE", 0)
    install(tmp_path, "codex")
    server.statuses = iter([503] * 1000)
    code, told = run("launch", "codex", "--port", server.port, PATH=str(tmp_path))
    assert code == 1 and "is still loading its model: wait for it" in told


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
    """Its settings files, the shell and a proxy name another server."""
    monkeypatch.chdir(tmp_path)
    for name in (*PROXIES, "NO_PROXY", "no_proxy"):
        monkeypatch.delenv(name, raising=False)
    install(tmp_path, "claude", CLAUDE.format(python=sys.executable))
    if file is not None:
        (tmp_path / file).parent.mkdir(parents=True)
        (tmp_path / file).write_text(json.dumps({"env": settings}))
    shell |= {"HOME": str(tmp_path / "home"), "REPORT": str(tmp_path / "report")}
    code, told = run("launch", "claude", "--port", server.port, PATH=str(tmp_path), **shell)
    url, clouds, models, direct = json.loads((tmp_path / "report").read_text())
    assert code == 0 and (url, clouds, models) == (server.url, [], ["m"])
    assert "127.0.0.1" in direct and ("no_proxy" not in shell or "corp" in direct)


@pytest.mark.parametrize(
    ("agent", "arguments", "file", "content", "word"),
    [
        ("claude", ["--settings", "x.json"], "none", "", "--settings"),
        ("claude", [], "remote-settings.json", '{"env": {"ANTHROPIC_BASE_URL": ""}}', None),
        ("codex", ["exec", "-c", "model_provider=other", "hi"], "none", "", "model_provider"),
        ("codex", ["--profile=work"], "none", "", "--profile"),
        ("codex", [], "config.toml", 'model = "m"\n profile = "work"\n', None),
        ("codex", ["profile my code"], "config.toml", '[aws]\nprofile = "work"\n', ""),
        ("opencode", ["-m", "other/model"], "none", "", "-m"),
    ],
)
def test_what_would_win_over_launch_is_refused(
    agent, arguments, file, content, word, tmp_path, server
):
    """Arguments, and files of an organization; `word` is what the message names."""
    install(tmp_path, agent)
    (tmp_path / file).write_text(content)
    folders = dict.fromkeys(("HOME", "CLAUDE_CONFIG_DIR", "CODEX_HOME"), str(tmp_path))
    command = ("launch", agent, "--port", server.port, "--", *arguments)
    code, told = run(*command, PATH=str(tmp_path), **folders)
    assert code == (7 if word == "" else 2)
    assert (str(tmp_path / file) if word is None else word) in told


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
def test_this_machine_is_asked_without_a_proxy(host, direct, monkeypatch, server):
    for name in PROXIES:
        monkeypatch.setenv(name, server.url)
    monkeypatch.delenv("no_proxy", raising=False)
    monkeypatch.delenv("NO_PROXY", raising=False)
    try:
        open_url(Request(f"http://{host}:9/"), 5).close()
    except OSError:
        assert direct  # nothing listens there
    assert (server.asked == [f"http://{host}:9/"]) != direct


def test_its_server_has_the_drafter_and_the_adapter(monkeypatch):
    commands = []
    served = iter([None, ("mine", None)])
    start = Mock(side_effect=lambda command, **_: commands.append(command) or Mock())
    monkeypatch.setattr("dflash_mlx.cli.launch.subprocess.Popen", start)
    monkeypatch.setattr("dflash_mlx.cli.launch._served", lambda url, key, wanted: next(served))
    with _server("http://there", port=1, key="key", names=Names("m", "lookup", "./mine")) as (
        model,
        _,
    ):
        assert model == "mine"
    assert commands[0][-3:] == ["--model=m", "--draft=lookup", "--adapter=./mine"]


def test_a_server_that_runs_keeps_its_drafter_and_it_is_told(monkeypatch, capsys):
    monkeypatch.setattr("dflash_mlx.cli.launch._served", lambda url, key, wanted: ("m", None))
    with _server("http://there", port=1, key="key", names=Names("m", "lookup", None)):
        assert "keeps its own drafter, not lookup" in capsys.readouterr().err
