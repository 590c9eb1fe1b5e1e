"""Self-check of a model: every kernel call that it may make, on this device.

The model's layers determine the calls; `kernels.selfcheck` runs them. Exact decoding also needs
that what MLX computes between the kernels (a rotation, a norm) does not depend on the number of
rows, which only the device can show.
"""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial
from typing import Any

import mlx.core as mx
import mlx.nn as nn

from ..errors import KernelError
from ..kernels.choose import DEPTHS, WIDEST, Rows, key_at, tensor_key
from ..kernels.fused import UNITS, gated_key, of_one_form, projections_key, shared_inputs
from ..kernels.modules import Kernels, can_swap, uses_tensor_units
from ..kernels.selfcheck import (
    ALL_ROWS,
    HALF_ROWS,
    Check,
    attention_checks,
    delta_checks,
    product_checks,
)
from ..kernels.shapes import Matrix, dtype_of, matrices
from ..kernels.weights import weights_of
from ..proposal import Proposal
from .attention import attention_shapes
from .recurrences import delta_shape
from .target import Target

PROMPT = 40  # tokens before the rows that `check_rows` compares


def model_checks(target: Target, kernels: Kernels, choices: Rows, exact: bool) -> Iterator[Check]:
    """One check per kind of kernel call that a target may make.

    Args as in `kernels.modules.wire`; `choices` are its rows.
    """
    yield from weight_checks(target.model, target.config, kernels, choices, exact)
    rows = _rows(exact)
    for shape in attention_shapes(target.pairs()):
        if exact or any(choices.get(key_at(shape.key, depth)) for depth in DEPTHS):
            yield from attention_checks(kernels.attention, shape, {*rows, ALL_ROWS})
    for delta in dict.fromkeys(filter(None, map(delta_shape, target.layers))) if exact else ():
        yield from delta_checks(kernels.delta, kernels.delta_replay, delta, rows)


def weight_checks(
    model: nn.Module,
    config: dict[str, Any],
    kernels: Kernels,
    choices: Rows,
    exact: bool,
) -> Iterator[Check]:
    """The checks of products, gated units and fused projections, which drafters have too."""
    ours: dict[int, Matrix] = {}  # by the identity of the module
    on_tensors: set[int] = set()  # of these, the ones that run on tensor units
    kinds: dict[tuple[str, mx.Dtype], nn.Module] = {}
    for _, module, matrix in matrices(model, config):
        if (exact or choices.get(matrix.key)) and can_swap(module, matrix):
            ours[id(module)] = matrix
            if not exact and uses_tensor_units(module, matrix, kernels, choices):
                on_tensors.add(id(module))
            kinds.setdefault((matrix.key, dtype_of(module)), module)
    for (key, _), module in kinds.items():
        of = ours[id(module)], exact, module
        yield from _products(kernels, key, *of)
        if id(module) in on_tensors:
            yield from _products(kernels, tensor_key(key), *of, tensor_units=True)
    units: dict[str | None, Any] = {}
    for unit in model.modules():
        if type(unit) in UNITS and id(unit.gate_proj) in ours:
            units.setdefault(gated_key(unit), unit)
    for name, unit in units.items():
        if name is not None:
            pair, gate = (unit.gate_proj, unit.up_proj), id(unit.gate_proj)
            on = gate in on_tensors
            yield from _products(kernels, name, ours[gate], exact, *pair, tensor_units=on)
    groups: dict[str, list[Any]] = {}
    for sharing in shared_inputs(model):
        swapped = [layer for layer in sharing if id(layer) in ours]
        for layers in of_one_form(swapped, lambda layer: id(layer) in on_tensors):
            groups.setdefault(projections_key(layers), layers)
    for name, layers in groups.items():
        fused = [weights_of(layer, id(layer) in on_tensors) for layer in layers]
        multiply, dtype = partial(kernels.qkv, weights=fused), dtype_of(layers[0])
        yield from product_checks(multiply, name, dtype, _rows(exact), fused)


def _products(
    kernels: Kernels,
    key: str,
    matrix: Matrix,
    exact: bool,
    *modules: nn.Module,
    tensor_units: bool = False,
) -> Iterator[Check]:
    """The checks of one layer's product, or of gate and up."""
    weights = [weights_of(m, tensor_units) for m in modules]

    def multiply(x: mx.array, *experts: mx.array) -> list[mx.array]:
        kernel = kernels.experts if experts else kernels.product
        return [kernel(x, weights[0], *experts, *weights[1:])]

    of = key, dtype_of(modules[0]), _rows(exact), weights, len(weights) == 2, matrix.top_k
    return product_checks(multiply, *of)


def check_rows(target: Target) -> None:
    """Compare the rows of one verify with the same rows one after another, bit for bit.

    Raises `KernelError` for a row that differs: drafted text would not be the plain text.
    """
    ids = [(7919 * i + 13) % target.vocab_size for i in range(PROMPT + WIDEST)]
    prompt, rows = ids[:PROMPT], ids[PROMPT:]
    together, alone = target.start(), target.start()
    for session in (together, alone):
        list(session.prefill(prompt))
    logits, _ = together.verify(Proposal(rows))
    for row, token in enumerate(rows):
        one, _ = alone.verify(Proposal([token]))
        if not mx.array_equal(_bits(one[0]), _bits(logits[row])).item():
            raise KernelError(
                f"kernels=exact: row {row + 1} of {WIDEST} that {target.name} verifies has other "
                "bits here than alone. Leave it out, and please report this."
            )
        alone.commit([0])


def _bits(x: mx.array) -> mx.array:
    return x.view({2: mx.uint16, 4: mx.uint32}[x.dtype.size])


def _rows(exact: bool) -> tuple[int, ...]:
    return (1, HALF_ROWS, WIDEST, ALL_ROWS) if exact else (HALF_ROWS, WIDEST)
