"""Options that make others useless. Nothing given on the command line is ignored silently."""

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
ANY = object()
EXCLUDED = {  # an option as it is typed -> its parameter and value, and what has no effect beside
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
NEEDED = (  # the parameters of which one must be given, and the options that need it
    (("server",), "--server", ("api_key",)),
    (("openai",), "--openai", ("concurrency",)),
    (("suite",), "--suite", ("data",)),
    (("hosts",), "--hosts", ("pipeline", "stall_seconds")),
    (("target_bits", "draft_bits"), "--target-bits or --draft-bits", ("quant_mode", "group_size")),
)


def check_combinations(context: typer.Context) -> None:
    """Raise `SettingsError` for an option that has no effect beside the others."""
    values = context.params
    for typed, (name, value, others) in EXCLUDED.items():
        if name in values and (values[name] if value is ANY else values[name] == value):
            _refuse(context, f"cannot be combined with {typed}", others)
    for names, typed, others in NEEDED:
        known = any(name in values for name in names) and (typed != "--hosts" or rank() is None)
        if known and not any(values.get(name) for name in names):
            _refuse(context, f"needs {typed}", others)


def _refuse(context: typer.Context, reason: str, names: tuple[str, ...]) -> None:
    """Raise `SettingsError` with the reason if one of these options was given, and not none."""
    for parameter in context.command.params:
        if parameter.name in given(context).intersection(names):
            if (value := context.params[parameter.name]) is not None:
                typed = parameter.opts if value else parameter.secondary_opts or parameter.opts
                raise SettingsError(f"{typed[0]} {reason}.")
