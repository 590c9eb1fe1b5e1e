"""`dflash-mlx chat`: a conversation on the terminal, or one line of a pipe after another."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

from dflash_mlx.errors import PromptError

from . import options
from .chat_commands import obey, reader
from .chat_dialogue import Dialogue, read_messages
from .chat_loop import Chat
from .generate_options import System
from .generate_question import utf8
from .pair import open_pair

Resume = Annotated[
    Path | None,
    options.value(
        "--resume",
        group=options.DECODING,
        metavar="FILE",
        help="Go on with a conversation that /save has written.",
    ),
]


def chat(
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
    verbose: options.Verbose = False,
) -> None:
    """Chat with a model. In a pipe, each line is a turn and stdout has only the answers."""
    messages = [] if resume is None else read_messages(resume.expanduser())
    if system is not None:
        utf8(system, "The system message")
    pair = open_pair(names, weights, rounds, no_draft)
    if not pair.target.tokenizer.has_chat_template:
        raise PromptError(f"{pair.target.name} has no chat template: it cannot chat.")
    settings = sampling.settings() | {
        "max_tokens": max_tokens,
        "block_size": pair.block_size,
        "kv_bits": pair.kv_bits,
        "policy": pair.policy,
        "stop": stop or (),
    }
    dialogue = Dialogue(pair, settings)
    dialogue.messages = messages
    if system is not None:
        dialogue.set_system(system)
    Chat(dialogue, obey, reader, verbose).run()
