"""What rounds would cost at best on a chip, computed from a model's shapes: a prediction.

A forward of few rows takes as long as reading its weights or as multiplying by them, whichever is
longer (Williams, Waterman, Patterson, "Roofline", 2009). Tiles have a fixed number of rows, so
few rows pay for the whole tile. Left out: the drafter, norms, launches, synchronizing.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import mlx.core as mx
import mlx.nn as nn
from mlx.utils import tree_flatten

from ..errors import ConfigError, SettingsError
from ..kernels.choose import is_large, stock_seconds, tile_seconds
from ..kernels.counts import product_counts
from ..kernels.shapes import Matrix, matrices
from ..kernels.verify_matmul import ENOUGH_TILES, ENOUGH_TILES_LARGE
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

WIDEST = 16
_DTYPES = {"float32": mx.float32, "float16": mx.float16}


@dataclass(frozen=True)
class Shapes:
    """What a forward of a model reads.

    Attributes:
        matrices: its weight matrices, in the order of the model.
        other: bytes of all other weights (norms, convolutions).
        context: bytes of keys, values and states at the context asked for.
    """

    matrices: Sequence[Matrix]
    other: int
    context: int

    @property
    def weights(self) -> int:
        """Bytes of all weights, experts that no token takes among them."""
        return self.other + sum(m.size * max(1, m.experts) for m in self.matrices)

    def bytes_of(self, rows: int) -> float:
        """Bytes that a forward of so many rows reads."""
        weights = sum(matrix.size * matrix.active(rows) for matrix in self.matrices)
        return weights + self.other + self.context


@dataclass(frozen=True)
class Round:
    """The prediction for one width.

    Attributes:
        rows: tokens verified at once.
        gigabytes: read by the forward.
        stock_ms, tile_ms: of the forward, with MLX's kernels and with 16-row tiles.
        tokens: expected of a round.
        stock_speedup, tile_speedup: ceilings, over plain decoding with MLX's kernels.
        tokens_per_second: with the faster of the two; a ceiling, too.
    """

    rows: int
    gigabytes: float
    stock_ms: float
    tile_ms: float
    tokens: float
    stock_speedup: float
    tile_speedup: float
    tokens_per_second: float


def rounds(shapes: Shapes, chip: Chip, acceptance: float) -> list[Round]:
    """The prediction for rounds of 1 to 16 rows.

    Args:
        shapes: of the model.
        chip: where it would run.
        acceptance: output tokens a round at 16 rows, measured somewhere. Narrower rounds keep
            what they would if every draft were right with the same probability.

    Raises `SettingsError` for an acceptance outside 1..16.
    """
    share = chance(acceptance)
    rest = chip.reading(shapes.other + shapes.context)
    plain = rest + sum(stock_seconds(chip, matrix, 1) for matrix in shapes.matrices)
    result = []
    for rows in range(1, WIDEST + 1):
        stock = rest + sum(stock_seconds(chip, matrix, rows) for matrix in shapes.matrices)
        tile = rest + sum(tile_seconds(chip, matrix, rows) for matrix in shapes.matrices)
        tokens = sum(share**slot for slot in range(rows))
        result.append(
            Round(
                rows=rows,
                gigabytes=shapes.bytes_of(rows) / 1e9,
                stock_ms=1e3 * stock,
                tile_ms=1e3 * tile,
                tokens=tokens,
                stock_speedup=tokens * plain / stock,
                tile_speedup=tokens * plain / tile,
                tokens_per_second=tokens / min(stock, tile),
            )
        )
    return result


def kernel_counts(shapes: Shapes, chip: Chip) -> list[dict[str, Any]]:
    """What our kernel does for each shape of a model's matrices, one product of 16 rows each.

    Each has the shape's name, how many matrices have it, and the fields of `Counts`.
    """
    enough = ENOUGH_TILES_LARGE if is_large(chip.name) else ENOUGH_TILES
    counted = [
        (matrix, layers, product_counts(matrix, WIDEST, enough))
        for matrix, layers in Counter(shapes.matrices).items()
    ]
    return [
        {"matrix": matrix.key, "layers": layers, **asdict(counts)}
        for matrix, layers, counts in counted
        if counts is not None
    ]


def recommended(rows: Sequence[Round]) -> Round:
    """The fastest width, and the narrowest of those within a hundredth of it."""
    best = max(row.tokens_per_second for row in rows)
    return next(row for row in rows if row.tokens_per_second >= 0.99 * best)


def chance(acceptance: float) -> float:
    """The p of sum(p**i for i in 0..15) = acceptance, by bisection. Raises `SettingsError`."""
    if not 1 <= acceptance <= WIDEST:
        raise SettingsError(
            f"Tokens of a round of {WIDEST} rows are between 1 and {WIDEST}, not {acceptance:g}."
        )
    low, high = 0.0, 1.0
    for _ in range(50):
        middle = (low + high) / 2
        if sum(middle**slot for slot in range(WIDEST)) < acceptance:
            low = middle
        else:
            high = middle
    return high


def shapes_of(model: nn.Module, config: dict[str, Any], context: int) -> Shapes:
    """What a forward of an mlx-lm model reads behind so many tokens of context."""
    found = [matrix for _, _, matrix in matrices(model, config)]
    caches: list[Any] = make_prompt_cache(model)
    layers: list[Any] = model.layers
    looked_up = {
        path
        for path, module in model.named_modules()
        if isinstance(module, nn.Embedding | nn.QuantizedEmbedding)
    } - {path for path, _, _ in matrices(model, config)}
    every = sum(
        value.nbytes
        for path, value in tree_flatten(model.parameters())
        if path.rpartition(".")[0] not in looked_up
    )
    other = every - sum(matrix.size * max(1, matrix.experts) for matrix in found)
    depths = (
        _context_bytes(layer, cache, context) for layer, cache in zip(layers, caches, strict=False)
    )
    return Shapes(found, other, sum(depths))


def _context_bytes(layer: Any, cache: Any, context: int) -> int:
    """Bytes of a layer's keys and values in half precision, or of its f32 state, read and written.

    0 for a layer that keeps neither (what sparse and compressed attention reads is not modelled).
    """
    attention, mixer = attention_of(layer), mixer_of(layer)
    rows = min(context, getattr(cache, "max_size", None) or context)
    if attention is not None and has_key_projection(attention):
        width = attention.k_proj.weight.shape[0]
        values = getattr(attention, "v_proj", attention.k_proj)  # Gemma 4 has keys for values
        return 2 * rows * (width + values.weight.shape[0])
    if is_mla(layer):
        return 2 * rows * (attention.kv_lora_rank + attention.qk_rope_head_dim)
    if mixer is not None and hasattr(mixer, "head_v_dim"):
        return 2 * 4 * mixer.num_v_heads * mixer.head_v_dim * mixer.head_k_dim
    return 0


def model_of(config: dict[str, Any], file: Path, quantization: Quantization | None) -> nn.Module:
    """The mlx-lm model of a config.json with weights that are never computed: shapes alone.

    Raises `ConfigError` for a config that mlx-lm cannot use or whose quantization is not MLX's,
    and `SettingsError` for bits asked of weights that are quantized already.
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
        nn.quantize(
            model,
            own["group_size"],
            own["bits"],
            mode=own.get("mode", "affine"),
            class_predicate=lambda path, module: _own_choice(own, path, module),
        )
    elif quantization:
        quantization.apply(model)
    elif "quantization_config" in config:
        raise ConfigError(f"{file}: not in MLX's format; name a conversion of the model.")
    return model


def _own_choice(own: dict[str, Any], path: str, module: Any) -> bool | dict[str, Any]:
    """How a config's quantization section treats a module."""
    if path in own:
        return own[path]
    if not hasattr(module, "to_quantized"):
        return False
    return module.weight.shape[-1] % own["group_size"] == 0
