"""From the options to a target and its drafter, in the one order that works: BLAS, MLX, weights."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import typer

import dflash_mlx
from dflash_mlx.errors import DownloadError, ModelNotFoundError
from dflash_mlx.loading.checks import fits_here, looks_quantized
from dflash_mlx.loading.hub import WEIGHTS, Hub
from dflash_mlx.loading.registry import LOOKUP, NONE, WITH_LOOKUP, check_name, known_drafter, short
from dflash_mlx.machine.blas import BlasInfo

from .counters import rounds_by_rows
from .options import AUTO, Names, Rounds, Weights, bits_of, tree_rows
from .output import note, sized, waiting

if TYPE_CHECKING:
    from dflash_mlx import Policy, Stats, Target
    from dflash_mlx.drafter.protocol import Drafter
    from dflash_mlx.policy.trees import TreePolicy

    from .machines import Member

WHOLE_BLOCKS = Rounds(no_policy=True)


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
    member: Member | None = None  # of the machines that share the target

    @property
    def rows(self) -> int:
        """Tokens verified at once."""
        from dflash_mlx.generation import max_block_size

        return max_block_size(self.drafter, self.block_size)

    @property
    def drafts(self) -> str:
        """What drafts, in a word; "plain" for nothing."""
        from dflash_mlx.drafter.protocol import label

        return "plain" if self.drafter is None else label(self.drafter)

    @property
    def chains(self) -> Policy | None:
        """What knows the costs of rounds; None where no costs were measured."""
        from dflash_mlx.policy.trees import TreePolicy

        if isinstance(self.policy, TreePolicy):
            return None if self.policy.pinned else self.policy.chains
        return self.policy

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
        spread = "" if self.member is None else f" · {self.member.cluster.size} machines"
        return f"{short(self.target.name)} · {drafting} · {self.blas.name}{exact}{spread}"

    def limit_reached(self, stats: Stats) -> str:
        """Which limit ended a text of finish reason "length"."""
        if stats.prompt_tokens + stats.output_tokens >= self.target.context_length:
            return "the context is full"
        return "cut off by --max-tokens"


def open_pair(
    names: Names,
    weights: Weights,
    rounds: Rounds = WHOLE_BLOCKS,
    no_draft: bool = False,
    warm: bool = True,
    member: Member | None = None,
    check: Callable[[Target], object] | None = None,
) -> Pair:
    """Put the BLAS in place and load the weights.

    `member` is of the machines that share the target. `warm` runs a few rounds, too, which compile
    what is compiled: for whoever compares speeds, or asks more than once. `check` refuses what the
    target cannot do, before seconds go into costs.

    Raises the errors of `dflash_mlx.load` and of `check`, and `MissingDependencyError`.
    """
    of_drafts = {
        "--draft": no_draft and names.draft,
        "--block-size": rounds.block_size,
        "--no-policy": rounds.no_policy,
        "--draft-bits": weights.draft_bits,
    }
    check_plain(no_draft, names, of_drafts)
    draft = _drafting(names, no_draft)
    budget = _tree_budget(rounds, no_draft, draft)
    check_name(names.model)  # before the seconds that MLX takes to start
    hub = Hub(offline=weights.offline)
    announce(names.model, hub)
    with suppress(ModelNotFoundError, DownloadError):  # loading says it, and what else can draft
        announce_drafter(draft or known_drafter(names.model), hub)
    blas = dflash_mlx.use_fast_blas(stock=weights.stock_blas)
    with waiting("Starting MLX"):
        load, load_target = dflash_mlx.load, dflash_mlx.load_target
    target_bits, draft_bits = bits_of(weights.target_bits), bits_of(weights.draft_bits)
    settings = weights.settings | {"exact": weights.exact}
    settings |= {} if member is None else {"cluster": member.cluster}
    drafter: Drafter | None = None
    with waiting(f"Loading {names.model}", quiet=_is_remote(names)):
        if draft == NONE:
            target = load_target(names.model, target_bits, **settings)
        else:
            target, drafter = load(names.model, draft, target_bits, draft_bits, **settings)
    if draft == LOOKUP and names.draft is None:
        note(
            f"No drafter is known for {names.model}: lookup drafts. --draft NAME names another "
            f"one, --draft {LOOKUP} asks for this one, --draft {NONE} does not draft."
        )
    if check is not None:
        check(target)
    policy = None if drafter is None else _policy(rounds, budget, target, drafter)
    kv_bits = bits_of(rounds.kv_bits)
    pair = Pair(target, drafter, rounds.block_size, blas, kv_bits, policy, budget, member)
    file = pair.chains.file if pair.chains else None
    if file and not os.path.exists(file):
        note(f"{file.parent} cannot be written: this machine is measured anew at every start.")
    if warm:
        from dflash_mlx.bench.measure import warm_up

        with waiting("Warming up"):
            warm_up(target, drafter, pair.block_size)
    return pair


def check_drafts(names: Names) -> None:
    """Raise `BadParameter` where nothing would draft."""
    if names.draft == NONE:
        raise typer.BadParameter(f"not {NONE}: name what drafts", param_hint="--draft")


def check_plain(no_draft: bool, names: Names, given: Mapping[str, Any]) -> None:
    """Raise `BadParameter` for a given option about drafts where none are made."""
    if not no_draft and names.draft != NONE:
        return
    for option in (option for option, value in given.items() if value):
        hint = "--no-draft" if no_draft else f"--draft {NONE}"
        raise typer.BadParameter(f"goes without {option}", param_hint=hint)


def _drafting(names: Names, no_draft: bool) -> str | None:
    """What drafts: what --draft names, a known drafter (None), or lookup where none is known."""
    if no_draft:
        return NONE
    if names.draft is None and known_drafter(names.model) is None:
        return LOOKUP
    return names.draft


def _tree_budget(rounds: Rounds, no_draft: bool, draft: str | None) -> int | str | None:
    """What --tree-budget says; None is chains."""
    rows = tree_rows(rounds.tree_budget)
    if rows is None:
        return None
    without_trees = not no_draft and draft in (LOOKUP, NONE)
    wrong: dict[str, Any] = {"--no-draft": no_draft, f"--draft {draft}": without_trees}
    if rows == AUTO:
        wrong |= {"--block-size": rounds.block_size, "--no-policy": rounds.no_policy}
    if other := next((option for option, given in wrong.items() if given), None):
        raise typer.BadParameter(f"{rows} goes without {other}", param_hint="--tree-budget")
    return rows


def _policy(
    rounds: Rounds, budget: int | str | None, target: Target, drafter: Drafter
) -> Policy | TreePolicy | None:
    """What decides about the rounds, where not every one is a whole block."""
    if isinstance(budget, int):
        from dflash_mlx.policy.trees import TreePolicy

        return TreePolicy.fixed(budget)
    if rounds.no_policy or rounds.block_size:
        return None
    kv_bits = bits_of(rounds.kv_bits)
    if budget is None:
        return dflash_mlx.Policy.of(target, drafter, kv_bits=kv_bits, meanwhile=measuring)
    from dflash_mlx.policy.trees import tree_policy

    return tree_policy(target, drafter, kv_bits, meanwhile=measuring)


@contextmanager
def measuring(what: str) -> Iterator[None]:
    """Say that costs are measured meanwhile."""
    note(f"Measuring what {what} costs, once for this pair and machine: some seconds.")
    with waiting("Measuring"):
        yield


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


def announce(name: str, hub: Hub) -> None:
    """Say how much is about to be downloaded, where something is, and whether a target fits.

    Raises the errors of `Hub.fetch`.
    """
    if on_hub(name) and not hub.offline and hub.downloaded(name) is None:
        size = hub.remote_bytes(name, WEIGHTS)
        note(f"{name}: {sized(size)} to download, {fits_here(size, looks_quantized(name))}")


def announce_drafter(name: str | None, hub: Hub) -> None:
    """Say what drafts, where it is a repository, and how large it is. Raises as `announce`."""
    name = name.removesuffix(WITH_LOOKUP) if name else None
    if name is None or not on_hub(name):
        return
    size = hub.downloaded(name)
    if size is not None:
        note(f"drafted by {name}, {sized(size)}")
    elif not hub.offline:
        note(f"drafted by {name}, {sized(hub.remote_bytes(name, WEIGHTS))} to download")


def on_hub(name: str) -> bool:
    """Whether a name is a repository's, and not one of what is on this disk."""
    return "/" in name and not Path(name).expanduser().exists()


def _is_remote(names: Names) -> bool:
    """Whether something may be fetched, whose own progress bars need the screen."""
    return any(map(on_hub, filter(None, (names.model, names.draft))))
