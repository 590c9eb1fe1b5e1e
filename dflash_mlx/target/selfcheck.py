"""Everything that may run on our kernels in one model, checked on this device before it does.

What a model asks of the kernels follows from its layers: `kernels.selfcheck` knows how to ask it.
Exact decoding is more than its kernels: what MLX itself computes between them (a rotation, a norm)
must not depend on the number of rows either, and no other machine can say so for this one.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from itertools import zip_longest
from typing import Any

import mlx.core as mx
import mlx.nn as nn
from mlx_lm.models.cache import RotatingKVCache

from ..chips import Chip
from ..errors import KernelError
from ..kernels.choose import WIDEST, attention_from, first_row
from ..kernels.gated import gated_units, gated_key, weights_of
from ..kernels.modules import Kernels, can_swap
from ..kernels.selfcheck import (
    ALL_ROWS,
    HALF_ROWS,
    Check,
    attention_checks,
    delta_checks,
    expert_checks,
    product_checks,
)
from ..kernels.shapes import AttentionShape, DeltaShape, dtype_of, matrices
from ..proposal import Proposal
from .attention import attention_shape
from .kv_bits import make_cache
from .recurrent import has_tape
from .target import Target

PROMPT = 40  # tokens that the rows of `check_rows` stand behind


def checks(
    model: Any,
    config: dict[str, Any],
    kernels: Kernels,
    chip: Chip | None,
    measured: Mapping[str, int | None],
    exact: bool,
) -> Iterator[Check]:
    """Each kind of call that a model may make of our kernels, once.

    Args as of `kernels.modules.wire`; `exact`: whether every verify runs on them.
    """
    rows = (1, HALF_ROWS, WIDEST, ALL_ROWS) if exact else (HALF_ROWS, WIDEST)
    seen: set[Any] = set()
    for _, module, matrix in matrices(model, config):
        runs = exact or first_row(chip, matrix, measured) is not None
        kind = matrix.key, dtype_of(module)
        if not runs or kind in seen or not can_swap(module, matrix):
            continue
        seen.add(kind)
        if matrix.experts:
            of = kernels.experts, matrix.key, dtype_of(module), rows, matrix.top_k
            yield from expert_checks(*of, weights_of(module))
        else:
            of = kernels.product, matrix.key, dtype_of(module), rows
            yield from product_checks(*of, weights_of(module))
