"""Which known targets fit a Mac beside their drafter, and how fast they would be: predictions.

configs.json has what a config.json says of shapes, for targets of the registry; a name in place of
a config means the same shapes. A target without one is not predicted.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import dataclass
from importlib.resources import files
from pathlib import Path
from typing import Any

import mlx.nn as nn
from mlx.utils import tree_flatten

from ..loading.quantization import Quantization
from ..loading.registry import KnownPair, pairs
from ..machine.chips import Chip
from ..validation import text_config
from .roofline import Shapes, model_of, predict_steps, shapes_of

CONTEXT = 16_000  # tokens that have to fit
READ = 1024  # tokens of context that a predicted step reads
BITS = (4, 8)  # of weights
ASSUMED = 4.0  # tokens of a step, where the prediction does not depend on it
# Published DFlash drafters have up to six layers of the target's width, in 16 bits.
DRAFT_LAYERS, DRAFT_LAUNCHES, DRAFT_ATTENTION = 6, 120, 2 * (4096 + 1024)
MXFP4 = "gpt_oss"  # the family that is published so; conversions have 8 bits elsewhere


@dataclass(frozen=True)
class KnownModel:
    """A target of the registry in some bits, with its default drafter.

    Attributes:
        pair: the target.
        bits: of a weight.
        shapes: what a step reads.
        drafter: bytes of a drafter, roughly.
        memory: bytes of weights, drafter, and keys and values of `CONTEXT` tokens.
    """

    pair: KnownPair
    bits: int
    shapes: Shapes
    drafter: int
    memory: int

    def predict(self, chip: Chip) -> dict[str, Any]:
        """Predict speeds on a chip, from bytes, operations and launches.

        plain is tokens per second without a drafter. step_cost is the time of a step that drafts
        and verifies 16 rows, in plain steps: drafting is faster where more tokens are accepted.
        drafted is tokens per second in such steps; None without a published acceptance length.
        """
        acceptance = self.pair.acceptance
        plain, *_, widest = predict_steps(self.shapes, chip, acceptance or ASSUMED)
        head = max(self.shapes.matrices, key=lambda matrix: matrix.columns)
        drafting = chip.reading(self.drafter + head.size) + DRAFT_LAUNCHES * chip.launch
        step = 1e-3 * widest.milliseconds + drafting
        return {
            "target": self.pair.targets[0],
            "bits": self.bits,
            "gigabytes": self.memory / 1e9,
            "plain": plain.tokens_per_second,
            "step_cost": 1e3 * step / plain.milliseconds,
            "drafted": None if acceptance is None else acceptance / step,
        }


def known_models() -> Iterator[KnownModel]:
    """The targets of the registry whose shapes are known, in each of `BITS`; nothing is loaded."""
    configs = json.loads(files(__package__).joinpath("configs.json").read_text("utf-8"))
    measured: dict[tuple[str, int], tuple[Shapes, int]] = {}
    for pair in pairs():
        name: Any = pair.targets[0].rpartition("/")[2]
        config = configs.get(name)
        if isinstance(config, str):
            name, config = config, configs[config]
        if config is None or pair.unsupported:
            continue
        # One that its publisher has quantized stays as it is.
        for bits in BITS if pair.published is None else BITS[:1]:
            if (name, bits) not in measured:
                model = _quantized(config, bits)
                total = sum(weight.nbytes for _, weight in tree_flatten(model.parameters()))
                total += shapes_of(model, config, CONTEXT).context
                measured[name, bits] = shapes_of(model, config, READ), total
            (shapes, memory), drafter = measured[name, bits], _drafter_bytes(config)
            yield KnownModel(pair, bits, shapes, drafter, memory + drafter)


def _quantized(config: dict[str, Any], bits: int) -> nn.Module:
    """A model in some bits as it is usually converted, with weights that are never computed."""
    experts_apart = config["model_type"] == MXFP4
    model = model_of(config, Path(), None if experts_apart else Quantization.of(bits))
    if experts_apart:

        def is_expert(path: str, module: nn.Module) -> bool:
            return "experts." in path and hasattr(module, "to_quantized")

        nn.quantize(model, 32, 4, mode="mxfp4", class_predicate=is_expert)
        Quantization(8, 64).apply(model)
    return model


def _drafter_bytes(config: dict[str, Any]) -> int:
    """The size of a DFlash drafter for a target, with its projection of taps."""
    text = text_config(config)
    width, experts = text["hidden_size"], text.get("num_experts") or text.get("num_local_experts")
    inner = 3 * width if experts else text["intermediate_size"]  # drafters of experts are dense
    return 2 * DRAFT_LAYERS * width * (DRAFT_ATTENTION + 3 * inner + width)
