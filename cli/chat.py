"""`dflash-mlx chat`: a conversation on the terminal, or one line of a pipe after another."""

from __future__ import annotations

from dflash_mlx.errors import PromptError

from . import options
from .chat_commands import obey
from .chat_dialogue import Dialogue
from .chat_loop import Chat
from .pair import Choice, open_pair


def chat(
    model: options.Model = "tiny",
    draft: options.Draft = None,
    no_draft: options.NoDraft = False,
    target_bits: options.TargetBits = None,
    draft_bits: options.DraftBits = None,
    quant_mode: options.Quantize = options.QuantMode.affine,
    group_size: options.GroupSize = None,
    exact: options.Exact = None,
    offline: options.Offline = False,
    stock_blas: options.StockBlas = False,
    max_tokens: options.MaxTokens = 1024,
    temperature: options.Temperature = 0.0,
    top_p: options.TopP = 1.0,
    top_k: options.TopK = 0,
    min_p: options.MinP = 0.0,
    seed: options.Seed = None,
    block_size: options.BlockSize = None,
    tree_budget: options.TreeBudget = "off",
    kv_bits: options.KvBits = None,
    no_policy: options.NoPolicy = False,
    stop: options.Stop = None,
    verbose: options.Verbose = False,
) -> None:
    """Talk with a model. In a pipe every line is a turn, and stdout holds the answers alone."""
    choice = Choice(
        model=model,
        draft=draft,
        no_draft=no_draft,
        target_bits=target_bits,
        draft_bits=draft_bits,
        quant_mode=quant_mode,
        group_size=group_size,
        exact=exact,
        offline=offline,
        stock_blas=stock_blas,
        block_size=block_size,
        tree_budget=tree_budget,
        kv_bits=kv_bits,
        policy=not no_policy,
    )
    pair = open_pair(choice)
    if not pair.target.tokenizer.has_chat_template:
        raise PromptError(f"{pair.target.name} has no chat template: it cannot chat.")
    settings = options.sampling(temperature, top_p, top_k, min_p, seed)
    settings |= {
        "max_tokens": max_tokens,
        "block_size": pair.block_size,
        "kv_bits": pair.kv_bits,
        "policy": pair.policy,
        "stop": stop or (),
    }
    Chat(Dialogue(pair, settings), obey, verbose).run()
