"""From the options to a target and its drafter, in the one order that works: BLAS, MLX, weights."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import typer

import dflash_mlx
from dflash_mlx.loading.hub import Hub
from dflash_mlx.loading.registry import EMBEDDED, LOOKUP, NONE, pair_of
from dflash_mlx.machine.blas import BlasInfo

from .counters import rounds_by_rows
from .options import Bits, QuantMode
from .screen import note, waiting

if TYPE_CHECKING:
    from dflash_mlx import Policy, Stats, Target
    from dflash_mlx.drafter.protocol import Drafter
    from dflash_mlx.policy.trees import TreePolicy

AUTO, OFF = "auto", "off"  # of --tree-budget


@dataclass(frozen=True)
class Choice:
    """The options that say what runs."""

    model: str
    draft: str | None = None
    no_draft: bool = False
    target_bits: Bits | None = None
    draft_bits: Bits | None = None
    block_size: int | None = None
    tree_budget: str = "off"  # or "auto", or a number of rows
    stock_blas: bool = False
    quant_mode: QuantMode = QuantMode.affine
    group_size: int | None = None
    exact: bool | None = None
    offline: bool = False
    kv_bits: Bits | None = None
    policy: bool = True  # measured costs decide the width of each round, unless block_size does


@dataclass(frozen=True)
class Pair:
    """What was loaded; `drafter` is None for plain decoding."""

    target: Target
    drafter: Drafter | None
    block_size: int | None
    blas: BlasInfo
    kv_bits: int | None = None
    policy: Policy | TreePolicy | None = None
    tree_budget: int | str | None = None

    @property
    def rows(self) -> int:
        """Tokens verified at once."""
        from dflash_mlx.loop import widest_block

        return widest_block(self.drafter, self.block_size)

    @property
    def title(self) -> str:
        """The model and what its speed depends on, in a few words."""
        drafting = "no drafter" if self.drafter is None else f"block size {self.rows}"
        if self.tree_budget is not None:
            sizes = "as large as pays" if self.tree_budget == AUTO else f"of {self.tree_budget}"
            drafting = f"trees {sizes}"
        elif self.policy is not None:
            drafting = "block size as large as pays"
        exact = " · exact" if self.target.wiring and self.target.wiring.exact else ""
        return f"{self.target.name} · {drafting} · {self.blas.name}{exact}"

    def limit_reached(self, stats: Stats) -> str:
        """Which limit ended a text of finish reason "length"."""
        if stats.prompt_tokens + stats.output_tokens >= self.target.context_length:
            return "the context is full"
        return "cut off by --max-tokens"


def open_pair(choice: Choice) -> Pair:
    """Put the BLAS in place, load the weights and run a few rounds to compile what is compiled.

    Raises the errors of `dflash_mlx.load`, and `MissingDependencyError`.
    """
    if choice.no_draft and (choice.draft or choice.block_size):
        raise typer.BadParameter(
            "goes with neither --draft nor --block-size", param_hint="--no-draft"
        )
    budget = _tree_budget(choice)
    blas = dflash_mlx.use_fast_blas(stock=choice.stock_blas)
    with waiting("Starting MLX"):
        load, load_target = dflash_mlx.load, dflash_mlx.load_target
    target_bits, draft_bits = bits_of(choice.target_bits), bits_of(choice.draft_bits)
    drafter: Drafter | None = None
    draft = _drafting(choice)
    settings: dict[str, Any] = {
        "mode": choice.quant_mode.value,
        "group_size": choice.group_size,
        "hub": Hub(offline=choice.offline),
        "exact": choice.exact,
    }
    with waiting(f"Loading {choice.model}", quiet=_is_remote(choice)):
        if draft == NONE:
            target = load_target(choice.model, target_bits, **settings)
        else:
            target, drafter = load(choice.model, draft, target_bits, draft_bits, **settings)
    if draft == LOOKUP and choice.draft is None:
        note(f"No drafter is known for {choice.model}: lookup drafts. --draft names another one.")
    policy = None if drafter is None else _policy(choice, budget, target, drafter)
    pair = Pair(target, drafter, choice.block_size, blas, bits_of(choice.kv_bits), policy, budget)
    with waiting("Warming up"):
        from dflash_mlx.bench.measure import warm_up

        warm_up(target, drafter, pair.block_size)
    return pair


def _drafting(choice: Choice) -> str | None:
    """What drafts: what --draft names, a known drafter (None), or lookup where none is known."""
    if choice.no_draft:
        return NONE
    if choice.draft is None and choice.model != EMBEDDED and pair_of(choice.model) is None:
        return LOOKUP
    return choice.draft


def _tree_budget(choice: Choice) -> int | str | None:
    """What --tree-budget says; None is chains."""
    text = choice.tree_budget
    if text == OFF:
        return None
    wrong: dict[str, Any] = {
        "--no-draft": choice.no_draft,
        f"--draft {choice.draft}": choice.draft in (LOOKUP, NONE),
    }
    if text == AUTO:
        wrong |= {"--block-size": choice.block_size, "--no-policy": not choice.policy}
    elif not (text.isdecimal() and int(text) > 1):
        raise typer.BadParameter(
            f"{text} is neither a number from 2 on, nor {AUTO}, nor {OFF}",
            param_hint="--tree-budget",
        )
    if other := next((option for option, given in wrong.items() if given), None):
        raise typer.BadParameter(f"{text} goes without {other}", param_hint="--tree-budget")
    return AUTO if text == AUTO else int(text)


def _policy(
    choice: Choice, budget: int | str | None, target: Target, drafter: Drafter
) -> Policy | TreePolicy | None:
    """What decides about the rounds, where not every one is a whole block."""
    if isinstance(budget, int):
        from dflash_mlx.policy.trees import TreePolicy

        return TreePolicy.fixed(budget)
    if not choice.policy or choice.block_size:
        return None
    with waiting("Measuring what a round costs, once for this pair and machine"):
        kv_bits = bits_of(choice.kv_bits)
        if budget is None:
            return dflash_mlx.Policy.of(target, drafter, kv_bits=kv_bits)
        from dflash_mlx.policy.trees import tree_policy

        return tree_policy(target, drafter, kv_bits)


def explain(pair: Pair, stats: Stats) -> None:
    """Say how wide the rounds of a generation were, and what made a policy choose so."""
    note(f"rounds x rows: {rounds_by_rows(stats.widths)}")
    if pair.tree_budget is not None:
        note(f"of these, trees: {rounds_by_rows(stats.trees)}")
    if stats.seed is not None:
        note(f"seed: {stats.seed}")
    context = stats.prompt_tokens + stats.output_tokens
    for line in pair.policy.describe(context) if pair.policy else ():
        note(line)


def bits_of(bits: Bits | None) -> int | None:
    """The number an option stands for."""
    return None if bits is None else int(bits.value)


def _is_remote(choice: Choice) -> bool:
    """Whether something may be fetched, whose own progress bars need the screen."""
    names = filter(None, (choice.model, choice.draft))
    return any("/" in name and not Path(name).expanduser().exists() for name in names)
