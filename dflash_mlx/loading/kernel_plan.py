"""Give a loaded model's layers to our kernels, where those are faster on this machine.

Imported only where our kernels can run.
"""

from __future__ import annotations

import warnings
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import mlx.core as mx
import mlx.nn as nn

from ..errors import KernelError
from ..kernels.autotune import Call, Stopwatch, Timing, autotune, autotune_products
from ..kernels.choose import (
    DEPTHS,
    WIDEST,
    Rows,
    key_at,
    read_choices,
    read_passed_checks,
    store_choices,
    store_passed_checks,
    tensor_key,
)
from ..kernels.modules import (
    EXACT,
    KernelPlan,
    Kernels,
    chosen_together,
    swap_layers,
    will_be_exact,
)
from ..kernels.shapes import activation_dtype, matrices
from ..proposal import Proposal
from ..targets import Target, attention
from ..targets.caches import FullCache
from ..targets.internals import attention_of, has_key_projection, head_size, key_heads

DRAFTER_SECONDS = 1.0  # for timing a drafter's layers
PROMPT = 40  # tokens before the rows that `check_exact` compares


def use_kernels(
    target: Target, kernels: Kernels, exact: bool | None, stopwatch: Stopwatch | None = None
) -> Target:
    """Run a target's layers on our kernels where they are faster on this machine.

    `exact` says whether decoding must be exact; None decides for it where it costs nothing. A
    target that was not timed yet is timed, and the result is saved. Without a `stopwatch`, the
    kernels of an emulator run only in exact decoding. Every launch is checked before its first use.
    If a check fails, MLX's kernel runs with a warning, or exact decoding raises `KernelError`.

    Returns:
        The target.
    """
    model = target.model
    config = target.config
    required = bool(exact)
    begin_checks(kernels)
    if stopwatch is None and kernels.on_device:
        stopwatch = Stopwatch()
    if exact is None and not attention.attends_exactly(target.pairs()):
        exact = False
    rows = read_choices(forms(target))
    if rows is None and stopwatch is not None and not required:
        rows, _ = time_kernels(target, kernels, stopwatch)
    rows = rows or {}
    if exact is None:
        exact = will_be_exact(model, config, rows)
    if exact:
        attention.check_exact(target.pairs())
    kernels.checks.must_pass = exact
    target.kernel_plan = replace(
        swap_layers(model, config=config, kernels=kernels, rows=rows, exact=exact),
        required=required,
    )
    return target


def begin_checks(kernels: Kernels) -> None:
    """Check each launch of these kernels, unless it has passed on this device before."""
    kernels.checks.passed = kernels.checks.passed or set()
    if kernels.on_device:  # an emulator's results say nothing about a device
        kernels.checks.passed = read_passed_checks()
        kernels.checks.on_pass = store_passed_checks


def forms(target: Target) -> list[str]:
    """The forms of a target's weights and attention, one per layer, by which timings are stored."""
    products = [matrix.key for _, _, matrix in matrices(target.model, target.config)]
    return products + attention.attention_keys(target.pairs())


def candidates(target: Target, tensor_units: bool = False) -> Rows:
    """All row counts for each form of a layer that our kernels can run.

    With `tensor_units`, the forms for kernels that use these are included.
    """
    keys = [key for group in chosen_together(target.model, target.config) for key in group]
    keys += [tensor_key(key) for key in keys if tensor_units]
    forms_of_attention = attention.attention_keys(target.pairs())
    keys += [key_at(key, depth) for key in forms_of_attention for depth in DEPTHS]
    return dict.fromkeys(keys, EXACT)


def time_kernels(
    target: Target, kernels: Kernels, stopwatch: Stopwatch
) -> tuple[Rows, list[Timing]]:
    """Time a target as `time_verify_steps` does, and save the result."""
    begin_checks(kernels)
    rows, timings = time_verify_steps(target, kernels, stopwatch)
    if any(timing.ours for timing in timings):  # else the next load times again
        store_choices(forms(target), rows)
    return rows, timings


def time_verify_steps(
    target: Target, kernels: Kernels, stopwatch: Stopwatch
) -> tuple[Rows, list[Timing]]:
    """Time verification forwards of a target with MLX's kernels and with ours.

    Returns the row counts at which ours run, for each form of a layer, and the timings. The target
    must run on MLX's kernels, and does so afterwards.
    """

    def start(kernel_plan: KernelPlan, rows: int, depth: int) -> Call:
        target.kernel_plan = kernel_plan
        session = target.start()
        proposal = Proposal(list(range(rows)))
        if depth:
            _fill(target, session.cache, depth)
            session.position = depth
        return lambda: [session.verify(proposal)[0]]

    attention_forms = list(dict.fromkeys(attention.attention_keys(target.pairs())))
    try:
        return autotune(
            target.model,
            config=target.config,
            attention=attention_forms,
            start=start,
            kernels=kernels,
            stopwatch=stopwatch,
        )
    finally:
        target.kernel_plan = None


def _fill(target: Target, caches: Sequence[Any], depth: int) -> None:
    """Fill the empty caches that have no window with `depth` keys and values, all zeros."""
    filled = []
    for layer, cache in zip(target.parts.owners, caches, strict=True):
        module = attention_of(layer)
        if isinstance(cache, FullCache) and module is not None and has_key_projection(module):
            shape = (1, key_heads(module), depth + cache.step, head_size(module))
            dtype = activation_dtype(module.k_proj)
            cache.keys = mx.zeros(shape, dtype)
            cache.values = mx.zeros(shape, dtype)
            cache.offset = depth
            filled.append(cache.arrays())
    mx.eval(filled)


def use_drafter_kernels(
    drafter: nn.Module, kernels: Kernels, stopwatch: Stopwatch | None = None
) -> None:
    """Run a drafter's layers on our kernels where they are faster.

    Never exact, because drafts do not change the text.
    """
    names = [matrix.key for _, _, matrix in matrices(drafter, {})]
    rows = read_choices(names)
    if stopwatch is None and kernels.on_device:
        stopwatch = Stopwatch(DRAFTER_SECONDS)
    begin_checks(kernels)
    if rows is None and stopwatch is not None:
        rows = autotune_products(drafter, kernels, stopwatch)
        store_choices(names, rows)
    swap_layers(drafter, config={}, kernels=kernels, rows=rows or {})


def check_exact(target: Target) -> None:
    """Check that exact decoding is exact on this device.

    What MLX computes between our kernels (a rotation, a norm) must not depend on the number of rows
    either. If it does, raises `KernelError` if the user asked for exact decoding, else warns and
    turns it off.
    """
    kernel_plan = target.kernel_plan
    if kernel_plan is None or not kernel_plan.exact:
        return
    try:
        check_rows(target)
    except KernelError as error:
        if kernel_plan.required:
            raise
        target.kernel_plan = replace(kernel_plan, exact=False)
        kernel_plan.kernels.checks.must_pass = False
        warnings.warn(f"dflash-mlx: {error.args[0]}", stacklevel=4)


def check_rows(target: Target) -> None:
    """Check that the rows of one verification are bit-identical to the same rows read one by one.

    Raises `KernelError` for a row that differs: drafted text would not be the plain text.
    """
    # Any fixed tokens, spread over the vocabulary.
    ids = [(7919 * i + 13) % target.vocab_size for i in range(PROMPT + WIDEST)]
    prompt = ids[:PROMPT]
    rows = ids[PROMPT:]
    batch_session = target.start()
    single_session = target.start()
    for session in (batch_session, single_session):
        list(session.prefill(prompt))
    logits, _ = batch_session.verify(Proposal(rows))
    for row, token in enumerate(rows):
        single_logits, _ = single_session.verify(Proposal([token]))
        if not mx.array_equal(single_logits[0], logits[row], equal_nan=True).item():
            raise KernelError(
                f"kernels=exact: row {row + 1} of {WIDEST} that {target.name} verifies has other "
                "bits here than alone. Leave it out, and please report this."
            )
        single_session.commit([0])
