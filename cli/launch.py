"""`dflash-mlx launch`: a coding agent that asks the model on this machine.

The agent is told by the environment and arguments of its own process; none of its files change.
"""

from __future__ import annotations

import json
import os
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from enum import StrEnum
from typing import IO, Annotated, Any, Final
from urllib.error import HTTPError
from urllib.request import Request, urlopen

import typer

from dflash_mlx.errors import ServerError
from dflash_mlx.loading.registry import EMBEDDED

from . import options
from .output import note, waiting
from .serve import SERVER, Port

SOON: Final = 5.0  # seconds for a server on this machine to say whether it is there
PAUSE: Final = 0.2  # seconds before it is asked again
LOADING: Final = 503  # its status until the model is there
KEY: Final = "dflash-mlx"  # agents want one, and a server without keys takes any


class Agent(StrEnum):
    """Which agent."""

    claude = "claude"
    codex = "codex"
    opencode = "opencode"


PACKAGES: Final = {  # of npm
    Agent.claude: "@anthropic-ai/claude-code",
    Agent.codex: "@openai/codex",
    Agent.opencode: "opencode-ai",
}

ApiKey = Annotated[
    str, options.value("--api-key", group=SERVER, metavar="KEY", help="The running server's key.")
]
Arguments = Annotated[
    list[str] | None, typer.Argument(help="What comes after -- is the agent's own.")
]


@dataclass(frozen=True)
class Started:
    """How a process is started: its command, and what is added to its environment."""

    command: list[str]
    environment: dict[str, str]


def launch(
    *,
    agent: Annotated[Agent, typer.Argument(help="claude, codex or opencode, as installed.")],
    arguments: Arguments = None,
    names: options.Names,
    port: Port = 8000,
    api_key: ApiKey = KEY,
) -> None:
    """Start a coding agent on the model of this machine, and a server if none runs."""
    program = shutil.which(agent.value)
    if program is None:
        raise ServerError(f"{agent.value} is not installed: npm install -g {PACKAGES[agent]}")
    port = port or _free_port()
    url = f"http://127.0.0.1:{port}"
    with _ended_in_order(), _server(url, port, names):
        model = _model(url, api_key)
        if names.model not in (EMBEDDED, model):
            note(f"{url} serves {model} already, and not {names.model}: another --port would.")
        start = how(agent, program, url, model, api_key)
        note(f"{agent.value}: {model} at {url}")
        with _left_to_the_agent():
            command = [*start.command, *(arguments or ())]
            done = subprocess.run(command, env={**os.environ, **start.environment}, check=False)
    raise typer.Exit(done.returncode)


def how(agent: Agent, program: str, url: str, model: str, key: str) -> Started:
    """What makes an agent ask this server for this model."""
    if agent is Agent.claude:
        names = ("MODEL", "DEFAULT_OPUS_MODEL", "DEFAULT_SONNET_MODEL", "DEFAULT_HAIKU_MODEL")
        environment = {f"ANTHROPIC_{name}": model for name in names}
        environment |= {"ANTHROPIC_BASE_URL": url, "ANTHROPIC_AUTH_TOKEN": key}
        return Started([program], environment | {"CLAUDE_CODE_DISABLE_NONESSENTIAL_TRAFFIC": "1"})
    if agent is Agent.codex:
        provider = {
            "name": "dflash-mlx",
            "base_url": f"{url}/v1",
            "env_key": "DFLASH_API_KEY",
            "wire_api": "responses",
        }
        settings = {f"model_providers.dflash.{name}": value for name, value in provider.items()}
        settings |= {"model_provider": "dflash", "model": model}
        given = [f"-c{name}={json.dumps(value)}" for name, value in settings.items()]
        return Started([program, *given], {"DFLASH_API_KEY": key})
    config = {
        "model": f"dflash/{model}",
        "small_model": f"dflash/{model}",
        "provider": {
            "dflash": {
                "npm": "@ai-sdk/openai-compatible",
                "name": "dflash-mlx",
                "options": {"baseURL": f"{url}/v1", "apiKey": key},
                "models": {model: {"name": model}},
            }
        },
    }
    return Started([program], {"OPENCODE_CONFIG_CONTENT": json.dumps(config)})


@contextmanager
def _server(url: str, port: int, names: options.Names) -> Iterator[None]:
    """A server at this address: the one that runs, or one that ends with the agent."""
    with waiting(f"Waiting for the server at {url}"):  # its model loads, or it ends
        while (there := _ready(url)) is False:
            time.sleep(PAUSE)
    if there:
        yield
        return
    command = [sys.executable, "-m", "dflash_mlx", "serve", "--port", str(port)]
    command += ["--model", names.model, *(["--draft", names.draft] if names.draft else [])]
    with tempfile.TemporaryFile() as log:
        # A session of its own: Ctrl-C is for the agent.
        server = subprocess.Popen(command, stdout=log, stderr=log, start_new_session=True)
        try:
            with waiting(f"Starting a server for {names.model}"):
                _wait(server, url, log)
            yield
        finally:
            server.terminate()
            server.wait()


def _wait(server: subprocess.Popen[bytes], url: str, log: IO[bytes]) -> None:
    """Until it answers. Raises `ServerError` when it ends instead."""
    while not _ready(url):
        if server.poll() is not None:
            log.seek(0)
            told = log.read().decode(errors="replace").strip().splitlines()
            raise ServerError(told[-1].removeprefix("error: ") if told else "The server ended.")
        time.sleep(PAUSE)


def _ready(url: str) -> bool | None:
    """Whether a server takes requests; None where there is none. Raises `ServerError`."""
    try:
        with urlopen(f"{url}/ready", timeout=SOON):
            return True
    except HTTPError as error:
        with error:
            if error.code == LOADING:
                return False
            raise ServerError(
                f"{url} answers {error.code}, as no server of ours does: give another --port."
            ) from error
    except (OSError, ValueError):
        return None


def _model(url: str, key: str) -> str:
    """The name of the model that is served. Raises `ServerError`."""
    try:
        asked = Request(f"{url}/v1/models", headers={"Authorization": f"Bearer {key}"})
        with urlopen(asked, timeout=SOON) as response:
            content: Any = json.load(response)
            return str(content["data"][0]["id"])
    except HTTPError as error:
        with error:
            raise ServerError(f"{url} refuses ({error.code}): give its --api-key.") from error
    except (OSError, ValueError, LookupError, TypeError) as error:
        raise ServerError(f"{url} names no model ({error}): give another --port.") from error


def _free_port() -> int:
    """A port that nobody has at the moment."""
    with socket.create_server(("127.0.0.1", 0)) as found:
        port: int = found.getsockname()[1]
        return port


@contextmanager
def _ended_in_order() -> Iterator[None]:
    """SIGTERM ends the agent and the server that was started for it, too."""
    before = signal.signal(signal.SIGTERM, lambda number, _: sys.exit(128 + number))
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before)


@contextmanager
def _left_to_the_agent() -> Iterator[None]:
    """Ctrl-C is the agent's while it runs."""
    # Not SIG_IGN, which the agent would inherit.
    before = signal.signal(signal.SIGINT, lambda *_: None)
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, before)
