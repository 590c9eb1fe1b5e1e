"""`dflash-mlx launch`: a coding agent that uses the model on this machine.

Environment variables and arguments configure the agent; none of its files change. They win over the
agent's own settings files, which may name another server. Where they cannot, launch stops.
"""

from __future__ import annotations

import json
import os
import re
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict
from enum import StrEnum
from glob import glob
from pathlib import Path
from typing import Any, Final, NamedTuple
from urllib.error import HTTPError
from urllib.request import Request

import typer

from dflash_mlx.bench.server_bench import open_url
from dflash_mlx.errors import ServerError, SettingsError
from dflash_mlx.loading.registry import EMBEDDED, short
from dflash_mlx.machine.signals import signals_to

from . import options
from .options import CODER, argument, option
from .output import note, waiting
from .serve import PORT, SERVER

TIMEOUT: Final = 5.0  # seconds for a server on this machine to answer
PAUSE: Final = 0.2  # seconds between two questions
LONGEST_WAIT: Final = 600.0  # seconds for another process to load its model
LOADING: Final = 503  # the status until the model is loaded
LEAST_CONTEXT: Final = 20_000  # tokens that Claude Code alone says at the start
# Claude Code keeps 13,000 tokens and those of an answer free. In a context of less than this it
# would compact its own first prompt, so it learns the limit from the server's error.
LEAST_TOLD: Final = 48_000
UNKNOWN: Final = 2**31  # the context length of a model that does not say its own
KEY: Final = "dflash-mlx"  # agents want one, and a server without keys takes any


class Agent(StrEnum):
    """The supported agents."""

    claude = "claude"
    codex = "codex"
    opencode = "opencode"


PACKAGES: Final = {  # in npm
    Agent.claude: "@anthropic-ai/claude-code",
    Agent.codex: "@openai/codex",
    Agent.opencode: "opencode-ai",
}
# Claude Code uses another API where CLAUDE_CODE_USE_... is set.
CLOUDS: Final = ("BEDROCK", "VERTEX", "FOUNDRY", "MANTLE", "ANTHROPIC_AWS", "GATEWAY")

OPENCODE_AGENTS: Final = "build plan general explore title summary compaction".split()


class Elsewhere(NamedTuple):
    """What would have an agent use another server in spite of our settings."""

    arguments: str  # a pattern of the agent's own arguments
    files: tuple[str, ...]  # patterns of settings files that win over ours
    content: str  # a pattern of what such a file may not set


ELSEWHERE: Final = {
    Agent.claude: Elsewhere(
        "--settings(=|$)",
        (
            "/etc/claude-code/managed-settings*/*.json",
            "/etc/claude-code/managed-settings.json",
            "/Library/Application Support/ClaudeCode/managed-settings*/*.json",
            "/Library/Application Support/ClaudeCode/managed-settings.json",
            "${CLAUDE_CONFIG_DIR}/remote-settings.json",
            "~/.claude/remote-settings.json",
        ),
        rf'"(ANTHROPIC_\w*(URL|KEY|TOKEN|MODEL)|CLAUDE_CODE_USE_({"|".join(CLOUDS)}))"\s*:',
    ),
    Agent.codex: Elsewhere(  # a profile won over arguments until Codex refused it
        r"(-p|--profile|--oss|--local-provider)(=|$)|(-c|--config=)?(model_provider|profile)\s*=",
        ("${CODEX_HOME}/config.toml", "~/.codex/config.toml", ".codex/config.toml"),
        r"\A(?:(?!\s*\[)[^\n]*\n)*\s*profile\s*=",
    ),
    Agent.opencode: Elsewhere(
        "(-m|--model)(=|$)",
        ("/etc/opencode/opencode.json*", "/Library/Application Support/opencode/opencode.json*"),
        r'"(small_model|model|provider|(en|dis)abled_providers)"\s*:',
    ),
}


def launch(
    *,
    agent: Agent = argument(..., "claude, codex or opencode."),
    arguments: list[str] | None = argument(None, "The agent's own arguments, after --."),
    names: options.Names,
    port: int = PORT,
    api_key: str = option(KEY, SERVER, "KEY", "The key of the running server."),
) -> None:
    """Start a coding agent on a local model (starts the server if needed)."""
    program = shutil.which(agent.value)
    if program is None:
        raise ServerError(f"{agent.value} is not installed: npm install -g {PACKAGES[agent]}")
    refuse_elsewhere(agent, arguments or [])
    if not port:
        with socket.create_server(("127.0.0.1", 0)) as free:
            port = free.getsockname()[1]
    url = f"http://127.0.0.1:{port}"
    with signals_to(_end), _server(url, port, api_key, names) as (model, context):
        if context is not None and context < LEAST_CONTEXT:
            raise SettingsError(
                f"{model} has a context of {context:,} tokens, and agents begin with "
                f"{LEAST_CONTEXT:,}: choose another --model, such as {CODER}."
            )
        wanted = short(names.adapter or names.model)
        if wanted not in (EMBEDDED, model):
            note(f"{url} already serves {model}, not {wanted}: another --port starts anew.")
        command, environment = agent_command(agent, program, url, model, api_key, context)
        note(f"{agent.value}: {model} at {url}")
        with signals_to(_leave_ctrl_c):
            command += arguments or ()
            done = subprocess.run(command, env={**os.environ, **environment}, check=False)
    raise typer.Exit(done.returncode)


def refuse_elsewhere(agent: Agent, arguments: list[str]) -> None:
    """Raise `SettingsError` if an argument or a settings file may name the agent another server."""
    known = ELSEWHERE[agent]
    for given in arguments:
        if re.match(known.arguments, given):
            raise SettingsError(f"launch names the server: {given} may name another. Leave it out.")
    for pattern in known.files:
        for file in glob(os.path.expanduser(os.path.expandvars(pattern))):
            if found := re.search(known.content, Path(file).read_text(errors="replace")):
                raise SettingsError(
                    f"{file} may name {agent.value} another server, and wins over launch: "
                    f"remove {found[0].split()[-1].strip(' =:')} there."
                )


def agent_command(
    agent: Agent, program: str, url: str, model: str, key: str, context: int | None
) -> tuple[list[str], dict[str, str]]:
    """The command that has an agent use this server and model, and what its environment needs.

    Agents are told the model's context length, if it is known, that it sees no images, and that the
    server does not search the web. They reach this machine without a proxy.
    """
    output = context // 8 if context else 0  # tokens of an answer
    direct = os.environ.get("NO_PROXY") or os.environ.get("no_proxy")
    direct = ",".join(filter(None, (direct, "127.0.0.1", "localhost")))
    environment = {"NO_PROXY": direct, "no_proxy": direct}
    if agent is Agent.claude:
        models = (f"DEFAULT_{name}_MODEL" for name in ("FABLE", "HAIKU", "OPUS", "SONNET"))
        names = [f"ANTHROPIC_{name}" for name in ("MODEL", "SMALL_FAST_MODEL", *models)]
        environment |= dict.fromkeys([*names, "CLAUDE_CODE_SUBAGENT_MODEL"], model)
        environment |= {"ANTHROPIC_BASE_URL": url, "ANTHROPIC_AUTH_TOKEN": key}
        unset = ["ANTHROPIC_API_KEY", "ANTHROPIC_CUSTOM_HEADERS"]
        unset += [f"CLAUDE_CODE_USE_{name}" for name in CLOUDS]
        environment |= dict.fromkeys(unset, "")
        environment["CLAUDE_CODE_DISABLE_NONESSENTIAL_TRAFFIC"] = "1"
        if context and context >= LEAST_TOLD:
            environment["CLAUDE_CODE_MAX_CONTEXT_TOKENS"] = str(context)
            environment["CLAUDE_CODE_MAX_OUTPUT_TOKENS"] = str(output)
        # An `env` of --settings wins over those of the user's and the project's files, and these
        # over the environment.
        settings = {"env": environment, "permissions": {"deny": ["WebSearch"]}}
        return [program, "--settings", json.dumps(settings)], environment
    if agent is Agent.codex:
        provider = {
            "name": "dflash-mlx",
            "base_url": f"{url}/v1",
            "env_key": "DFLASH_API_KEY",
            "wire_api": "responses",
        }
        given: dict[str, Any] = {f"model_providers.dflash.{k}": v for k, v in provider.items()}
        given |= {"model_provider": "dflash", "model": model, "web_search": "disabled"}
        given |= {"features.view_image": False, "features.image_generation": False}
        if context:
            given["model_context_window"] = context
        options = [f"-c{name}={json.dumps(value)}" for name, value in given.items()]
        return [program, *options], environment | {"DFLASH_API_KEY": key}
    described = {"name": model, "attachment": False}
    described["modalities"] = {"input": ["text"], "output": ["text"]}
    if context:
        described["limit"] = {"context": context, "output": output}
    config = {
        "model": f"dflash/{model}",
        "small_model": f"dflash/{model}",
        # Agents of the user's files may name models elsewhere: built-in ones use ours, and opencode
        # refuses the others.
        "agent": {name: {"model": f"dflash/{model}"} for name in OPENCODE_AGENTS},
        "enabled_providers": ["dflash"],
        "provider": {
            "dflash": {
                "npm": "@ai-sdk/openai-compatible",
                "name": "dflash-mlx",
                "options": {"baseURL": f"{url}/v1", "apiKey": key},
                "models": {model: described},
            }
        },
    }
    return [program], environment | {"OPENCODE_CONFIG_CONTENT": json.dumps(config)}


@contextmanager
def _server(
    url: str, port: int, key: str, names: options.Names
) -> Iterator[tuple[str, int | None]]:
    """Model and context of the server at this address, or of one that ends with the agent."""
    command = [sys.executable, "-m", "dflash_mlx", "serve", "--port", str(port)]
    command += [f"--{name}={value}" for name, value in asdict(names).items() if value]
    wanted = short(names.adapter or names.model)  # what `serve` calls it
    server, end = None, time.monotonic() + LONGEST_WAIT
    with tempfile.TemporaryFile() as log:
        try:
            with waiting(f"Waiting for a server of {wanted} at {url}"):
                while not isinstance(served := _served(url, key, wanted), tuple):
                    if server is None and served is None:
                        # Its own session, so that Ctrl-C reaches only the agent.
                        own: Any = {"stdout": log, "stderr": log, "start_new_session": True}
                        server = subprocess.Popen(command, **own)
                    elif server is None and time.monotonic() > end:
                        raise ServerError(f"{url} still answers {LOADING}: give another --port.")
                    elif server is not None and server.poll() is not None:
                        log.seek(0)
                        told = log.read().decode(errors="replace").strip().splitlines()
                        last = told[-1].removeprefix("error: ") if told else "The server ended."
                        raise ServerError(last)
                    time.sleep(PAUSE)
            if server is None and names.draft:
                note(f"{url} keeps its own drafter, not {names.draft}: another --port starts anew.")
            yield served
        finally:
            if server is not None:
                server.terminate()
                server.wait()


def _served(url: str, key: str, wanted: str) -> tuple[str, int | None] | int | None:
    """A server's model and context length, `LOADING` while it loads, or None without a server.

    Of several models it is the wanted one, or the first. The context length is None where the
    server does not tell it. Raises `ServerError`.
    """
    try:
        asked = Request(f"{url}/v1/models", headers={"Authorization": f"Bearer {key}"})
        with open_url(asked, TIMEOUT) as response:
            models = json.load(response)["data"]
            model = next((one for one in models if one["id"] == wanted), models[0])
            context = int(model.get("context_length") or UNKNOWN)
            return str(model["id"]), context if context < UNKNOWN else None
    except HTTPError as error:
        with error:
            if error.code == LOADING:
                return LOADING
            advice = "give the server's --api-key, or another --port"
            raise ServerError(f"{url} answers {error.code}: {advice}.") from error
    except (ValueError, LookupError, TypeError) as error:
        raise ServerError(f"{url} names no model ({error}): give another --port.") from error
    except OSError:
        return None


def _end(number: int, _: Any) -> None:
    """End this program, and with it the server, on SIGTERM and on Ctrl-C."""
    sys.exit(128 + number)


def _leave_ctrl_c(number: int, frame: Any) -> None:
    """Leave Ctrl-C to the agent. With SIG_IGN the agent would ignore it, too."""
    if number != signal.SIGINT:
        _end(number, frame)
