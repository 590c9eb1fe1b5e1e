"""Predict the best possible time of a step on a chip, from a model's shapes alone.

A forward of few rows takes as long as reading the weights or as multiplying by them, whichever is
longer (Williams, Waterman, Patterson, "Roofline", 2009). Tiles have a fixed number of rows, so
few rows pay for a whole tile. Each kernel also takes a few microseconds, which is most of a plain
step of a small model or of a mixture of experts. Not included: the drafter, waiting for Python.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import mlx.core as mx
import mlx.nn as nn
from mlx.utils import tree_flatten

from ..errors import ConfigError, SettingsError
from ..kernels.costs import guess, stock_seconds, tile_seconds
from ..kernels.shapes import Matrix, matrices
from ..loading.quantization import Quantization
from ..machine.chips import Chip
from ..targets.internals import (
    attention_of,
    classes_of,
    has_key_projection,
    is_mla,
    make_prompt_cache,
    mixer_of,
)
from ..validation import text_config

MAX_ROWS = 16
LEAST_BYTES = 100e6  # of weights; the time of a smaller model's step is Python's
# Kernels of a layer besides its products. Attention: norms of the layer, of queries and of keys,
# two rotations, two writes to the cache, the attention, two sums, the activation. A recurrence:
# convolution, gates, norms, its step. Experts: choosing them, weighting and adding their outputs.
ATTENTION, MIXER, EXPERTS, EXPERT_MATRICES = 12, 16, 14, 3
_DTYPES = {"float32": mx.float32, "float16": mx.float16}


@dataclass(frozen=True)
class Shapes:
    """What a forward of a model reads.

    Attributes:
        matrices: the weight matrices, in the order of the model.
        other: bytes of all other weights (norms, convolutions).
        context: bytes of keys, values and states for the given context.
        launches: kernels of a plain forward.
    """

    matrices: Sequence[Matrix]
    other: int
    context: int
    launches: int

    @property
    def weights(self) -> int:
        """Bytes of all weights, unused experts included."""
        return self.other + sum(m.size * max(1, m.experts) for m in self.matrices)


@dataclass(frozen=True)
class StepPrediction:
    """The prediction for steps of one width.

    Attributes:
        rows: tokens verified at once; 1 is plain decoding.
        milliseconds: time of the forward, with the kernels that would run.
        tokens: expected acceptance length.
        speedup: upper bound, over plain decoding.
        tokens_per_second: upper bound.
    """

    rows: int
    milliseconds: float
    tokens: float
    speedup: float
    tokens_per_second: float


def predict_steps(shapes: Shapes, chip: Chip, acceptance: float) -> list[StepPrediction]:
    """Predict steps of 1 to 16 rows.

    Args:
        shapes: of the model.
        chip: where it would run.
        acceptance: measured acceptance length at 16 rows. Narrower steps are predicted as if every
            draft were right with the same probability.

    Raises `SettingsError` for an acceptance outside 1..16, and for a model that is too small.
    """
    probability = slot_probability(acceptance)
    if shapes.weights < LEAST_BYTES:
        raise SettingsError(
            f"The weights take {shapes.weights / 1e6:.0f} MB: below {LEAST_BYTES / 1e6:.0f} MB the "
            "chip does not decide how long a step takes. Name a larger model with --model."
        )
    rest = chip.reading(shapes.other + shapes.context) + chip.launch * shapes.launches
    ours = {matrix: guess(chip, [matrix]) for matrix in set(shapes.matrices)}

    def forward(rows: int) -> float:
        """Seconds with our kernels where they should be faster."""
        cost = {of: tile_seconds if rows in ours[of] else stock_seconds for of in ours}
        return rest + sum(cost[of](chip, of, rows) for of in shapes.matrices)

    plain, steps = forward(1), []
    for rows in range(1, MAX_ROWS + 1):
        seconds, tokens = forward(rows), sum(probability**slot for slot in range(rows))
        speedup, speed = tokens * plain / seconds, tokens / seconds
        steps.append(StepPrediction(rows, 1e3 * seconds, tokens, speedup, speed))
    return steps


def recommended(steps: Sequence[StepPrediction]) -> StepPrediction:
    """The narrowest step within 1% of the fastest."""
    enough = 0.99 * max(step.tokens_per_second for step in steps)
    return next(step for step in steps if step.tokens_per_second >= enough)


def slot_probability(acceptance: float) -> float:
    """Solve sum(p**i for i in 0..15) = acceptance for p, by bisection. Raises `SettingsError`."""
    if not 1 <= acceptance <= MAX_ROWS:
        raise SettingsError(
            f"The acceptance length at {MAX_ROWS} rows is between 1 and {MAX_ROWS}, "
            f"not {acceptance:g}."
        )
    low, high = 0.0, 1.0
    for _ in range(50):
        middle = (low + high) / 2
        if sum(middle**slot for slot in range(MAX_ROWS)) < acceptance:
            low = middle
        else:
            high = middle
    return high


def shapes_of(model: nn.Module, config: dict[str, Any], context: int) -> Shapes:
    """What a forward of an mlx-lm model reads after `context` tokens."""
    found = list(matrices(model, config))
    multiplied = [matrix for _, _, matrix in found]
    # An embedding that is no head is only looked up: a few rows of it are read.
    looked_up = {
        path
        for path, module in model.named_modules()
        if isinstance(module, nn.Embedding | nn.QuantizedEmbedding)
    } - {path for path, _, _ in found}
    weights = tree_flatten(model.parameters())
    total = sum(x.nbytes for path, x in weights if path.rpartition(".")[0] not in looked_up)
    other = total - sum(matrix.size * max(1, matrix.experts) for matrix in multiplied)
    layers: list[Any] = model.layers
    caches: list[Any] = make_prompt_cache(model)
    states = sum(_state_bytes(*of, context) for of in zip(layers, caches, strict=False))
    return Shapes(multiplied, other, states, _launches(layers, multiplied))


def _launches(layers: Sequence[Any], multiplied: Sequence[Matrix]) -> int:
    """About how many kernels a plain forward runs with MLX's layers."""
    mixers = sum(mixer_of(layer) is not None for layer in layers)
    experts = sum(matrix.experts > 0 for matrix in multiplied) // EXPERT_MATRICES
    attention = len(layers) - mixers
    return len(multiplied) + ATTENTION * attention + MIXER * mixers + EXPERTS * experts


def _state_bytes(layer: Any, cache: Any, context: int) -> int:
    """Bytes of a layer's keys and values in half precision, or of its f32 state, read and written.

    0 for a layer with neither; reads of sparse and compressed attention are not modelled.
    """
    attention, mixer = attention_of(layer), mixer_of(layer)
    rows = min(context, getattr(cache, "max_size", None) or context)
    if attention is not None and has_key_projection(attention):
        width = attention.k_proj.weight.shape[0]
        values = getattr(attention, "v_proj", attention.k_proj)  # Gemma 4 uses keys as values
        return 2 * rows * (width + values.weight.shape[0])
    if is_mla(layer):
        return 2 * rows * (attention.kv_lora_rank + attention.qk_rope_head_dim)
    if mixer is not None and hasattr(mixer, "head_v_dim"):
        return 2 * 4 * mixer.num_v_heads * mixer.head_v_dim * mixer.head_k_dim
    return 0


def model_of(config: dict[str, Any], file: Path, quantization: Quantization | None) -> nn.Module:
    """The mlx-lm model of a config.json, with weights that are never computed.

    Raises `ConfigError` for a config that mlx-lm cannot use or a quantization that is not MLX's,
    and `SettingsError` for a `quantization` of weights that are quantized already.
    """
    try:
        model_class, arguments = classes_of(config)
        model = model_class(arguments.from_dict(config))
    except (ValueError, KeyError, TypeError) as error:
        raise ConfigError(f"{file}: mlx-lm cannot use it ({error}).") from error
    text = text_config(config)
    stored = text.get("torch_dtype") or text.get("dtype")
    model.set_dtype(_DTYPES.get(str(stored), mx.bfloat16))
    own = config.get("quantization")
    if own and quantization:
        raise SettingsError(f"{file}: quantized already, leave out --target-bits.")
    if own:
        size = own["group_size"]

        def choose(path: str, module: Any) -> bool | dict[str, Any]:
            fits = hasattr(module, "to_quantized") and module.weight.shape[-1] % size == 0
            return own.get(path, fits)

        nn.quantize(
            model, size, own["bits"], mode=own.get("mode", "affine"), class_predicate=choose
        )
    elif quantization:
        quantization.apply(model)
    elif "quantization_config" in config:
        raise ConfigError(f"{file}: not in MLX's format; name a conversion of the model.")
    return model
