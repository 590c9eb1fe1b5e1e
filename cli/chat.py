"""`dflash-mlx chat`: a conversation on the terminal, or one line of a pipe after another."""

from __future__ import annotations

from dataclasses import fields
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from dflash_mlx.errors import PromptError, ServerError
from dflash_mlx.loading.registry import EMBEDDED

from . import options
from .chat_commands import obey, reader
from .chat_dialogue import Dialogue, read_talk
from .chat_loop import Chat
from .chat_settings import check
from .generate_options import System
from .generate_question import utf8
from .output import note
from .pair import Pair, open_pair

if TYPE_CHECKING:
    from dflash_mlx import Target

Resume = Annotated[
    Path | None,
    options.value(
        "--resume",
        group=options.DECODING,
        metavar="FILE",
        help="Go on with a conversation that /save has written.",
    ),
]


Address = Annotated[
    str | None,
    options.value(
        "--server",
        group=options.DECODING,
        metavar="URL",
        help="Talk to a server that runs; no model is loaded here.",
    ),
]
ApiKey = Annotated[
    str | None,
    options.value("--api-key", group=options.DECODING, metavar="KEY", help="The server's key."),
]


def chat(
    context: typer.Context,
    *,
    names: options.Names,
    no_draft: options.NoDraft = False,
    weights: options.Weights,
    max_tokens: options.MaxTokens = 1024,
    sampling: options.Sampling,
    rounds: options.Rounds,
    stop: options.Stop = None,
    system: System = None,
    resume: Resume = None,
    server: Address = None,
    api_key: ApiKey = None,
    verbose: options.Verbose = False,
) -> None:
    """Chat with a model. In a pipe, each line is a turn and stdout has only the answers."""
    talk = None if resume is None else read_talk(resume.expanduser())
    if system is not None:
        utf8(system, "The system message")
    settings = sampling.settings() | {"max_tokens": max_tokens, "stop": stop or ()}
    if server is not None:
        _check_is_the_servers(context)
        dialogue = _served(server, names, api_key, settings)
    elif api_key is not None:
        raise typer.BadParameter("goes with --server", param_hint="--api-key")
    else:
        pair = open_pair(names, weights, rounds, no_draft, check=_can_chat)
        dialogue = _loaded(pair, settings)
    if talk is not None:
        dialogue.go_on(*talk)
    if system is not None:
        dialogue.set_system(system)
    Chat(dialogue, obey, reader, verbose).run()


def _can_chat(target: Target) -> None:
    if not target.tokenizer.has_chat_template:
        raise PromptError(f"{target.name} has no chat template: it cannot chat.")


def _loaded(pair: Pair, settings: dict[str, Any]) -> Dialogue:
    """With a model in this process."""
    decoding = {"block_size": pair.block_size, "kv_bits": pair.kv_bits, "policy": pair.policy}
    check(settings, pair.target.vocab_size)
    return Dialogue(pair, settings | decoding)


def _check_is_the_servers(context: typer.Context) -> None:
    """Refuse the options of a pair and its rounds: those a server has chosen for itself."""
    pairs = [field.name for group in (options.Weights, options.Rounds) for field in fields(group)]
    ours = ["draft", "no_draft", *pairs, "verbose"]
    if given := [options.spelled(name) for name in ours if options.is_given(name, context)]:
        raise typer.BadParameter(
            f"goes without {', '.join(given)}: that is the server's affair", param_hint="--server"
        )


def _served(url: str, names: options.Names, key: str | None, settings: dict[str, Any]) -> Dialogue:
    """With the model of a server."""
    from dflash_mlx.bench.server import ServerClient

    from .chat_server import Served

    model = None if names.model == EMBEDDED else names.model
    server = ServerClient.find(url, model, key)
    if model is not None:
        _say_if_unknown(server)
    return Served(server, settings)


def _say_if_unknown(server: Any) -> None:
    """Say that a server does not name the model it is asked for: it may answer by another."""
    try:
        offered = server.offered()
    except ServerError:  # not all say; the first question tells whether it is there at all
        return
    if offered and server.model not in offered:
        note(f"{server.url} serves {', '.join(offered)}, which may be what answers.")
