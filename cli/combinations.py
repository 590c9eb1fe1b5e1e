"""Options that make others useless. Nothing given on the command line is ignored silently."""

from __future__ import annotations

from dataclasses import fields

import typer

from dflash_mlx.cluster.member import rank
from dflash_mlx.loading.registry import LOOKUP, NONE

from .options import AUTO, StepOptions, Weights, refuse, spelled

THINKING = ("think", "no_think", "reasoning_effort")
DRAFTING = ("block_size", "tree_budget", "no_policy", "draft_bits", "draft_window", "compare")
WEIGHTS, STEPS = ([field.name for field in fields(group)] for group in (Weights, StepOptions))
OPENAI = ("draft", "block_size", "tree_budget", "hosts", *THINKING, *WEIGHTS)
EXCLUDED = {  # by an option -> the options that have no effect beside it
    "no_draft": ("draft", *DRAFTING),
    "server": ("draft", "no_draft", "verbose", *WEIGHTS, *STEPS),
    "no_think": ("think", "reasoning_effort"),
    "no_auth": ("api_key", "api_key_file"),
    "openai": tuple(name for name in OPENAI if name != "offline"),
    "concurrency": ("out",),
    "protocol": ("prompts", "repeats"),
    "prompts": ("suite", "data"),
}
NEEDED = {"server": "api_key", "openai": "concurrency", "suite": "data"}  # by the other option
VALUES = {  # an option and its value -> the options that have no effect beside it
    ("draft", NONE): DRAFTING,
    ("draft", LOOKUP): ("tree_budget", "draft_bits", "draft_window"),
    ("tree_budget", AUTO): ("block_size", "no_policy"),
}


def check_combinations(context: typer.Context) -> None:
    """Raise `SettingsError` for an option that has no effect beside the others."""
    given = context.params
    for option, others in EXCLUDED.items():
        if given.get(option):
            refuse(context, f"cannot be combined with {spelled(option)}", *others)
    for (option, value), others in VALUES.items():
        if given.get(option) == value:
            refuse(context, f"cannot be combined with {spelled(option)} {value}", *others)
    for option, other in NEEDED.items():
        if option in given and not given[option]:
            refuse(context, f"needs {spelled(option)}", other)
    if not (given.get("target_bits") or given.get("draft_bits")):
        refuse(context, "needs --target-bits or --draft-bits", "quant_mode", "group_size")
    if given.get("raw"):
        refuse(context, "cannot be combined with --no-chat-template", "system", *THINKING)
    if given.get("prefix_cache") == 0:
        refuse(context, "needs a --prefix-cache above 0", "cache_dir")
    if not given.get("hosts") and rank() is None:
        refuse(context, "needs --hosts", "pipeline", "stall_seconds")
