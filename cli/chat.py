"""`dflash-mlx chat`: a conversation on the terminal, or one line of a pipe after another."""

from __future__ import annotations

from dflash_mlx.errors import PromptError

from . import options
from .chat_commands import obey
from .chat_dialogue import Dialogue
from .chat_loop import Chat
from .pair import open_pair


def chat(
    *,
    names: options.Names,
    no_draft: options.NoDraft = False,
    weights: options.Weights,
    max_tokens: options.MaxTokens = 1024,
    sampling: options.Sampling,
    rounds: options.Rounds,
    stop: options.Stop = None,
    verbose: options.Verbose = False,
) -> None:
    """Chat with a model. In a pipe, each line is a turn and stdout has only the answers."""
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
    Chat(Dialogue(pair, settings), obey, verbose).run()
