"""Refuses options that other options make useless, so that none is silently ignored."""

from __future__ import annotations

from dataclasses import fields

import typer

from dflash_mlx.cluster.member import rank
from dflash_mlx.errors import SettingsError
from dflash_mlx.loading.registry import LOOKUP, NONE

from .options import AUTO, Weights, given

THINKING = ("think", "reasoning_effort")
DRAFTING = ("block_size", "tree_budget", "no_policy", "draft_bits", "draft_window", "compare")
WEIGHTS = [field.name for field in fields(Weights)]
OPENAI = ("draft", "adapter", "block_size", "tree_budget", "hosts", *THINKING, *WEIGHTS)
SERVER = ("draft", "adapter", "no_draft", "verbose", "kv_bits", *WEIGHTS, *DRAFTING)
ANY = object()  # matches every value that is given
# An option as it is typed -> its parameter, its value, and the parameters that it makes useless.
EXCLUDED = {
    "--no-draft": ("no_draft", True, ("draft", *DRAFTING)),
    "--draft none": ("draft", NONE, DRAFTING),
    "--draft lookup": ("draft", LOOKUP, ("tree_budget", "draft_bits", "draft_window")),
    "--tree-budget auto": ("tree_budget", AUTO, ("block_size", "no_policy")),
    "--server": ("server", ANY, SERVER),
    "--no-think": ("think", False, ("reasoning_effort",)),
    "--no-chat-template": ("raw", True, ("system", *THINKING)),
    "--no-auth": ("no_auth", True, ("api_key", "api_key_file")),
    "--prefix-cache 0": ("prefix_cache", 0, ("cache_dir",)),
    "--openai": ("openai", ANY, tuple(name for name in OPENAI if name != "offline")),
    "--concurrency": ("concurrency", ANY, ("out",)),
    "--protocol": ("protocol", ANY, ("prompts", "repeats")),
    "--inspect": ("inspect", ANY, ("name", "everything", "chip", "memory")),
    "--warm-start": ("warm_start", ANY, ("kind", "block_size", "layers", "causal")),
    "--prompts": ("prompts", ANY, ("suite", "data")),
}
# Parameters of which one must be given, what they are called, and the parameters that need them.
NEEDED = (
    (("server",), "--server", ("api_key",)),
    (("openai",), "--openai", ("concurrency",)),
    (("suite",), "--suite", ("data",)),
    (("hosts",), "--hosts", ("pipeline", "stall_seconds")),
    (("target_bits", "draft_bits"), "--target-bits or --draft-bits", ("quant_mode", "group_size")),
)


def check_combinations(context: typer.Context) -> None:
    """Raise `SettingsError` for an option that other options make useless."""
    values = context.params
    for option, (name, value, useless) in EXCLUDED.items():
        if name not in values:
            continue
        is_given = bool(values[name]) if value is ANY else values[name] == value
        if is_given:
            _refuse(context, f"cannot be combined with {option}", useless)
    for names, option, dependent in NEEDED:
        if option == "--hosts" and rank() is not None:
            continue
        has_option = any(name in values for name in names)
        if has_option and not any(values.get(name) for name in names):
            _refuse(context, f"needs {option}", dependent)


def _refuse(context: typer.Context, reason: str, names: tuple[str, ...]) -> None:
    """Raise `SettingsError` with the reason if one of these parameters was given a value."""
    for parameter in context.command.params:
        if parameter.name not in given(context).intersection(names):
            continue
        value = context.params[parameter.name]
        if value is not None:
            options = parameter.opts if value else parameter.secondary_opts or parameter.opts
            raise SettingsError(f"{options[0]} {reason}.")
