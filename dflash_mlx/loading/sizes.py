"""What known targets take of a machine's memory, and how fast a Mac would decode: predictions.

A plain step takes as long as reading its weights and context, and a few microseconds per kernel. A
step of many rows also takes as long as multiplying by the weights, if that is longer (Williams,
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
from .registry import KnownPair, pair_of

CONTEXT = 16_000  # tokens that have to fit
BITS = 4  # of a weight, as models are usually converted
GROUP = 64  # weights that share a scale
READ = 1_000  # tokens of context that a predicted step reads
ROWS = 16  # of a step that drafts
STOCK_ROWS = 32  # of MLX's own tile, which is paid for as a whole
EXPERT_ROWS = 10  # what our tile of an expert costs: half of it is multiplied
DRAFT_KERNELS = 120  # of a drafter's forward
OUR_TILES = ("M1", "M2", "M3", "M4")  # where our kernels are expected to win


@dataclass(frozen=True)
class ModelSize:
    """A target and its drafter, as sizes.toml describes them."""

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
        """Bytes of the target's weights as published: 16 bits each unless `stored` says less."""
        dense, expert = self.stored or (2.0, 2.0)
        return GB * ((self.dense + self.lookup) * dense + self.experts * self.expert * expert)

    @property
    def drafter_bytes(self) -> float:
        """Bytes of the drafter in memory: a large one is loaded in 4 bits, others in 16."""
        parameters = GB * self.drafter
        large = parameters > LARGE_DRAFTER
        return Quantization(BITS, GROUP).bytes_of(parameters) if large else 2 * parameters

    def context(self, tokens: int) -> float:
        """Bytes of keys, values and states after this many tokens."""
        return 1e3 * self.token * tokens + 1e6 * self.fixed

    def plain_seconds(self, chip: Chip, bits: int = BITS) -> float:
        """Predicted seconds of a plain step."""
        dense, expert = self._bytes(bits)
        read = GB * (self.dense * dense + self.chosen * self.expert * expert)
        return chip.reading(read + self.context(READ)) + chip.launch * self.kernels

    def gains_above(self, chip: Chip, bits: int = BITS) -> float:
        """Tokens that a step of 16 rows has to bring to be faster than plain steps: predicted."""
        dense, _ = self._bytes(bits)
        draft = chip.reading(self.drafter_bytes + GB * self.head * dense)
        draft += chip.launch * DRAFT_KERNELS
        return (draft + self._verify_seconds(chip, bits)) / self.plain_seconds(chip, bits)

    def _verify_seconds(self, chip: Chip, bits: int) -> float:
        dense, expert = self._bytes(bits)
        reading = chip.reading(GB * self.dense * dense)
        expert_reading = chip.reading(GB * self.expert * expert)
        experts = ROWS * self.chosen * expert_reading  # MLX reads each row's experts
        if chip.generation in OUR_TILES:
            multiplying = chip.multiplying(ROWS, GB * self.dense)
            shared = self.experts and self.experts * (1 - (1 - self.chosen / self.experts) ** ROWS)
            once = max(expert_reading, chip.multiplying(EXPERT_ROWS, GB * self.expert))
            experts = min(experts, shared * once)
        else:
            multiplying = chip.multiplying(STOCK_ROWS, GB * self.dense, chip.stock_share)
        rest = chip.reading(self.context(READ)) + chip.launch * self.kernels
        return rest + max(reading, multiplying) + experts

    def _bytes(self, bits: int) -> tuple[float, float]:
        """Bytes per parameter, of the dense ones and of experts."""
        per_weight = Quantization(bits, GROUP).bytes_of(1)
        return self.stored or (per_weight, per_weight)


@dataclass(frozen=True)
class MemoryNeed:
    """Bytes that a target takes: of its weights, its drafter and `CONTEXT` tokens."""

    weights: float
    drafter: float
    context: float

    @property
    def total(self) -> float:
        """Their sum."""
        return self.weights + self.drafter + self.context


@cache
def _sizes() -> dict[str, ModelSize]:
    text = files("dflash_mlx.loading").joinpath("sizes.toml").read_text(encoding="utf-8")
    return {name: ModelSize(**row) for name, row in tomllib.loads(text).items()}


def size_of(pair: KnownPair) -> ModelSize | None:
    """The size of a pair's target; None if its shapes are not known."""
    return _sizes().get(pair.short)


def bits_on_load(pair: KnownPair) -> int | None:
    """The bits that the download has to be quantized to on load, to take what `memory_need` says.

    None for a conversion, for weights that their publisher has quantized, and if the size is not
    known.
    """
    size = size_of(pair)
    return BITS if size is not None and size.stored is None and not pair.conversion else None


def memory_need(pair: KnownPair, bits: int = BITS) -> MemoryNeed | None:
    """What a target and its drafter take of the memory; None if its shapes are not known.

    Args:
        bits: of a weight. One that its publisher has quantized stays as it is.
    """
    size = size_of(pair)
    if size is None:
        return None
    return MemoryNeed(size.weights(bits), size.drafter_bytes, size.context(CONTEXT))


def drafter_and_context_bytes(name: str) -> float:
    """Bytes of a known target's drafter and of `CONTEXT` tokens; 0 if the target is not known."""
    pair = pair_of(name)
    need = None if pair is None else memory_need(pair)
    return 0.0 if need is None else need.drafter + need.context
