"""Options that make others useless. Nothing given on the command line is ignored silently."""

from __future__ import annotations

from dataclasses import fields

import typer

from dflash_mlx.loading.registry import LOOKUP, NONE

from .machines import rank
from .options import AUTO, StepOptions, Weights, refuse

DRAFTING = ("block_size", "tree_budget", "no_policy", "draft_bits", "compare")
WEIGHTS, STEPS = ([field.name for field in fields(group)] for group in (Weights, StepOptions))
WITH = "cannot be combined with"


def check_combinations(context: typer.Context) -> None:
    """Raise `BadParameter` for an option that has no effect beside the others."""
    given = context.params
    if given.get("no_draft"):
        refuse(context, f"{WITH} --no-draft", "draft", *DRAFTING)
    if given.get("draft") == NONE:
        refuse(context, f"{WITH} --draft {NONE}", *DRAFTING)
    if given.get("draft") == LOOKUP:
        refuse(context, f"{WITH} --draft {LOOKUP}", "tree_budget", "draft_bits")
    if not (given.get("target_bits") or given.get("draft_bits")):
        refuse(context, "needs --target-bits or --draft-bits", "quant_mode", "group_size")
    if given.get("tree_budget") == AUTO:
        refuse(context, f"{WITH} --tree-budget {AUTO}", "block_size", "no_policy")
    if given.get("raw"):
        refuse(context, f"{WITH} --no-chat-template", "system")
    if given.get("server"):
        refuse(context, f"{WITH} --server", "draft", "no_draft", "verbose", *WEIGHTS, *STEPS)
    elif "server" in given:
        refuse(context, "needs --server", "api_key")
    if given.get("prefix_cache") == 0:
        refuse(context, "needs a --prefix-cache above 0", "cache_dir")
    if given.get("no_auth"):
        refuse(context, f"{WITH} --no-auth", "api_key", "api_key_file")
    if not given.get("hosts") and rank() is None:
        refuse(context, "needs --hosts", "pipeline", "stall_seconds")
    if given.get("openai"):
        ours = ("draft", "block_size", "tree_budget", "hosts", *WEIGHTS)
        refuse(context, f"{WITH} --openai", *(name for name in ours if name != "offline"))
    elif "openai" in given:
        refuse(context, "needs --openai", "concurrency")
    if given.get("concurrency"):
        refuse(context, f"{WITH} --concurrency", "out")
    if given.get("protocol"):
        refuse(context, f"{WITH} --protocol", "prompts", "repeats")
    if given.get("prompts"):
        refuse(context, f"{WITH} --prompts", "suite", "data")
    elif "suite" in given and not given["suite"]:
        refuse(context, "needs --suite", "data")
