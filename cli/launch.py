"""`dflash-mlx launch`: starts a coding agent that uses a model on this machine.

Environment variables and arguments configure the agent. They change none of its files, but override
its settings files, which may point to another server. If they cannot override them, launch stops.
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
from .serve_options import PORT, SERVER

TIMEOUT: Final = 5.0  # seconds for a server on this machine to answer
PAUSE: Final = 0.2  # seconds between two requests while the server starts
LONGEST_WAIT: Final = 600.0  # seconds for another process to load its model
LOADING: Final = 503  # the status of a server that loads its model
MIN_CONTEXT: Final = 20_000  # tokens; the first prompt of Claude Code is about as long
# Claude Code keeps 13,000 tokens and the length of an answer free. In a context of less than this
# it would compact its first prompt, so we do not tell it the limit: the server's error does.
MIN_CONTEXT_TO_TELL: Final = 48_000
UNKNOWN_CONTEXT: Final = 2**31  # what the server reports if a model does not name its context
KEY: Final = "dflash-mlx"  # agents need a key, and a server without keys accepts any


class Agent(StrEnum):
    """The supported agents."""

    claude = "claude"
    codex = "codex"
    opencode = "opencode"


NPM_PACKAGES: Final = {
    Agent.claude: "@anthropic-ai/claude-code",
    Agent.codex: "@openai/codex",
    Agent.opencode: "opencode-ai",
}
# Claude Code uses another API if CLAUDE_CODE_USE_... is set.
CLOUDS: Final = ("BEDROCK", "VERTEX", "FOUNDRY", "MANTLE", "ANTHROPIC_AWS", "GATEWAY")

# The agents that opencode has built in.
OPENCODE_AGENTS: Final = (
    "build",
    "plan",
    "general",
    "explore",
    "title",
    "summary",
    "compaction",
)


class ServerOverrides(NamedTuple):
    """Arguments and files that would make an agent use another server in spite of our settings."""

    arguments: str  # a pattern of the agent's own arguments
    files: tuple[str, ...]  # patterns of settings files that override ours
    content: str  # a pattern of what such a file must not set


OVERRIDES: Final = {
    Agent.claude: ServerOverrides(
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
    Agent.codex: ServerOverrides(  # in older versions of Codex a profile overrides arguments
        r"(-p|--profile|--oss|--local-provider)(=|$)|(-c|--config=)?(model_provider|profile)\s*=",
        ("${CODEX_HOME}/config.toml", "~/.codex/config.toml", ".codex/config.toml"),
        r"\A(?:(?!\s*\[)[^\n]*\n)*\s*profile\s*=",
    ),
    Agent.opencode: ServerOverrides(
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
    api_key: str = option(
        KEY,
        panel=SERVER,
        metavar="KEY",
        help="The key of the running server.",
    ),
) -> None:
    """Start a coding agent on a local model (starts the server if needed)."""
    program = shutil.which(agent.value)
    if program is None:
        raise ServerError(f"{agent.value} is not installed: npm install -g {NPM_PACKAGES[agent]}")
    refuse_overrides(agent, arguments or [])
    if not port:
        with socket.create_server(("127.0.0.1", 0)) as free:
            port = free.getsockname()[1]
    url = f"http://127.0.0.1:{port}"
    with signals_to(_exit), _server(url, port, key=api_key, names=names) as (model, context):
        if context is not None and context < MIN_CONTEXT:
            raise SettingsError(
                f"{model} has a context of {context:,} tokens, and agents begin with "
                f"{MIN_CONTEXT:,}: choose another --model, such as {CODER}."
            )
        wanted = short(names.adapter or names.model)
        if wanted not in (EMBEDDED, model):
            note(f"{url} already serves {model}, not {wanted}: another --port starts a new server.")
        command, environment = agent_command(
            agent,
            program,
            url=url,
            model=model,
            key=api_key,
            context=context,
        )
        note(f"{agent.value}: {model} at {url}")
        with signals_to(_leave_ctrl_c):
            command += arguments or ()
            process = subprocess.run(command, env={**os.environ, **environment}, check=False)
    raise typer.Exit(process.returncode)


def refuse_overrides(agent: Agent, arguments: list[str]) -> None:
    """Raise `SettingsError` if an argument or a settings file may point to another server."""
    overrides = OVERRIDES[agent]
    for word in arguments:
        if re.match(overrides.arguments, word):
            raise SettingsError(
                f"launch chooses the server, and {word} may choose another: leave it out."
            )
    for pattern in overrides.files:
        for file in glob(os.path.expanduser(os.path.expandvars(pattern))):
            match = re.search(overrides.content, Path(file).read_text(errors="replace"))
            if match is not None:
                setting = match[0].split()[-1].strip(" =:")
                raise SettingsError(
                    f"{file} may point {agent.value} to another server, and overrides launch: "
                    f"remove {setting} there."
                )


def agent_command(
    agent: Agent, program: str, url: str, model: str, key: str, context: int | None
) -> tuple[list[str], dict[str, str]]:
    """Return the command that starts an agent on a server and a model, and its environment.

    Agents learn the model's context length, if it is known, that it sees no images, and that the
    server does not search the web. They reach this machine without a proxy.
    """
    no_proxy = os.environ.get("NO_PROXY") or os.environ.get("no_proxy")
    no_proxy = ",".join(filter(None, (no_proxy, "127.0.0.1", "localhost")))
    environment = {"NO_PROXY": no_proxy, "no_proxy": no_proxy}
    if agent is Agent.claude:
        environment |= _claude_environment(url, model, key=key, context=context)
        # An `env` of --settings overrides the `env` of the user's and the project's files, which
        # overrides the environment.
        settings = {"env": environment, "permissions": {"deny": ["WebSearch"]}}
        return [program, "--settings", json.dumps(settings)], environment
    if agent is Agent.codex:
        command = [program, *_codex_options(url, model, context)]
        return command, environment | {"DFLASH_API_KEY": key}
    config = _opencode_config(url, model, key=key, context=context)
    return [program], environment | {"OPENCODE_CONFIG_CONTENT": json.dumps(config)}


def _answer_tokens(context: int) -> int:
    """Return how many tokens of a context an answer may take."""
    return context // 8


def _claude_environment(url: str, model: str, key: str, context: int | None) -> dict[str, str]:
    """Return the environment variables of Claude Code."""
    model_names = ["ANTHROPIC_MODEL", "ANTHROPIC_SMALL_FAST_MODEL", "CLAUDE_CODE_SUBAGENT_MODEL"]
    for size in ("FABLE", "HAIKU", "OPUS", "SONNET"):
        model_names.append(f"ANTHROPIC_DEFAULT_{size}_MODEL")
    unset = ["ANTHROPIC_API_KEY", "ANTHROPIC_CUSTOM_HEADERS"]
    unset += [f"CLAUDE_CODE_USE_{cloud}" for cloud in CLOUDS]
    environment = {
        **dict.fromkeys(model_names, model),
        **dict.fromkeys(unset, ""),
        "ANTHROPIC_BASE_URL": url,
        "ANTHROPIC_AUTH_TOKEN": key,
        "CLAUDE_CODE_DISABLE_NONESSENTIAL_TRAFFIC": "1",
    }
    if context and context >= MIN_CONTEXT_TO_TELL:
        environment["CLAUDE_CODE_MAX_CONTEXT_TOKENS"] = str(context)
        environment["CLAUDE_CODE_MAX_OUTPUT_TOKENS"] = str(_answer_tokens(context))
    return environment


def _codex_options(url: str, model: str, context: int | None) -> list[str]:
    """Return the options of Codex that set its configuration."""
    config: dict[str, Any] = {
        "model_providers.dflash.name": "dflash-mlx",
        "model_providers.dflash.base_url": f"{url}/v1",
        "model_providers.dflash.env_key": "DFLASH_API_KEY",
        "model_providers.dflash.wire_api": "responses",
        "model_provider": "dflash",
        "model": model,
        "web_search": "disabled",
        "features.view_image": False,
        "features.image_generation": False,
    }
    if context:
        config["model_context_window"] = context
    return [f"-c{name}={json.dumps(value)}" for name, value in config.items()]


def _opencode_config(url: str, model: str, key: str, context: int | None) -> dict[str, Any]:
    """Return the configuration of opencode."""
    model_config: dict[str, Any] = {
        "name": model,
        "attachment": False,
        "modalities": {"input": ["text"], "output": ["text"]},
    }
    if context:
        model_config["limit"] = {"context": context, "output": _answer_tokens(context)}
    return {
        "model": f"dflash/{model}",
        "small_model": f"dflash/{model}",
        # Agents in the user's files may name models of other servers. The built-in agents use ours,
        # and opencode refuses the others.
        "agent": {name: {"model": f"dflash/{model}"} for name in OPENCODE_AGENTS},
        "enabled_providers": ["dflash"],
        "provider": {
            "dflash": {
                "npm": "@ai-sdk/openai-compatible",
                "name": "dflash-mlx",
                "options": {"baseURL": f"{url}/v1", "apiKey": key},
                "models": {model: model_config},
            }
        },
    }


@contextmanager
def _server(
    url: str, port: int, key: str, names: options.Names
) -> Iterator[tuple[str, int | None]]:
    """Use the server at this address, or start one that ends with the agent.

    Yields the name and the context length of its model.
    """
    command = [sys.executable, "-m", "dflash_mlx", "serve", "--port", str(port)]
    command += [f"--{name}={value}" for name, value in asdict(names).items() if value]
    wanted = short(names.adapter or names.model)  # the name that `serve` gives the model
    server = None
    end = time.monotonic() + LONGEST_WAIT
    with tempfile.TemporaryFile() as log:
        try:
            with waiting(f"Waiting for a server of {wanted} at {url}"):
                served = _served(url, key, wanted)
                while not isinstance(served, tuple):
                    if server is None and served is None:
                        server = subprocess.Popen(
                            command,
                            stdout=log,
                            stderr=log,
                            start_new_session=True,  # so that Ctrl-C reaches only the agent
                        )
                    elif server is None and time.monotonic() > end:
                        raise ServerError(
                            f"A server at {url} is still loading its model: wait for it, or give "
                            "another --port."
                        )
                    elif server is not None and server.poll() is not None:
                        raise ServerError(_last_line(log))
                    time.sleep(PAUSE)
                    served = _served(url, key, wanted)
            if server is None and names.draft:
                note(
                    f"{url} keeps its own drafter, not {names.draft}: another --port starts a new "
                    "server."
                )
            yield served
        finally:
            if server is not None:
                server.terminate()
                server.wait()


def _last_line(log: Any) -> str:
    """Return the last line of a server's log, which is its error."""
    log.seek(0)
    lines = log.read().decode(errors="replace").strip().splitlines()
    return lines[-1].removeprefix("error: ") if lines else "The server ended."


def _served(url: str, key: str, wanted: str) -> tuple[str, int | None] | int | None:
    """Ask a server for its model's name and context length.

    Returns `LOADING` while it loads, and None if there is no server. Of several models it returns
    the wanted one, or the first. The context length is None if the server does not report it.

    Raises `ServerError`.
    """
    try:
        request = Request(f"{url}/v1/models", headers={"Authorization": f"Bearer {key}"})
        with open_url(request, TIMEOUT) as response:
            models = json.load(response)["data"]
            model = models[0]
            for offered in models:
                if offered["id"] == wanted:
                    model = offered
            context = int(model.get("context_length") or UNKNOWN_CONTEXT)
            return str(model["id"]), context if context < UNKNOWN_CONTEXT else None
    except HTTPError as error:
        with error:
            if error.code == LOADING:
                return LOADING
            advice = "give the server's --api-key, or another --port"
            raise ServerError(f"{url} answers {error.code}: {advice}.") from error
    except (ValueError, LookupError, TypeError) as error:
        raise ServerError(f"{url} lists no model ({error}): give another --port.") from error
    except OSError:
        return None


def _exit(number: int, _: Any) -> None:
    """End this program, and with it the server, on SIGTERM and on Ctrl-C."""
    sys.exit(128 + number)


def _leave_ctrl_c(number: int, frame: Any) -> None:
    """Leave Ctrl-C to the agent. With SIG_IGN the agent would ignore it as well."""
    if number != signal.SIGINT:
        _exit(number, frame)
