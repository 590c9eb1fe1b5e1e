"""`dflash-mlx serve` and `launch`: errors of options, and the settings of agents."""

import json
import socket
import threading
import tomllib
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, HTTPServer

import pytest
from typer.testing import CliRunner

from dflash_mlx.cli.app import app
from dflash_mlx.cli.launch import Agent, agent_command
from dflash_mlx.errors import MissingDependencyError, ServerError

URL = "http://127.0.0.1:8000"


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


@pytest.mark.parametrize("context", [262_144, 40_960, None])
def test_claude_is_told_by_its_environment(context):
    """A limit that leaves no room behind its first prompt would have it compact at once."""
    command, environment = agent_command(Agent.claude, "/bin/claude", URL, "m", "k", context)
    program, option, settings = command
    assert program == "/bin/claude" and option == "--settings"
    assert json.loads(settings)["permissions"]["deny"] == ["WebSearch"]
    assert environment["ANTHROPIC_BASE_URL"] == URL
    assert environment["ANTHROPIC_AUTH_TOKEN"] == "k"
    assert environment["ANTHROPIC_MODEL"] == "m"
    told = environment.get("CLAUDE_CODE_MAX_CONTEXT_TOKENS")
    assert told == ("262144" if context == 262_144 else None)


@pytest.mark.parametrize("context", [40_960, None])
def test_codex_is_told_by_its_arguments(context):
    command, environment = agent_command(Agent.codex, "codex", URL, 'm"x', "k", context)
    settings = {}
    for argument in command[1:]:
        name, _, value = argument.removeprefix("-c").partition("=")
        settings[name] = tomllib.loads(f"x = {value}")["x"]  # as codex reads it
    assert settings["model"] == 'm"x' and settings["model_provider"] == "dflash"
    assert settings["model_providers.dflash.base_url"] == f"{URL}/v1"
    assert environment == {settings["model_providers.dflash.env_key"]: "k"}
    assert settings.get("model_context_window") == context
    assert settings["web_search"] == "disabled" and settings["features.view_image"] is False


@pytest.mark.parametrize("context", [40_960, None])
def test_opencode_is_told_by_its_environment(context):
    _, environment = agent_command(Agent.opencode, "opencode", URL, "m", "k", context)
    config = json.loads(environment["OPENCODE_CONFIG_CONTENT"])
    model = config["provider"]["dflash"]["models"]["m"]
    assert config["model"] == "dflash/m" and model["modalities"]["input"] == ["text"]
    assert config["provider"]["dflash"]["options"]["baseURL"] == f"{URL}/v1"
    assert model.get("limit") == (context and {"context": 40_960, "output": 5_120})


def test_port_0_of_an_agents_server_is_a_free_one(tmp_path, monkeypatch):
    agent = tmp_path / "codex"
    agent.write_text("#!/bin/sh\nexit 7\n")
    agent.chmod(0o755)
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
    agent = tmp_path / "codex"
    agent.write_text("#!/bin/sh\nexit 7\n")
    agent.chmod(0o755)
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = str(free.getsockname()[1])
        code, told = run("launch", "codex", "--port", port, "--model", "x", PATH=str(tmp_path))
    assert code == 1 and f"{port} cannot be used" in told


class Loading(BaseHTTPRequestHandler):
    """A server of ours whose model is there at the second question."""

    def do_GET(self):
        self.server.asked.append(self.path)
        status = 503 if len(self.server.asked) == 1 else 200
        models = [{"id": "m", "context_length": self.server.length}, {"id": "unloaded"}]
        content = json.dumps({"data": models}).encode()
        self.send_response(status)
        self.send_header("Content-Length", str(len(content)))
        self.end_headers()
        self.wfile.write(content)

    def log_message(self, *_):
        pass


@pytest.mark.parametrize(
    ("length", "model"), [(None, "m"), (32_768, "m"), (2048, "m"), (2048, "unloaded")]
)
def test_a_server_that_loads_is_waited_for(length, model, tmp_path, monkeypatch):
    """An agent is not started on a model whose context cannot hold its prompt."""
    monkeypatch.setattr("dflash_mlx.cli.launch.PAUSE", 0)
    agent = tmp_path / "codex"
    agent.write_text("#!/bin/sh\nexit 7\n")
    agent.chmod(0o755)
    with HTTPServer(("127.0.0.1", 0), Loading) as server:
        server.asked, server.length = [], length
        threading.Thread(target=server.serve_forever, daemon=True).start()
        options = ["--port", str(server.server_port), "--model", model]
        code, told = run("launch", "codex", *options, PATH=str(tmp_path))
        server.shutdown()
    assert server.asked == ["/v1/models", "/v1/models"]
    refused = (length, model) == (2048, "m")
    assert code == (2 if refused else 7) and ("m has a context of 2,048 tokens" in told) == refused
