"""Predicts how much memory known targets need, and how fast a Mac would decode with them.

A plain step takes the time to read its weights and context, plus a few microseconds per kernel. A
step of many rows takes the time to multiply by the weights instead, if that is longer (Williams,
Waterman, Patterson, "Roofline", 2009).
"""

from __future__ import annotations

import tomllib
from dataclasses import dataclass
from functools import cache
from importlib.resources import files

from ..machine.chips import Chip
from ..machine.facts import GB
from .quantization import LARGE_DRAFTER, Quantization
from .registry import KnownPair, find_pair

CONTEXT = 16_000  # tokens of context that must fit into the memory
BITS = 4  # bits per weight, as models are usually converted
GROUP = 64  # weights that share a scale
STEP_CONTEXT = 1_000  # tokens of context that a predicted step reads
ROWS = 16  # rows that a step with drafts verifies
STOCK_ROWS = 32  # rows of MLX's own tile, which costs the same if fewer are used
EXPERT_ROWS = 10  # rows that our tile of an expert costs: half of it is multiplied
DRAFT_KERNELS = 120  # kernels that a drafter's forward launches
OUR_TILES = ("M1", "M2", "M3", "M4")  # generations on which our kernels are expected to win


@dataclass(frozen=True)
class ModelSize:
    """A target and its drafter, as sizes.toml describes them.

    Attributes:
        dense: parameters, in billions, that every token is multiplied by.
        head: those of them, in billions, that compute the logits.
        token: kB of keys and values per token of context.
        kernels: launches of a plain forward, roughly.
        drafter: parameters of the default drafter, in billions.
        lookup: parameters of embeddings that are only looked up, in billions.
        experts: how many experts there are, of which each token uses `chosen`.
        expert: parameters of one expert in all layers, in billions.
        fixed: MB of windows and states, at any length of the context.
        stored: bytes per parameter, (dense, expert), if the publisher has quantized them.
    """

    dense: float
    head: float
    token: float
    kernels: int
    drafter: float
    lookup: float = 0.0
    experts: int = 0
    chosen: int = 0
    expert: float = 0.0
    fixed: float = 0.0
    stored: tuple[float, float] | None = None

    def weights(self, bits: int) -> float:
        """Bytes of the target's weights."""
        dense, expert = self._bytes(bits)
        return GB * ((self.dense + self.lookup) * dense + self.experts * self.expert * expert)

    @property
    def published_weights(self) -> float:
        """Bytes of the target's weights as published, with 16 bits each unless `stored` is set."""
        dense, expert = self.stored or (2.0, 2.0)
        return GB * ((self.dense + self.lookup) * dense + self.experts * self.expert * expert)

    @property
    def drafter_bytes(self) -> float:
        """Bytes of the drafter in memory: a large one is loaded in 4 bits, others in 16."""
        parameters = GB * self.drafter
        large = parameters > LARGE_DRAFTER
        return Quantization(BITS, GROUP).quantized_bytes(parameters) if large else 2 * parameters

    def context(self, tokens: int) -> float:
        """Bytes of keys, values and states after this many tokens."""
        return 1e3 * self.token * tokens + 1e6 * self.fixed

    def plain_seconds(self, chip: Chip, bits: int = BITS) -> float:
        """Predict the seconds that a plain step takes."""
        dense, expert = self._bytes(bits)
        read = GB * (self.dense * dense + self.chosen * self.expert * expert)
        return chip.read_seconds(read + self.context(STEP_CONTEXT)) + chip.launch * self.kernels

    def gains_above(self, chip: Chip, bits: int = BITS) -> float:
        """Predict how many tokens a step of 16 rows must yield to be faster than plain steps."""
        dense, _ = self._bytes(bits)
        draft = chip.read_seconds(self.drafter_bytes + GB * self.head * dense)
        draft += chip.launch * DRAFT_KERNELS
        return (draft + self._verify_seconds(chip, bits)) / self.plain_seconds(chip, bits)

    def _verify_seconds(self, chip: Chip, bits: int) -> float:
        """Predict the seconds of the target's forward over 16 rows."""
        dense, expert = self._bytes(bits)
        read_dense = chip.read_seconds(GB * self.dense * dense)
        read_expert = chip.read_seconds(GB * self.expert * expert)
        experts = ROWS * self.chosen * read_expert  # MLX reads each row's experts
        if chip.generation in OUR_TILES:
            multiply_dense = chip.multiply_seconds(ROWS, GB * self.dense)
            if self.experts:
                # Our kernels read an expert once for all rows that use it.
                # The share of experts that no row chooses, if rows choose at random.
                unused = (1 - self.chosen / self.experts) ** ROWS
                used_experts = self.experts * (1 - unused)
                multiply_expert = chip.multiply_seconds(EXPERT_ROWS, GB * self.expert)
                experts = min(experts, used_experts * max(read_expert, multiply_expert))
        else:
            multiply_dense = chip.multiply_seconds(STOCK_ROWS, GB * self.dense, chip.stock_share)
        rest = chip.read_seconds(self.context(STEP_CONTEXT)) + chip.launch * self.kernels
        return rest + max(read_dense, multiply_dense) + experts

    def _bytes(self, bits: int) -> tuple[float, float]:
        """Bytes per dense parameter, and per parameter of an expert."""
        per_weight = Quantization(bits, GROUP).quantized_bytes(1)
        return self.stored or (per_weight, per_weight)


@dataclass(frozen=True)
class MemoryNeed:
    """Bytes that a target needs for its weights, its drafter and `CONTEXT` tokens of context."""

    weights: float
    drafter: float
    context: float

    @property
    def total(self) -> float:
        """All bytes together."""
        return self.weights + self.drafter + self.context


@cache
def _sizes() -> dict[str, ModelSize]:
    text = files("dflash_mlx.loading").joinpath("sizes.toml").read_text(encoding="utf-8")
    return {name: ModelSize(**row) for name, row in tomllib.loads(text).items()}


def find_size(pair: KnownPair) -> ModelSize | None:
    """The size of a pair's target; None if sizes.toml does not have it."""
    return _sizes().get(pair.short)


def bits_on_load(pair: KnownPair) -> int | None:
    """The bits to quantize to on load, so that the model takes what `memory_need` predicts.

    None if the download is quantized already, and if the target's size is not known.
    """
    size = find_size(pair)
    if size is None or size.stored is not None or pair.conversion:
        return None
    return BITS


def memory_need(pair: KnownPair, bits: int = BITS) -> MemoryNeed | None:
    """The memory that a target and its drafter need; None if the target's size is not known.

    Args:
        pair: the target and its drafters.
        bits: bits per weight. Weights that the publisher has quantized stay as they are.
    """
    size = find_size(pair)
    if size is None:
        return None
    return MemoryNeed(size.weights(bits), size.drafter_bytes, size.context(CONTEXT))


def drafter_and_context_bytes(name: str) -> float:
    """Bytes of a known target's drafter and of `CONTEXT` tokens; 0 if the target is not known."""
    pair = find_pair(name)
    need = None if pair is None else memory_need(pair)
    return 0.0 if need is None else need.drafter + need.context
